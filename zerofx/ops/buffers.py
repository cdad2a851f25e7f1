"""`sync_buffers`: broadcast rank 0's new values of module buffers to every rank in one message."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.analysis.time.tasks import Price, Walk
from zerofx.codegen.load_calls import Calls
from zerofx.codegen.schedule import Function
from zerofx.codegen.text import wrap_list, wrap_tuple
from zerofx.ir.meta import nbytes, value
from zerofx.ir.order import Order
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Carries, Kind, Lane, OpSpec, Payload, define
from zerofx.ir.verify_values import Numbering


def _write(w: Function, node: fx.Node) -> tuple[str, ...]:
    values = wrap_list([w.bind(n) for n in node.all_input_nodes], 40)
    users: list[Any] = list(node.users)
    gives = [w.bind(u) for u in sorted(users, key=lambda u: u.args[1])]
    return f"{wrap_tuple(gives, 0)} = rt.sync_buffers({values})", ""


def _read(r: Calls, values: Sequence[Tensor]) -> list[Tensor]:
    given = [r.value(v, "a buffer's new value") for v in values]
    synced = r.append(sync_buffers, given)
    items = [r.append(operator.getitem, synced, k) for k in range(len(given))]
    return [item.meta["val"] for item in items]


def _task(w: Walk, node: fx.Node) -> None:
    size = sum(map(nbytes, value(node)))
    price = w.found.prices.collective("broadcast", size, w.program.world_size, 1)
    w.found.ended.add(w.found.sends(Lane.REDUCE, "BC buffers", price, Price()))


def _sends(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
    if program.world_size == 1:
        return []
    sent = sum(map(nbytes, value(node))) * (program.world_size - 1) if rank == 0 else 0
    return [Payload("broadcast", sent, torch.uint8.itemsize)]  # every dtype is sent as bytes


def _order(o: Order, node: fx.Node) -> None:
    if o.name == BACKWARD:
        o.fail(node, f"{node.name}: sync_buffers takes what forward makes of buffers.")


def _erase(numbering: Numbering, node: fx.Node) -> Any:
    return [numbering.of[v] for v in node.args[0]]  # type: ignore[union-attr,index]


sync_buffers = define(
    OpSpec(
        schema="sync_buffers(Tensor[] values) -> Tensor[]",
        kind=Kind.SYNC,
        carries=Carries.BUFFERS,
        axis="data",
        fake=lambda values: [torch.empty_like(v) for v in values],
        run=lambda calls, values: calls.sync_buffers(values),
        lane=Lane.REDUCE,
        verb="BC",
        means="broadcast of buffers",
        task=_task,
        sends=_sends,
        adds=lambda node: nbytes(value(node)),
        write=_write,
        read=_read,
        order=_order,
        erase=_erase,
    )
)
