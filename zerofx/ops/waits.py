"""`wait`: completes a launch and returns its result. The launch's spec defines the details."""

from __future__ import annotations

from typing import Any

from torch import fx

from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Storage
from zerofx.analysis.time.tasks import Walk
from zerofx.codegen.load_calls import Calls, Launch
from zerofx.codegen.schedule import Function
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.order import Order
from zerofx.ir.spec import Kind, Lane, OpSpec, define, launch_of, launched, spec_of
from zerofx.ir.verify_fault import name_of
from zerofx.ir.verify_values import Numbering


def _launched(wait: fx.Node) -> OpSpec:
    spec = launched(wait)
    assert spec is not None, f"{wait} waits for no op of zerofx"
    return spec


def _name(node: fx.Node) -> str:
    spec = launched(node)  # None in an invalid program, before verify raises
    arrives_as = None if spec is None else spec.arrives_as
    return f"full_{info(node).index}" if arrives_as is None else arrives_as(node)


def _frees(node: fx.Node) -> int:
    spec = launched(node)
    return nbytes(value(node)) if spec is not None and spec.frees_at_wait else 0


# -- code -----------------------------------------------------------------------------------------
def _write(w: Function, node: fx.Node) -> tuple[str, ...]:
    launch = launch_of(node)
    call = f"{w.bind(node)} = rt.wait({w.bind(launch)})"
    spec = _launched(node)
    if spec.frees_at_wait:
        return call, info(node).unit, f"-{w.size(launch)}"
    if spec.lane is Lane.TO_NVME:
        return call, info(node).unit, f"host -{w.size(launch)}"
    return (call,)


def _read(r: Calls, flight: Launch) -> Any:
    if not isinstance(flight, Launch):
        raise r.refuse("rt.wait takes what a launch returned.")
    spec = spec_of(flight.node)
    assert spec is not None
    fields = r.told(flight.node) if spec.is_value else r.of_bucket(r.launched(flight.node))
    return r.append(wait, flight.node, **fields).meta["val"]


# -- time and memory ------------------------------------------------------------------------------
def _task(w: Walk, node: fx.Node) -> None:
    launch = launch_of(node)
    task = w.behind.get(launch)
    if task is None:
        return
    spec = _launched(node)
    if spec.lane in (Lane.NVME, Lane.TO_NVME):
        none = w.found.prices.launch(0)
        w.found.hosts("call", f"await {w.label(launch)}", none, info(launch), [task])
        return
    w.found.ended.add(task)
    if spec.is_reduction:
        w.arrive(launch, nbytes(value(launch)), spec.legs(w.layout.mesh)[-1].size)
    spec.finishes(w, launch)


def _hold(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    arrive = _launched(node).arrive
    return p.held[launch_of(node)] if arrive is None else arrive(p, node, time)


# -- proof ----------------------------------------------------------------------------------------
def _order(o: Order, node: fx.Node) -> None:
    launch: fx.Node = node.args[0]  # type: ignore[assignment]
    spec = spec_of(launch)
    if spec is None or spec.kind is not Kind.LAUNCH:
        o.fail(node, f"{node.name} waits for {name_of(launch)}, which launches nothing.")
    if spec.end is not None:
        spec.end(o, node, launch)
        return
    (buffer,) = o.roots[launch]
    if buffer.released is not None or buffer.taken is not None:
        o.fail(node, f"{node.name} waits for {o.label(buffer)} after its release.")
    o.check_landed(node, buffer)
    buffer.landed = True
    if buffer.source is not None:
        buffer.source.landed = True
    o.roots.set(node, buffer)


def same(numbering: Numbering, node: fx.Node) -> Any:
    """Erase an op: its value is the value of its first argument."""
    return numbering.of[node.args[0]]  # type: ignore[index]


def end_once(o: Order, node: fx.Node, launch: fx.Node) -> None:
    """Make the result of a copy or move readable from here on."""
    (buffer,) = o.roots[launch]
    if buffer.landed:
        o.fail(node, f"{launch.name} is waited for twice, the second time by {node.name}.")
    o.check_landed(node, buffer)
    buffer.landed = True
    o.roots.set(node, buffer)


def hold_at_source(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the first storage of a launch; the source is held until the wait and then freed."""
    return p.held[launch_of(node)][:1]


wait = define(
    OpSpec(
        schema="wait(Tensor(a) launched) -> Tensor(a)",
        kind=Kind.WAIT,
        fake=lambda launched: launched.view_as(launched),
        run=lambda calls, launched: calls.wait(launched),
        frees=_frees,
        stem="full",
        arrives_as=_name,
        write=_write,
        read=_read,
        task=_task,
        hold=_hold,
        order=_order,
        erase=same,
    )
)
