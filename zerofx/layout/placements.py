"""Placements: how a value is distributed over the ranks of one mesh axis.

The part of a rank is contiguous, or, on an axis in zigzag order, two chunks: of N ranks, rank r has
chunks r and 2N-1-r of 2N. If the dimension is a sequence under a causal mask, all ranks then have
equally many pairs of positions. The order is a property of the axis (`Mesh.zigzag`): all values
that are cut over it are cut alike, so that rules about parts do not depend on it.

Source: Brandon et al. 2023, "Striped Attention", and Zhu 2024, "ring-flash-attention", for zigzag.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Replicated:
    """Every rank has the same whole value."""

    def __str__(self) -> str:
        return "R"

    __repr__ = __str__


@dataclass(frozen=True)
class Partial:
    """Every rank has a summand of the value, which is the sum over the axis."""

    def __str__(self) -> str:
        return "P"

    __repr__ = __str__


@dataclass(frozen=True)
class Cut:
    """Every rank has a part of dimension `dim`.

    The dimension is viewed as (groups, ranks, rest) and cut in the middle. With 3 groups, a product
    that computes queries, keys and values at once gives each rank its heads of all three.
    """

    dim: int
    groups: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.groups == 1 else f"S({self.dim}, groups={self.groups})"

    __repr__ = __str__


@dataclass(frozen=True)
class Owned:
    """Every rank has the whole shape: its own rows along `dim` as they are, zeros for all others.

    Rows are in groups, one for each expert, and a rank owns those of consecutive groups. Two such
    values have their rows on the same ranks only if the ends of the groups are the same value.

    ends: the digest of that value's expression.
    """

    dim: int
    ends: str

    def __str__(self) -> str:
        return f"D({self.dim}, {self.ends})"

    __repr__ = __str__


Placement = Replicated | Partial | Cut | Owned
R, P = Replicated(), Partial()


def serves(now: Placement, need: Placement) -> bool:
    """Return whether a value may be read under another placement as it is.

    Rows that are zero on all ranks but one are summands of the whole.
    """
    return now == need or (need == P and isinstance(now, Owned))


def owned_groups(number: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the half-open range of the groups, of `number`, whose rows a rank owns."""
    each = number // ranks
    return rank * each, (rank + 1) * each


def fits(shape: Sequence[int], cut: Cut, ranks: int) -> bool:
    """Return whether a value of this shape can be cut in this way."""
    return 0 <= cut.dim < len(shape) and shape[cut.dim] % (cut.groups * ranks) == 0


def local_shape(shape: Sequence[int], placement: Placement, ranks: int) -> list[int]:
    """Return the shape of one rank's part of a value of `shape`."""
    local = list(shape)
    if isinstance(placement, Cut):
        local[placement.dim] //= ranks
    return local


def chunks_of(rank: int, ranks: int, zigzag: bool) -> tuple[int, ...]:
    """Return the numbers of a rank's chunks, in the order in which its part holds them."""
    return (rank, 2 * ranks - 1 - rank) if zigzag else (rank,)


def num_chunks(ranks: int, zigzag: bool) -> int:
    """Return into how many chunks each group of a dimension is cut."""
    return 2 * ranks if zigzag else ranks


