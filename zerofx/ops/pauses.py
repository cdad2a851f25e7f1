"""`pause`: divides a backward in two. What follows it runs when the schedule comes back to it.

Emitted code writes `yield rt.pause(args)`: backward is a generator then, whose frame keeps what
its second part reads. The first part computes the gradients of inputs, which other pipeline stages
wait for; the second one those of weights.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from zerofx.analysis.time.tasks import Price, Walk
from zerofx.codegen.load_calls import Calls
from zerofx.ir.meta import Role
from zerofx.ir.order import Buffer, Order
from zerofx.ir.program import Fact
from zerofx.ir.spec import Holds, Kind, OpSpec, define
from zerofx.ops.gathers import erase_to_nothing, hold_nothing


# -- code -----------------------------------------------------------------------------------------
def _read(r: Calls, grads: Any) -> Any:
    if not isinstance(grads, list):
        raise r.refuse("rt.pause takes a list: the gradients of inputs.")
    handed = [*grads]
    grads.clear()
    r.append(pause, [r.value(grad, "what rt.pause hands out") for grad in handed])
    return handed


# -- time -----------------------------------------------------------------------------------------
def _task(w: Walk, node: fx.Node) -> None:
    w.found.computes("pause", "pause", Price(calls=0))


# -- proof ----------------------------------------------------------------------------------------
def _order(o: Order, node: fx.Node) -> None:
    if o.paused is not None:
        o.fail(node, f"{node.name} pauses a second time. {o.paused.name} has paused before.")
    o.paused = node
    pairs = zip(o.program.outputs[o.name], o.program.results(o.name), strict=True)
    due = [result for spec, result in pairs if spec.role is Role.INPUT_GRAD]
    if list(node.args[0]) != due:  # type: ignore[arg-type]
        o.fail(
            node,
            f"{node.name} hands out {node.args[0]}, and the gradients of inputs are {due}.",
        )
    for buffer in o.buffers:
        if what := left_open(o, buffer):
            o.fail(
                node,
                f"{node.name} comes while {o.label(buffer)} {what}. Other micro-batches run "
                "meanwhile. Move it before the pause, or all of it after the pause.",
            )


def left_open(o: Order, buffer: Buffer) -> str:
    """Return in what state a buffer is that must not last over a pause; empty if it may."""
    if buffer.in_flight:
        return "is in flight"
    is_gathered = buffer.kind is Holds.GATHERED and Fact.RELEASED in o.program.facts
    if is_gathered and buffer.released is None:
        return "is not released"
    if buffer.kind is Holds.PACKED and not (buffer.reduced is not None and buffer.landed):
        return "is being filled"
    return "is not stored" if buffer.kind is Holds.REDUCED and buffer.stored is None else ""


pause = define(
    OpSpec(
        schema="pause(Tensor[] grads) -> ()",
        kind=Kind.PAUSE,
        in_backward=True,
        has_effect=True,
        fake=lambda grads: None,
        run=lambda calls, grads: None,
        hold=hold_nothing,
        read=_read,
        task=_task,
        order=_order,
        erase=erase_to_nothing,
    )
)
