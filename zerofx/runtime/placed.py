"""Layout conversions: how a rank converts values over an axis of the mesh (see `ops.placed`).

Sums run in rank order, like all sums in zerofx. Each function takes plain tensors and returns a new
one with the same memory layout as its argument. Communication is launched; `wait` returns the
value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerofx.comm.collectives import DONE, Work
from zerofx.layout.placements import (
    Cut,
    cut_into,
    in_order_of,
    join_into,
    leads,
    memory_order,
    owned_groups,
    part,
    pieces,
    strides_like,
)

if TYPE_CHECKING:
    from zerofx.comm.collectives import Axis


def _axis(engine: Any, name: str) -> Axis:
    return engine.world.axis(name)


def _zigzag(engine: Any, name: str) -> bool:
    return engine.layout.mesh.is_zigzag(name)


def _flat(dense: Tensor) -> Tensor:
    return dense.permute(memory_order(dense)).reshape(-1)


def _like(x: Tensor, dim: int = 0, numerator: int = 1, denominator: int = 1) -> Tensor:
    """Return memory laid out like `x`, with dimension `dim` scaled by numerator / denominator."""
    shape = list(x.shape)
    if shape:
        shape[dim] = shape[dim] * numerator // denominator
    return x.new_empty_strided(shape, strides_like(x, shape))


class ValueFlight:
    """A value in flight: `tensor` may be read only after `wait`.

    made: the tensor, or a function that creates it once the value has arrived.
    held: the tensors being sent, kept alive until then.
    fill: fills the tensor from the received data.
    """

    __slots__ = ("_fill", "_held", "_made", "work")

    def __init__(
        self,
        made: Tensor | Callable[[], Tensor],
        work: Work,
        held: Any,
        fill: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self._made: Tensor | Callable[[], Tensor] | None = made
        self.work, self._held, self._fill = work, held, fill

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that will hold the value; created early if read before the value arrives."""
        if callable(self._made):
            self._made = self._made()
        return self._made

    def wait(self) -> Tensor | None:
        """Wait for the value and return it."""
        self.work.wait()
        self.work, self._held = DONE, None  # a transfer keeps the sent tensors alive
        tensor, fill = self.tensor, self._fill
        if fill is not None and tensor is not None:
            fill(tensor)
        self._made = self._fill = None  # the schedule's name for this outlives it
        return tensor


def _parts_of(flat: Tensor, like: Tensor) -> list[Tensor]:
    """Return consecutive views of flat memory, each laid out like its counterpart in `like`."""
    return [each.as_strided(like.shape, like.stride()) for each in flat]


@torch.no_grad()
def reduce_values(engine: Any, x: Tensor, axis: str) -> ValueFlight:
    """Launch the all-reduce (sum) of `x`."""
    dense = in_order_of(x, x)
    out = _like(dense)
    label = "all-reduce of a value"
    work = _axis(engine, axis).all_reduce(_flat(out), 1.0, label, source=_flat(dense))
    return ValueFlight(out, work, dense)


@torch.no_grad()
def reduce_joined(engine: Any, xs: Sequence[Tensor], axis: str) -> ValueFlight:
    """Launch the sums of several values, concatenated in one message."""
    flat = torch.cat([x.reshape(-1) for x in xs])
    work = _axis(engine, axis).all_reduce(flat, 1.0, f"all-reduce of {len(xs)} values")
    return ValueFlight(flat, work, flat)


@torch.no_grad()
def scatter_values(
    engine: Any, x: Tensor, axis: str, dim: int, groups: int, ranks: int
) -> ValueFlight:
    """Launch the reduce-scatter of `x`: the sum over all ranks, of which each gets its part."""
    cut, label = Cut(dim, groups), "reduce-scatter of a value"
    zigzag = _zigzag(engine, axis)
    like = _like(x, dim, 1, ranks)
    if leads(x, cut, zigzag):
        full = _flat(in_order_of(x, x))
    else:
        full = x.new_empty(ranks, like.numel())
        cut_into(_parts_of(full, like), x, cut, zigzag)
        full = full.view(-1)
    work = _axis(engine, axis).reduce_scatter(_flat(like), full, 1.0, label)
    return ValueFlight(like, work, full)


@torch.no_grad()
def gather_values(
    engine: Any, x: Tensor, axis: str, dim: int, groups: int, ranks: int
) -> ValueFlight:
    """Launch the all-gather of the value of which `x` is this rank's part."""
    cut, label = Cut(dim, groups), "all-gather of a value"
    zigzag = _zigzag(engine, axis)
    dense = in_order_of(x, x)
    line = _axis(engine, axis)
    if leads(x, cut, zigzag):
        out = _like(dense, dim, ranks)
        return ValueFlight(out, line.all_gather(_flat(out), _flat(dense), label), dense)
    landing = dense.new_empty(ranks, dense.numel())
    parts = _parts_of(landing, dense)
    work = line.all_gather(landing.view(-1), _flat(dense), label)
    return ValueFlight(
        lambda: _like(parts[0], dim, ranks),
        work,
        dense,
        lambda out: join_into(out, parts, cut, zigzag),
    )


