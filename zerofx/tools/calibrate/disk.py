"""Probes of a folder's disk: reads and writes of zerofx.nvme, by size of request."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from zerofx import nvme
from zerofx.tools.calibrate.probe import Probe

REQUEST_BYTES = (256 << 10, 1 << 20, 8 << 20)
FILE_BYTES = 64 << 20
DEPTH = 4


class Disk:
    """A scratch file in a folder, written and read in requests of several sizes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "calibrate.bin"
        self._file = nvme.File(self._path, "w")
        self._file.reserve(FILE_BYTES)
        self._buffers = [nvme.aligned_empty(max(REQUEST_BYTES) // 4) for _ in range(DEPTH)]
        for buffer in self._buffers:
            torch.nn.init.normal_(buffer)  # a disk may compress zeros
        self.probes = [
            Probe(f"nvme_{way}", size, FILE_BYTES, lambda: lambda: None)
            for way in ("write", "read")
            for size in REQUEST_BYTES
        ]

    def measure(self) -> None:
        """Write and read the whole file once for each size of request."""
        for probe in self.probes:
            submit = self._file.submit_write if "write" in probe.curve else self._file.submit_read
            size = int(probe.x)
            began = time.perf_counter()
            under_way: list[nvme.Request] = []
            for number, offset in enumerate(range(0, FILE_BYTES, size)):
                if len(under_way) == DEPTH:
                    under_way.pop(0).wait()
                buffer = self._buffers[number % DEPTH][: size // 4]
                under_way.append(submit(buffer, offset))
            for request in under_way:
                request.wait()
            probe.found_s.append(time.perf_counter() - began)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
        self._path.unlink()
