"""What a rank receives in a collective over gloo, and what it sends in any, in elements.

A direct exchange is one message per pair of ranks; a native one is a single call of the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Receives:
    """The elements of each buffer that a rank borrows for one reduction.

    at_launch: from its launch to its end. at_end: more, when the transfers have ended.
    """

    at_launch: tuple[int, ...]
    at_end: tuple[int, ...] = ()


@lru_cache(maxsize=4096)
def reduce_scatter_receives(numel: int, size: int, is_native: bool) -> Receives:
    """Return what a rank borrows to reduce its slice of `numel` elements over `size` ranks."""
    return Receives((numel * size,) if is_native else (numel,) * (size - 1))


@lru_cache(maxsize=4096)
def all_reduce_receives(numel: int, rank: int, size: int) -> Receives:
    """Return what a rank borrows to reduce all of `numel` elements.

    Two ranks swap them whole. More ranks each sum one slice, in a buffer that they send round.
    """
    if size == 2:
        return Receives((numel,))
    mine = slice_numel(numel, rank, size)
    return Receives((mine,) * (size - 1), (mine,))


def slice_numel(numel: int, rank: int, size: int) -> int:
    """Return the elements of a rank's slice, cut as `Tensor.tensor_split` cuts."""
    return numel // size + (rank < numel % size)


def part_sent(part: int, size: int) -> int:
    """Return what a rank sends in an all-gather of its part, or a reduce-scatter into parts."""
    return part * (size - 1)


def all_reduce_sent(numel: int, rank: int, size: int) -> int:
    """Return the elements that `rank` sends: the slices of the others, then its own to each.

    On equal slices this is 2 * (size - 1) / size of all, whatever the algorithm.
    """
    own = slice_numel(numel, rank, size)
    return numel - own + own * (size - 1)
