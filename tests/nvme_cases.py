"""What the tests of the NVMe tier share: disks that misbehave, and engines that are watched."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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


def without_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every file system refuse O_DIRECT when opening, as many in memory do."""
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
