"""Conversions: how a value that is cut, or a sum of summands, comes to lie in another way.

    reduce_values    P -> R      the sum, on all ranks of the axis
    scatter_values   P -> S      the sum, a part on each
    gather_values    S -> R      all parts, on all
    swap_values      S -> S      cut along another dimension
    part             R -> S      this rank's part: nothing is sent

The value is the same before and after: so the proof erases them, and checks that each is what its
argument's placement needs. Parts are `layout.placements.Cut`s, written as (dim, groups).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from zerofx.analysis.time.tasks import Walk
from zerofx.ir.meta import nbytes, value
from zerofx.ir.order import Order
from zerofx.ir.program import Planned
from zerofx.ir.spec import Carries, Kind, Lane, OpSpec, Payload, define
from zerofx.layout.placements import Cut, P, R, fits, local_shape, strides_like
from zerofx.ops.waits import same
from zerofx.policy import exchange
from zerofx.runtime import placed


def _like(x: Tensor, shape: list[int]) -> Tensor:
    return x.new_empty_strided(shape, strides_like(x, shape))


def _cut(x: Tensor, dim: int, groups: int, ranks: int) -> Tensor:
    return _like(x, local_shape(x.shape, Cut(dim, groups), ranks))


def _joined(x: Tensor, dim: int, ranks: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= ranks
    return _like(x, shape)


# -- time and bytes -------------------------------------------------------------------------------
def _whole_bytes(node: fx.Node) -> int:
    return max(nbytes(value(node)), nbytes(value(node.all_input_nodes[0])))


def _takes(kind: str, verb: str) -> Any:
    def task(w: Walk, node: fx.Node) -> None:
        axis: Any = node.args[1]
        mesh, size = w.layout.mesh, _whole_bytes(node)
        price = w.found.prices.collective(kind, size, mesh.along(axis), mesh.stride(axis))
        taken = w.found.prices.beside(kind, size, mesh.along(axis))
        name = f"{verb} {node.name}"
        done = w.found.sends(Lane.VALUES, name, price, taken, axis=axis)
        w.found.ended.add(done)

    return task


def _sends(kind: str) -> Any:
    def sends(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
        axis: Any = node.args[1]
        mesh, x = program.layout.mesh, value(node)
        ranks = mesh.along(axis)
        if kind == "all_reduce":
            numel = exchange.all_reduce_sent(x.numel(), mesh.position(axis, rank), ranks)
        elif kind == "all_gather":
            numel = exchange.part_sent(x.numel() // ranks, ranks)
        elif kind == "reduce_scatter":
            numel = exchange.part_sent(x.numel(), ranks)
        else:
            numel = exchange.part_sent(x.numel() // ranks, ranks)
        return [Payload(kind, numel * x.element_size(), x.element_size())]

    return sends


def _task_part(w: Walk, node: fx.Node) -> None:
    w.found.computes("store", f"part {node.name}", w.found.prices.touch(2 * nbytes(value(node))))


def _order(o: Order, node: fx.Node) -> None:
    """All that is to be checked is how values lie: see `ir.placing`."""


def _needs_summands(now: Any) -> str:
    return "" if now == P else "it takes summands"


def _lies_reduced(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    return _needs_summands(now) or R


def _lies_scattered(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    return _needs_summands(now) or _lies_cut(shape, more, ranks)


def _lies_gathered(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    dim, groups, over = more
    cut = Cut(dim, groups)
    return R if now == cut and over == ranks else f"it gathers what lies as {cut} over {over} ranks"


def _lies_swapped(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    dim, groups, *to = more
    cut = Cut(dim, groups)
    return _lies_cut(shape, to, ranks) if now == cut else f"it swaps what lies as {cut}"


def _lies_part(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    return _lies_cut(shape, more, ranks) if now == R else "it takes a part of what is whole"


def _lies_cut(shape: Any, more: Any, ranks: int) -> Any:
    dim, groups, over = more
    cut = Cut(dim, groups)
    is_right = over == ranks and fits(shape, cut, ranks)
    return cut if is_right else f"{list(shape)} cannot be cut as {cut} over {over} ranks"


def _define(
    schema: str, fake: Any, runtime: Any, lies: Any, kind: str, verb: str, means: str
) -> Any:

    return define(
        OpSpec(
            schema=schema,
            kind=Kind.SYNC,
            carries=Carries.VALUE,
            axis="tensor",
            fake=fake,
            run=lambda calls, *args: runtime(calls.engine, *args),
            runtime=runtime,
            lane=Lane.VALUES,
            verb=verb,
            means=means,
            task=_takes(kind, verb),
            sends=_sends(kind),
            adds=lambda node: nbytes(value(node)),
            lies=lies,
            order=_order,
            erase=same,
        )
    )


# -- the ops --------------------------------------------------------------------------------------
reduce_values = _define(
    "reduce_values(Tensor x, str axis) -> Tensor",
    lambda x, axis: _like(x, list(x.shape)),
    placed.reduce_values, _lies_reduced, "all_reduce", "AR values", "all-reduce of a value",
)  # fmt: skip
scatter_values = _define(
    "scatter_values(Tensor x, str axis, int dim, int groups, int ranks) -> Tensor",
    lambda x, axis, dim, groups, ranks: _cut(x, dim, groups, ranks),
    placed.scatter_values, _lies_scattered, "reduce_scatter", "RS values",
    "reduce-scatter of a value",
)  # fmt: skip
gather_values = _define(
    "gather_values(Tensor x, str axis, int dim, int groups, int ranks) -> Tensor",
    lambda x, axis, dim, groups, ranks: _joined(x, dim, ranks),
    placed.gather_values, _lies_gathered, "all_gather", "AG values", "all-gather of a value",
)  # fmt: skip
swap_values = _define(
    "swap_values(Tensor x, str axis, int dim, int groups, int to_dim, int to_groups, int ranks) "
    "-> Tensor",
    lambda x, axis, dim, groups, to_dim, to_groups, ranks: _cut(
        _joined(x, dim, ranks), to_dim, to_groups, ranks
    ),
    placed.swap_values, _lies_swapped, "all_to_all", "A2A values", "all-to-all of a value",
)  # fmt: skip
part = define(
    OpSpec(
        schema="part(Tensor x, str axis, int dim, int groups, int ranks) -> Tensor",
        kind=Kind.MAKE,
        carries=Carries.VALUE,
        fake=lambda x, axis, dim, groups, ranks: _cut(x, dim, groups, ranks),
        run=lambda calls, *args: placed.part_of(calls.engine, *args),
        method="part_of",
        runtime=placed.part_of,
        task=_task_part,
        adds=lambda node: nbytes(value(node)),
        lies=_lies_part,
        order=_order,
        erase=same,
    )
)


def _local(schema: str, fake: Any, runtime: Any) -> Any:
    """Define an op that computes a rank's part by itself: its proof is that of the whole call."""
    return define(
        OpSpec(
            schema=schema,
            kind=Kind.MAKE,
            carries=Carries.VALUE,
            fake=fake,
            run=lambda calls, *args: runtime(calls.engine, *args),
            runtime=runtime,
            task=_task_part,
            adds=lambda node: nbytes(value(node)),
            order=_order,
            erase=lambda numbering, node: numbering.whole_call(node),
        )
    )


embedding_rows = _local(
    "embedding_rows(Tensor table, Tensor ids, str axis, int rows) -> Tensor",
    lambda table, ids, axis, rows: table.new_empty((*ids.shape, table.shape[1])),
    placed.embedding_rows,
)
embedding_rows_backward = _local(
    "embedding_rows_backward(Tensor grad, Tensor ids, str axis, int rows, int padding) -> Tensor",
    lambda grad, ids, axis, rows, padding: grad.new_empty((rows, grad.shape[-1])),
    placed.embedding_rows_backward,
)
CONVERSIONS = frozenset({reduce_values, scatter_values, gather_values, swap_values, part})