@torch.no_grad()
def swap_values(
    engine: Any,
    x: Tensor,
    axis: str,
    dim: int,
    groups: int,
    to_dim: int,
    to_groups: int,
    ranks: int,
) -> ValueFlight:
    """Launch the all-to-all that turns a value cut along `dim` into one cut along `to_dim`."""
    cut, zigzag = Cut(dim, groups), _zigzag(engine, axis)
    sends = [part(x, Cut(to_dim, to_groups), rank, ranks, zigzag) for rank in range(ranks)]
    receives = [torch.empty_like(each) for each in sends]
    work = _axis(engine, axis).all_to_all(
        [_flat(each) for each in receives], [_flat(each) for each in sends], "all-to-all of a value"
    )
    return ValueFlight(
        lambda: _like(receives[0], dim, ranks),
        work,
        sends,
        lambda out: join_into(out, receives, cut, zigzag),
    )


@torch.no_grad()
def joined_value(engine: Any, flat: Tensor, number: int, offset: int, shape: list[int]) -> Tensor:
    """Return one of several values that were summed in one message."""
    return flat[offset : offset + math.prod(shape)].view(shape)


@torch.no_grad()
def part_of(engine: Any, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Tensor:
    """Return this rank's part of a value that every rank holds whole."""
    return part(x, Cut(dim, groups), _axis(engine, axis).rank, ranks, _zigzag(engine, axis))


@torch.no_grad()
def summand(engine: Any, x: Tensor, axis: str) -> Tensor:
    """Return this rank's summand of a value that is whole on every rank."""
    made = _like(x)
    return made.copy_(x) if _axis(engine, axis).rank == 0 else made.zero_()


@torch.no_grad()
def padded(engine: Any, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Tensor:
    """Return a whole value that has this rank's part `x`, and zeros elsewhere."""
    made = _like(x, dim, ranks).zero_()
    rank, cut = _axis(engine, axis).rank, Cut(dim, groups)
    for theirs, own in pieces(made, x, cut, rank, ranks, _zigzag(engine, axis)):
        theirs.copy_(own)
    return made


def _own_ids(engine: Any, ids: Tensor, axis: str, rows: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the ids in this rank's rows, and their local indices (0 for the others)."""
    own = ids - _axis(engine, axis).rank * rows
    inside = (own >= 0) & (own < rows)
    return inside, torch.where(inside, own, 0)


@torch.no_grad()
def embedding_rows(engine: Any, table: Tensor, ids: Tensor, axis: str, rows: int) -> Tensor:
    """Look up ids in a table of which this rank has `rows` rows: zeros for rows of others."""
    inside, own = _own_ids(engine, ids, axis, rows)
    return torch.embedding(table, own).mul_(inside.unsqueeze(-1))


@torch.no_grad()
def embedding_rows_backward(
    engine: Any, grad: Tensor, ids: Tensor, axis: str, rows: int, padding: int
) -> Tensor:
    """Return the gradient of this rank's rows; rows of the id `padding` get none."""
    inside, own = _own_ids(engine, ids, axis, rows)
    own = torch.where(inside & (ids != padding), own, rows)  # into an extra row at the end
    full = torch.ops.aten.embedding_dense_backward(grad, own, rows + 1, -1, False)
    return full[:rows].contiguous()


# -- products of experts --------------------------------------------------------------------------
def _own_groups(engine: Any, ends: Tensor, axis: str) -> Iterator[tuple[int, slice]]:
    """Yield, for each of this rank's experts that has rows, its number here and its rows."""
    line = _axis(engine, axis)
    first, last = owned_groups(len(ends), line.rank, line.size)
    bounds = [0, *ends.tolist()]
    for number, (start, stop) in enumerate(pairwise(bounds[first : last + 1])):
        if stop > start:
            yield number, slice(start, stop)


@torch.no_grad()
def grouped_rows(engine: Any, x: Tensor, weight: Tensor, ends: Tensor, axis: str) -> Tensor:
    """Multiply the rows of this rank's experts, each by its expert's matrix: zeros for others."""
    made = x.new_zeros(x.shape[0], weight.shape[2])
    for number, rows in _own_groups(engine, ends, axis):
        torch.mm(x[rows], weight[number], out=made[rows])
    return made


@torch.no_grad()
def grouped_rows_backward(
    engine: Any, x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor, axis: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows of this rank's experts, and of their matrices."""
    of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
    for number, rows in _own_groups(engine, ends, axis):
        torch.mm(grad[rows], weight[number].T, out=of_x[rows])
        torch.mm(x[rows].T, grad[rows], out=of_weight[number])
    return of_x, of_weight


@torch.no_grad()
def grouped_weights(
    engine: Any, a: Tensor, b: Tensor, ends: Tensor, axis: str, number: int
) -> Tensor:
    """Multiply columns of `a` by rows of `b`: one product for each of this rank's experts."""
    made = a.new_zeros(number, a.shape[0], b.shape[1])
    for each, rows in _own_groups(engine, ends, axis):
        torch.mm(a[:, rows], b[rows], out=made[each])
    return made
