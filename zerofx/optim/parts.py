"""A flat run in parts that stay in the processor's cache: what temporaries of an update cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

# 256 KiB of float32: the temporaries of a part stay in a core's cache, so that an update reads and
# writes parameters, gradients and states once. An accelerator needs longer ones to be kept busy.
PART = 1 << 16
DEVICE_PART = 1 << 24


def parts(flat: Tensor) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of elements that cover a flat tensor."""
    size = PART if flat.device.type == "cpu" else DEVICE_PART
    for start in range(0, flat.numel(), size):
        yield start, min(start + size, flat.numel())


def overlaps(
    bounds: Sequence[tuple[int, int]], start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (number, begin, end) of the ranges that reach into start:stop, relative to start."""
    for number, (begin, end) in enumerate(bounds):
        if begin < stop and end > start:
            yield number, max(begin, start) - start, min(end, stop) - start
