"""Rows of tokens in slots of experts, of which each has as many as its capacity.

        expert_slots      experts [n] -> rows of slots [experts, ranks * capacity], slots [n]
        rows_to_slots     [n / per, width] -> [experts, ranks * capacity, width]
        rows_from_slots   [experts, ranks * capacity, width] -> [n, width]

The pass `open-experts` inserts these calls on whole values, with one part of the rows for each
rank; the reference of the proof is taken after it. If rows are cut over ranks, each fills and reads
the slots of its part alone, which is the same call with `ranks` = 1 (`ir.placing`). Between slots
cut by parts and slots cut by experts is an all-to-all, which `place` inserts as it does elsewhere.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from zerofx.analysis.time.tasks import Walk
from zerofx.codegen.schedule import write_unpacked
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.order import Order
from zerofx.ir.spec import Capped, Carries, Kind, OpSpec, define
from zerofx.runtime import capacity as runtime


def _order(o: Order, node: fx.Node) -> None:
    """Do nothing: a call has no effect on memory beyond its results."""


def _task(w: Walk, node: fx.Node) -> None:
    """Append one pass over what a call reads and writes."""
    price = w.found.prices.touch(2 * nbytes(value(node)))
    w.found.computes("region", f"slots {node.name}", price, info(node))


def _define(schema: str, fake: Any, run: Any, **more: Any) -> Any:
    return define(
        OpSpec(
            schema=schema,
            kind=Kind.MAKE,
            carries=Carries.VALUE,
            fake=fake,
            run=lambda calls, *args: run(calls.engine, *args),
            runtime=run,
            task=_task,
            adds=lambda node: nbytes(value(node)),
            order=_order,
            erase=lambda numbering, node: numbering.whole_call(node),
            **more,
        )
    )


def _fake_slots(
    ids: Tensor, layer: str, experts: int, capacity: int, groups: int, ranks: int
) -> tuple[Tensor, Tensor]:
    return ids.new_empty(experts, ranks * capacity), ids.new_empty(ids.shape[0])


expert_slots = _define(
    "expert_slots(Tensor ids, str layer, int experts, int capacity, int groups, int ranks) "
    "-> (Tensor, Tensor)",
    _fake_slots, runtime.expert_slots, write=write_unpacked, precision=Capped(),
)  # fmt: skip
rows_to_slots = _define(
    "rows_to_slots(Tensor x, Tensor rows, int groups, int ranks, int per) -> Tensor",
    lambda x, rows, groups, ranks, per: x.new_empty(*rows.shape, x.shape[1]),
    runtime.rows_to_slots,
)
rows_from_slots = _define(
    "rows_from_slots(Tensor x, Tensor slots, int groups, int ranks) -> Tensor",
    lambda x, slots, groups, ranks: x.new_empty(slots.shape[0], x.shape[2]),
    runtime.rows_from_slots,
)
