"""Conversions of values over an axis of the mesh, as a rank makes them (see `ops.placed`).

Sums run in rank order, as all sums of zerofx do. Each takes plain tensors and returns a new one
that is laid out in memory as its argument is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerofx.layout.placements import Cut, in_order_of, join, memory_order, part

if TYPE_CHECKING:
    from zerofx.comm.collectives import Axis


def _axis(engine: Any, name: str) -> Axis:
    return engine.world.axis(name)


def _gathered(axis: Axis, x: Tensor, label: str) -> list[Tensor]:
    """Return the values that all ranks have of `x`, laid out as it is."""
    dense = in_order_of(x, x)
    flat = dense.new_empty(axis.size * dense.numel())
    axis.all_gather(flat, _flat(dense), label).wait()
    return [_shaped(each, dense) for each in flat.view(axis.size, -1)]


def _flat(dense: Tensor) -> Tensor:
    return dense.permute(memory_order(dense)).reshape(-1)


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


@torch.no_grad()
def reduce_values(engine: Any, x: Tensor, axis: str) -> Tensor:
    """Return the sum of all ranks' `x`."""
    dense = in_order_of(x, x)
    out = dense.clone() if dense.data_ptr() == x.data_ptr() else dense
    _axis(engine, axis).all_reduce(_flat(out), 1.0, "all-reduce of a value").wait()
    return out


@torch.no_grad()
def scatter_values(engine: Any, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Tensor:
    """Return this rank's part of the sum of all ranks' `x`."""
    line = _axis(engine, axis)
    parts = [part(x, Cut(dim, groups), rank, ranks) for rank in range(ranks)]
    full = torch.cat([_flat(each) for each in parts])
    out = full.new_empty(full.numel() // ranks)
    line.reduce_scatter(out, full, 1.0, "reduce-scatter of a value").wait()
    return _shaped(out, parts[0])


@torch.no_grad()
def gather_values(engine: Any, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Tensor:
    """Return the whole value of which `x` is this rank's part."""
    return join(_gathered(_axis(engine, axis), x, "all-gather of a value"), Cut(dim, groups))


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
) -> Tensor:
    """Return this rank's part along `to_dim` of what is cut along `dim`."""
    line = _axis(engine, axis)
    sends = [part(x, Cut(to_dim, to_groups), rank, ranks) for rank in range(ranks)]
    receives = [torch.empty_like(each) for each in sends]
    line.all_to_all(
        [_flat(each) for each in receives], [_flat(each) for each in sends], "all-to-all of a value"
    ).wait()
    return join(receives, Cut(dim, groups))


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
