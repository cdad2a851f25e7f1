"""Products of experts that are divided among ranks: each multiplies the rows of its own experts.

        grouped_rows            [rows, in] x [experts, in, out] -> [rows, out]
        grouped_rows_backward   the gradients of both
        grouped_weights         [in, rows] x [rows, out] -> [experts, in, out]

Rows are sorted by expert, and `ends` has the end of each expert's rows, on every rank. A rank has
the matrices of consecutive experts. Of rows it gives those of its experts and zeros for all others
(`layout.placements.Owned`), so that results have the same shape whatever the router chooses. The
pass `place` puts these ops in the place of torch's and transformers' grouped products, whose
digests they have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from zerofx.analysis.time.tasks import Walk
from zerofx.codegen.schedule import write_unpacked
from zerofx.ir.graphs import call
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.order import Order
from zerofx.ir.spec import Carries, Kind, OpSpec, define
from zerofx.runtime import placed

_mm = torch.ops.aten.mm.default


def _order(o: Order, node: fx.Node) -> None:
    """Do nothing: a product has no effect on memory beyond its results."""


# -- time -----------------------------------------------------------------------------------------
def _task(is_backward: bool) -> Any:
    """Return the task of a call: one product for each expert of the rank, of its share of rows.

    How many rows an expert has depends on values. The price is that of an even load.
    """

    def task(w: Walk, node: fx.Node) -> None:
        first, second, ends = (value(a) for a in node.args[:3])  # type: ignore[arg-type]
        graph = fx.Graph()

        def product(rows: int, inner: int, columns: int) -> fx.Node:
            given = []
            for shape in ((rows, inner), (inner, columns)):
                given.append(graph.placeholder("x"))
                given[-1].meta["val"] = first.new_empty(shape)
            return call(graph, _mm, tuple(given))

        if second.dim() == 3:
            number, inner, columns = second.shape
            rows = -(-first.shape[0] // ends.shape[0])
            shapes = [(rows, inner, columns)]
            if is_backward:
                shapes = [(rows, columns, inner), (inner, rows, columns)]
        else:
            number, inner, columns = value(node).shape
            shapes = [(inner, -(-first.shape[1] // ends.shape[0]), columns)]
        made = [product(*shape) for shape in shapes for _ in range(number)]
        price = w.found.prices.region(made)
        w.found.computes("region", f"experts {node.name}", price, info(node))

    return task


def _define(schema: str, fake: Any, runtime: Any, is_backward: bool = False, **more: Any) -> Any:
    return define(
        OpSpec(
            schema=schema,
            kind=Kind.MAKE,
            carries=Carries.VALUE,
            fake=fake,
            run=lambda calls, *args: runtime(calls.engine, *args),
            runtime=runtime,
            task=_task(is_backward),
            adds=lambda node: nbytes(value(node)),
            order=_order,
            erase=lambda numbering, node: numbering.whole_call(node),
            **more,
        )
    )


# -- the ops --------------------------------------------------------------------------------------
def _fake_weights(a: Tensor, b: Tensor, ends: Tensor, axis: str, number: int) -> Tensor:
    return a.new_empty(number, a.shape[0], b.shape[1])


grouped_rows = _define(
    "grouped_rows(Tensor x, Tensor weight, Tensor ends, str axis) -> Tensor",
    lambda x, weight, ends, axis: x.new_empty(x.shape[0], weight.shape[2]),
    placed.grouped_rows,
)
grouped_rows_backward = _define(
    "grouped_rows_backward(Tensor x, Tensor weight, Tensor ends, Tensor grad, str axis) "
    "-> (Tensor, Tensor)",
    lambda x, weight, ends, grad, axis: (torch.empty_like(x), torch.empty_like(weight)),
    placed.grouped_rows_backward, is_backward=True, write=write_unpacked,
)  # fmt: skip
grouped_weights = _define(
    "grouped_weights(Tensor a, Tensor b, Tensor ends, str axis, int number) -> Tensor",
    _fake_weights,
    placed.grouped_weights,
)