def pieces(
    whole: Tensor, mine: Tensor, cut: Cut, rank: int, ranks: int, zigzag: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the chunks of a rank as views: of a whole value, and of the rank's part of it."""
    dim, numbers = cut.dim, chunks_of(rank, ranks, zigzag)
    count = num_chunks(ranks, zigzag)
    rest = whole.shape[dim] // (cut.groups * count)
    each = whole.unflatten(dim, (cut.groups, count, rest))
    own = mine.unflatten(dim, (cut.groups, len(numbers), rest))
    for at, number in enumerate(numbers):
        yield each.select(dim + 1, number), own.select(dim + 1, at)


def part(x: Tensor, cut: Cut, rank: int, ranks: int, zigzag: bool = False) -> Tensor:
    """Return a rank's part of a whole value as a copy with the same memory order.

    Shapes: x [..., n, ...] with n at `cut.dim`, the part [..., n / ranks, ...].
    """
    shape = local_shape(x.shape, cut, ranks)
    made = x.new_empty_strided(shape, strides_like(x, shape))
    for theirs, own in pieces(x, made, cut, rank, ranks, zigzag):
        own.copy_(theirs)
    return made


def join(parts: Sequence[Tensor], cut: Cut, zigzag: bool = False) -> Tensor:
    """Return the whole value made of the parts of all ranks, in the memory order of the parts."""
    shape = list(parts[0].shape)
    shape[cut.dim] *= len(parts)
    whole = parts[0].new_empty_strided(shape, strides_like(parts[0], shape))
    return join_into(whole, parts, cut, zigzag)


def join_into(whole: Tensor, parts: Sequence[Tensor], cut: Cut, zigzag: bool = False) -> Tensor:
    """Fill a whole value from the parts of all ranks, and return it."""
    for rank, mine in enumerate(parts):
        for theirs, own in pieces(whole, mine, cut, rank, len(parts), zigzag):
            theirs.copy_(own)
    return whole


def cut_into(parts: Sequence[Tensor], whole: Tensor, cut: Cut, zigzag: bool = False) -> None:
    """Fill the parts of all ranks from a whole value."""
    for rank, mine in enumerate(parts):
        for theirs, own in pieces(whole, mine, cut, rank, len(parts), zigzag):
            own.copy_(theirs)


def is_dense(x: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps, in any order of dimensions."""
    return x.permute(memory_order(x)).is_contiguous()


def leads(x: Tensor, cut: Cut, zigzag: bool = False) -> bool:
    """Return whether the parts of a dense value are consecutive in memory."""
    first = next(d for d in memory_order(x) if d == cut.dim or x.shape[d] > 1)
    return cut.groups == 1 and first == cut.dim and not zigzag


def memory_order(x: Tensor) -> list[int]:
    """Return the dimensions of a tensor in the order of its memory, the slowest first.

    A dimension that has no memory of its own (an expanded one: its stride is 0) keeps its place. At
    the end, it would come between the elements of rows, which kernels of attention read as
    contiguous.
    """
    strides = x.stride()
    own = sorted((d for d in range(x.dim()) if strides[d] != 0), key=lambda d: (-strides[d], d))
    ordered = iter(own)
    return [d if strides[d] == 0 else next(ordered) for d in range(x.dim())]


def in_order_of(like: Tensor, x: Tensor) -> Tensor:
    """Return `x` as a dense tensor with the memory order of `like`."""
    order = memory_order(like)
    inverse = [order.index(d) for d in range(like.dim())]
    return x.permute(order).contiguous().permute(inverse)


def strides_like(like: Tensor, shape: Sequence[int]) -> list[int]:
    """Return the strides of a dense tensor of `shape` with the memory order of `like`."""
    order = memory_order(like)
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return strides


@dataclass(frozen=True)
class Part:
    """The cut of a parameter over a mesh axis. shape: the shape of the whole parameter.

    is_given: whether the model itself computes with its part; otherwise zerofx cuts a parameter
        that the model has whole.
    """

    shape: tuple[int, ...]
    cut: Cut
    ranks: int
    is_given: bool = False

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of each rank's part."""
        return tuple(local_shape(self.shape, self.cut, self.ranks))

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's part of the whole parameter."""
        return part(whole, self.cut, rank, self.ranks)

    def within(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a dense whole parameter as a view.

        Shapes: whole [..., n, ...] with n at the dimension that is cut, the view [..., groups,
        n / (groups * ranks), ...].
        """
        dim, groups = self.cut.dim, self.cut.groups
        return whole.unflatten(dim, (groups, self.ranks, -1)).select(dim + 1, rank)

    def ranges(self, rank: int, local: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the flat whole that correspond to ranges of a rank's flat part.

        The whole is viewed as (outer, groups, ranks, run); a rank has one run of every `ranks`.
        """
        dim, groups = self.cut.dim, self.cut.groups
        run = math.prod(self.shape[dim:]) // (groups * self.ranks)
        for start, stop in local:
            while start < stop:
                number, at = divmod(start, run)
                length = min(stop - start, run - at)
                begin = (number * self.ranks + rank) * run + at
                yield begin, begin + length
                start += length

    def rows(self, rank: int, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Map rows first:first+count of a part's cut dimension to rows of the whole.

        Yields (row of the part, row of the whole, number of rows) for each group that has some.
        """
        rest = self.shape[self.cut.dim] // (self.cut.groups * self.ranks)
        stop = first + count
        while first < stop:
            group, at = divmod(first, rest)
            length = min(stop - first, rest - at)
            yield first, (group * self.ranks + rank) * rest + at, length
            first += length
