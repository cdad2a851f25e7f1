"""Exchange sizes: the elements that a rank receives in a gloo collective, and sends in any.

A direct exchange sends one message per pair of ranks; a native one is a single library call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Receives:
    """The sizes in elements of the buffers that a rank borrows for one reduction.

    at_launch: borrowed from the launch to the end. at_end: borrowed once the transfers have ended.
    """

    at_launch: tuple[int, ...]
    at_end: tuple[int, ...] = ()


@lru_cache(maxsize=4096)
def reduce_scatter_receives(numel: int, size: int, is_native: bool) -> Receives:
    """Return the buffers to borrow for reducing a slice of `numel` elements over `size` ranks.

    A direct exchange receives one of the `size` - 1 messages in the result itself.
    """
    return Receives((numel * size,) if is_native else (numel,) * (size - 2))


@lru_cache(maxsize=4096)
def all_reduce_receives(numel: int, rank: int, size: int) -> Receives:
    """Return the buffers that a rank borrows to all-reduce `numel` elements.

    Two ranks exchange them whole. Otherwise each rank sums one slice and sends it to all others.
    """
    if size == 2:
        return Receives((numel,))
    mine = slice_numel(numel, rank, size)
    return Receives((mine,) * (size - 1), (mine,))


def slice_numel(numel: int, rank: int, size: int) -> int:
    """Return the number of elements of a rank's slice, as `Tensor.tensor_split` cuts slices."""
    return numel // size + (rank < numel % size)


def part_sent(part: int, size: int) -> int:
    """Return the elements that a rank sends to all-gather a part, or reduce-scatter into parts."""
    return part * (size - 1)


def all_reduce_sent(numel: int, rank: int, size: int) -> int:
    """Return the elements that `rank` sends: the others' slices, then its own sum to each of them.

    With equal slices this is 2 * (size - 1) / size of all elements, for every algorithm.
    """
    own = slice_numel(numel, rank, size)
    return numel - own + own * (size - 1)
