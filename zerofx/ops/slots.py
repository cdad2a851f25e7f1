"""`free_slot`: frees a slot's memory within backward, after the last buffer that lies in it.

Emitted code writes `rt.free_slot(slot=3)`. Forward's slots are not freed, nor are small ones (see
`policy/resting.py`). A buffer that takes the slot again allocates its memory again.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from zerofx.ir.order import Order, argument
from zerofx.ir.spec import Kind, OpSpec, define
from zerofx.ops.gathers import erase_to_nothing, hold_nothing
from zerofx.ops.pauses import left_open


def _order(o: Order, node: fx.Node) -> None:
    slot: Any = argument(node, 0)
    sizes = o.program.slot_bytes
    if type(slot) is not int or not 0 <= slot < len(sizes):
        o.fail(node, f"{node.name} names slot {slot!r}. The program has {len(sizes)}.")
    holder = o.slots.get(slot)
    if holder is None:
        return
    if what := left_open(o, holder):
        o.fail(
            node,
            f"{node.name} frees slot {slot} while {o.label(holder)} in it {what}. Move it after "
            "the end of that buffer.",
        )
    holder.released = holder.released or node


free_slot = define(
    OpSpec(
        schema="free_slot(int slot) -> ()",
        kind=Kind.FREE,
        slot=0,
        in_backward=True,
        has_effect=True,
        fake=lambda slot: None,
        run=lambda calls, slot: calls.engine.free_slot(slot),
        hold=hold_nothing,
        order=_order,
        erase=erase_to_nothing,
    )
)
