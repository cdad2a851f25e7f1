"""Conversions of values over an axis of the mesh, as a rank makes them (see `ops.placed`).

Sums run in rank order, as all sums of zerofx do. Each takes plain tensors and gives a new one that
is laid out in memory as its argument is. What sends is launched; `wait` returns the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerofx.comm.collectives import DONE, Work
from zerofx.layout.placements import (
    Cut,
    in_order_of,
    join_into,
    memory_order,
    part,
    strides_like,
)

if TYPE_CHECKING:
    from zerofx.comm.collectives import Axis


def _axis(engine: Any, name: str) -> Axis:
    return engine.world.axis(name)


def _flat(dense: Tensor) -> Tensor:
    return dense.permute(memory_order(dense)).reshape(-1)


def _leads(x: Tensor, cut: Cut) -> bool:
    """Say whether the parts of a dense value lie one behind the other in memory."""
    return cut.groups == 1 and memory_order(x)[0] == cut.dim


def _like(x: Tensor, dim: int = 0, numerator: int = 1, denominator: int = 1) -> Tensor:
    """Return memory laid out as `x` is, with a dimension so many times as large."""
    shape = list(x.shape)
    if shape:
        shape[dim] = shape[dim] * numerator // denominator
    return x.new_empty_strided(shape, strides_like(x, shape))


class ValueFlight:
    """A value on its way: `tensor` may be read only after `wait`.

    held: what is sent, and received into, until then. finish: fills `tensor` from that.
    """

    __slots__ = ("finish", "held", "tensor", "work")

    def __init__(
        self, tensor: Tensor, work: Work, held: Any, finish: Callable[[], Any] | None = None
    ) -> None:
        self.tensor: Tensor | None = tensor
        self.work, self.held, self.finish = work, held, finish

    def wait(self) -> Tensor | None:
        """Return the value as it lies now."""
        self.work.wait()
        if self.finish is not None:
            self.finish()
        tensor, self.tensor = self.tensor, None  # the schedule's name for this outlives it
        self.work, self.held, self.finish = DONE, None, None  # a transfer holds what it has sent
        return tensor


@torch.no_grad()
def reduce_values(engine: Any, x: Tensor, axis: str) -> ValueFlight:
    """Launch the sum of all ranks' `x`."""
    dense = in_order_of(x, x)
    out = _like(dense)
    label = "all-reduce of a value"
    work = _axis(engine, axis).all_reduce(_flat(out), 1.0, label, source=_flat(dense))
    return ValueFlight(out, work, dense)


@torch.no_grad()
def reduce_joined(engine: Any, xs: Sequence[Tensor], axis: str) -> ValueFlight:
    """Launch the sums of all ranks' values, one behind the other, in one message."""
    flat = torch.cat([x.reshape(-1) for x in xs])
    work = _axis(engine, axis).all_reduce(flat, 1.0, f"all-reduce of {len(xs)} values")
    return ValueFlight(flat, work, flat)


@torch.no_grad()
def scatter_values(
    engine: Any, x: Tensor, axis: str, dim: int, groups: int, ranks: int
) -> ValueFlight:
    """Launch the sum of all ranks' `x`, of which this rank gets its part."""
    cut = Cut(dim, groups)
    dense = in_order_of(x, x)
    full = _flat(dense)
    if not _leads(dense, cut):
        full = torch.cat([_flat(part(dense, cut, rank, ranks)) for rank in range(ranks)])
    out = _like(dense, dim, 1, ranks)
    label = "reduce-scatter of a value"
    return ValueFlight(out, _axis(engine, axis).reduce_scatter(_flat(out), full, 1.0, label), full)


@torch.no_grad()
def gather_values(
    engine: Any, x: Tensor, axis: str, dim: int, groups: int, ranks: int
) -> ValueFlight:
    """Launch the gather of the whole value of which `x` is this rank's part."""
    cut, label = Cut(dim, groups), "all-gather of a value"
    dense = in_order_of(x, x)
    out = _like(dense, dim, ranks)
    line = _axis(engine, axis)
    if _leads(dense, cut):
        return ValueFlight(out, line.all_gather(_flat(out), _flat(dense), label), dense)
    landing = dense.new_empty(ranks, dense.numel())
    parts = [each.as_strided(dense.shape, dense.stride()) for each in landing]
    work = line.all_gather(landing.view(-1), _flat(dense), label)
    return ValueFlight(out, work, (dense, landing), lambda: join_into(out, parts, cut))


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
    """Launch the way of what is cut along `dim` to where it is cut along `to_dim`."""
    cut = Cut(dim, groups)
    sends = [part(x, Cut(to_dim, to_groups), rank, ranks) for rank in range(ranks)]
    receives = [torch.empty_like(each) for each in sends]
    out = _like(sends[0], dim, ranks)
    work = _axis(engine, axis).all_to_all(
        [_flat(each) for each in receives], [_flat(each) for each in sends], "all-to-all of a value"
    )
    return ValueFlight(out, work, (sends, receives), lambda: join_into(out, receives, cut))


@torch.no_grad()
def joined_value(engine: Any, flat: Tensor, number: int, offset: int, shape: list[int]) -> Tensor:
    """Return one of several values that were summed in one message."""
    return flat[offset : offset + math.prod(shape)].view(shape)


@torch.no_grad()
def part_of(engine: Any, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Tensor:
    """Return this rank's part of a value that is whole on every rank."""
    return part(x, Cut(dim, groups), _axis(engine, axis).rank, ranks)


def _own_ids(engine: Any, ids: Tensor, axis: str, rows: int) -> tuple[Tensor, Tensor]:
    """Return which ids are of this rank's rows, and their numbers there (0 for the others)."""
    own = ids - _axis(engine, axis).rank * rows
    inside = (own >= 0) & (own < rows)
    return inside, torch.where(inside, own, 0)


@torch.no_grad()
def embedding_rows(engine: Any, table: Tensor, ids: Tensor, axis: str, rows: int) -> Tensor:
    """Return the rows of a table of which this rank has `rows`: zeros for those of other ranks."""
    inside, own = _own_ids(engine, ids, axis, rows)
    return torch.embedding(table, own).mul_(inside.unsqueeze(-1))


@torch.no_grad()
def embedding_rows_backward(
    engine: Any, grad: Tensor, ids: Tensor, axis: str, rows: int, padding: int
) -> Tensor:
    """Return the gradient of this rank's rows; those of the id `padding` get none."""
    inside, own = _own_ids(engine, ids, axis, rows)
    own = torch.where(inside & (ids != padding), own, rows)  # into a row behind
    full = torch.ops.aten.embedding_dense_backward(grad, own, rows + 1, -1, False)
    return full[:rows].contiguous()
