"""What the tests of the NVMe tier share: disks that misbehave, and engines that are watched."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zerofx import nvme
from zerofx.nvme.checksum import BLOCK_BYTES

Call = Callable[[int, Any, int], int]


def random_bytes(nbytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


class Disk:
    """Stands between the engine and the system's calls, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int, int, int]] = []  # name, buffers, bytes moved, offset
        self.gate = threading.Event()  # every call waits for it
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.faults: list[Callable[[str, Call, int, Any, int], int | None]] = []
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, self._between(name, getattr(os, name)))

    def _between(self, name: str, real: Call) -> Call:
        def call(fd: int, buffers: Any, offset: int) -> int:
            self.entered.release()
            assert self.gate.wait(30), "nobody opened the gate"
            for fault in self.faults:
                if (moved := fault(name, real, fd, buffers, offset)) is not None:
                    break
            else:
                moved = real(fd, buffers, offset)
            self.calls.append((name, len(buffers), moved, offset))
            return moved

        return call

    def fails(self, which: str, code: int, at: Callable[[int], bool] = lambda offset: True) -> None:
        """Let calls of one kind fail where `at` says so of their offset."""

        def fault(name: str, real: Call, fd: int, buffers: Any, offset: int) -> None:
            if name == which and at(offset):
                raise OSError(code, os.strerror(code))

        self.faults.append(fault)

    def moves_at_most(self, nbytes: int) -> None:
        """Let every call move fewer bytes than it was asked to."""

        def fault(name: str, real: Call, fd: int, buffers: Any, offset: int) -> int:
            return min(real(fd, buffers, offset), nbytes)  # what it says; the rest is moved again

        self.faults.append(fault)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def engine() -> Any:
    """An I/O engine of two threads that moves small pieces."""
    with nvme.IOEngine(num_threads=2, piece_bytes=256 << 10) as engine:
        yield engine


@pytest.fixture
def file(tmp_path: Path, engine: Any) -> Any:
    """A file of 2 MiB that is open for writing."""
    with nvme.File(tmp_path / "file", "w", engine=engine) as file:
        file.reserve(2 << 20)
        yield file


def without_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every file system refuse O_DIRECT when opening, as many in memory do."""
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


# -- stores -----------------------------------------------------------------------------------
SIZES = {"a": 10, "empty": 0, "b": 2 * BLOCK_BYTES, "c": 5 * BLOCK_BYTES + 123}


@pytest.fixture
def store_engine() -> Any:
    with nvme.IOEngine(num_threads=3, piece_bytes=2 * BLOCK_BYTES) as engine:
        yield engine


def filled(folder: Path, engine: Any, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    store = nvme.NvmeStore.create(folder, SIZES, label="rank0-opt", engine=engine, **options)
    data = {name: random_bytes(n, i) for i, (name, n) in enumerate(SIZES.items())}
    for name, x in data.items():
        store.write(name, x)
    return store, data


@pytest.fixture
def kept(tmp_path: Path, store_engine: Any) -> Any:
    """A store that was closed to be read back: its path, its data, and where things lie."""
    store, data = filled(tmp_path, store_engine)
    layout = store._layout
    store.close(delete=False)
    return Path(store.path), data, layout


def change(path: Path, offset: int, new: bytes | None = None) -> None:
    """Flip a bit of the byte at `offset`, or replace bytes."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(new or bytes([old[0] ^ 1]))
