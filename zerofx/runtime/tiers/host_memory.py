"""Host memory outside torch's allocator: pinned, or pages of its own."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

HUGE_BYTES = 8 << 20  # from which on rounding up to huge pages is small


class Place:
    """A stretch of host memory, and the last copy out of it or into it."""

    __slots__ = ("event", "memory")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory, _ = host_memory(nbytes, device)
        self.event: Any = None

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


def host_memory(nbytes: int, device: torch.device) -> tuple[Tensor, mmap.mmap | None]:
    """Return bytes of host memory that copies from and to a device can use, all zero.

    With them comes the map they lie in, None where they are pinned.

    They lie outside torch's allocator, as pinned memory does on CUDA: what counts there counts the
    device alone.
    """
    with torch.inference_mode(False):  # it outlives the mode that first asked for it
        if device.type == "cuda":
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True), None
        held = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # an advice: fewer faults, and fewer pages for disks to pin
                held.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(held, dtype=torch.uint8)[:nbytes], held
