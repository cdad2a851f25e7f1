"""Offloaded values: copied to host memory and back, and from the host to NVMe and back.

The wait of an offload frees the value's own memory; the wait of a write frees the host memory. A
value on the host allows only one reload; a value on NVMe may be read several times. The fake of a
value on the host or on NVMe is on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Category, Storage
from zerofx.analysis.time.tasks import Walk
from zerofx.codegen.load_calls import Calls
from zerofx.codegen.schedule import Function
from zerofx.codegen.text import describe, identifier
from zerofx.ir.graphs import alias_source
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.order import AWAY, Buffer, Order, alias_inputs
from zerofx.ir.program import Planned
from zerofx.ir.spec import Carries, Holds, Kind, Lane, OpSpec, Payload, define, spec_of
from zerofx.ir.verify_fault import name_of
from zerofx.layout.tiers import Tier
from zerofx.ops.waits import hold_at_source, same
from zerofx.runtime.tiers.host_tier import D2H, H2D, NVME_READ, NVME_WRITE, dense_bytes


def fake_on_host(x: Tensor) -> Tensor:
    """Return the fake of a value off the device: its shape and strides, on the CPU."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def _fake_reload(host: Tensor, *, device: torch.device) -> Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


# -- names: off the device a value has a number, on the device it has its own name -----------------
def _on_host(wait: fx.Node) -> str:
    return f"host_{info(wait).index}"


def _on_nvme(wait: fx.Node) -> str:
    return f"stored_{info(wait).index}"


def _on_device(wait: fx.Node) -> str:
    where = info(wait)
    return identifier(f"{where.unit}_{where.name}" if where.unit else where.name)


# -- code -----------------------------------------------------------------------------------------
def _write_to_device(w: Function, node: fx.Node) -> tuple[str, ...]:
    made = f"{w.bind(node)} = rt.reload({w.bind(node.all_input_nodes[0])})"
    return made, info(node).unit, describe(value(node)), f"+{w.size(node)}"


def _write_to_host(w: Function, node: fx.Node) -> tuple[str, ...]:
    made = f"{w.bind(node)} = rt.offload({w.bind(node.all_input_nodes[0])})"
    return made, info(node).unit, describe(value(node)), f"host +{w.size(node)}"


def _write_to_nvme(w: Function, node: fx.Node) -> tuple[str, ...]:
    host, name = node.args
    made = f"{w.bind(node)} = rt.write_out({w.bind(host)}, {name!r})"  # type: ignore[arg-type]
    return made, info(node).unit, f"nvme +{w.size(node)}"


def _write_from_nvme(w: Function, node: fx.Node) -> tuple[str, ...]:
    made = f"{w.bind(node)} = rt.read_back({w.bind(node.all_input_nodes[0])})"
    return made, info(node).unit, f"host +{w.size(node)}"


def _append(
    r: Calls,
    target: Any,
    node: fx.Node,
    number: int,
    named: dict[str, Any] | None = None,
    more: tuple[Any, ...] = (),
) -> Any:
    fields = r.told(node) | {"name": info(node).name or node.name, "index": number}
    return r.launch(r.append(target, node, *more, named=named, **fields))


def _read_offload(r: Calls, x: Tensor) -> Any:
    node = r.value(x, "what rt.offload copies to the host")
    return _append(r, offload, node, sum(n.target is offload for n in r.graph.nodes))


def _read_reload(r: Calls, host: Tensor) -> Any:
    node = r.value(host, "what rt.reload copies to the device")
    number = info(node).index  # the number of a value that was read back
    if node.op == "placeholder":
        number = r.numbers.get(number, -1)  # -1: verify raises on it
    return _append(r, reload, node, number, {"device": r.device})


def _read_write_out(r: Calls, host: Tensor, name: str) -> Any:
    node = r.value(host, "what rt.write_out writes")
    if not isinstance(name, str):
        raise r.refuse(f"rt.write_out names its value by a text, not by {name!r}.")
    return _append(r, write_out, node, info(node).index, more=(name,))


def _read_read_back(r: Calls, stored: Tensor) -> Any:
    node = r.value(stored, "what rt.read_back reads")
    return _append(r, read_back, node, r.numbers.get(info(node).index, -1))


# -- time -----------------------------------------------------------------------------------------
def _task(w: Walk, node: fx.Node) -> None:
    spec = spec_of(node)
    assert spec is not None and spec.lane is not None
    is_beside = spec.lane in (Lane.NVME, Lane.TO_NVME)
    w.copy(node, spec.lane, dense_bytes(value(node)), is_beside)


def _moves_out(program: Planned, graph: str, node: fx.Node) -> list[Payload]:
    return [Payload(D2H, dense_bytes(value(node)), value(node).element_size())]


def _moves_in(program: Planned, graph: str, node: fx.Node) -> list[Payload]:
    return [Payload(H2D, dense_bytes(value(node)), value(node).element_size())]


def _moves_to_nvme(program: Planned, graph: str, node: fx.Node) -> list[Payload]:
    return [Payload(NVME_WRITE, nbytes(value(node)), value(node).element_size())]


def _moves_from_nvme(program: Planned, graph: str, node: fx.Node) -> list[Payload]:
    return [Payload(NVME_READ, nbytes(value(node)), value(node).element_size())]


# -- memory ---------------------------------------------------------------------------------------
_ARRIVES = {
    Tier.HOST: Category.HOST,
    Tier.NVME: Category.NVME,
    Tier.DEVICE: Category.ACTIVATIONS,
}


def _hold(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the destination of a copy, then its source, which is held until the wait."""
    spec = spec_of(node)
    assert spec is not None
    source = p.held[node.all_input_nodes[0]]
    for storage in source:
        if storage.category is Category.TEMPORARIES:
            storage.category = Category.ACTIVATIONS
    return p.own(node, _ARRIVES[spec.lands], value(node), time) + source


# -- proof ----------------------------------------------------------------------------------------
def _order_offload(o: Order, node: fx.Node) -> None:
    x: Any = node.args[0]
    if any(b.kind is Holds.LEAVING for b in o.roots[x]):
        o.fail(node, f"{node.name} offloads {name_of(x)} a second time.")
    if x.op != "call_function" or o.roots[x]:
        held = o.content(x, o.roots[x][0]) if o.roots[x] else f"{name_of(x)}, given"
        o.fail(node, f"{node.name} offloads {held}: only a value of forward's own may leave.")
    if (root := alias_source(x)) is not x:
        o.fail(node, f"{node.name} offloads {x.name}, a view. Offload {root.name} whole.")
    leaving = Buffer(Holds.LEAVING, x)
    views = [x]
    while views:
        view = views.pop()
        o.roots.set(view, leaving)
        views += [u for u in view.users if u in o.known and view in alias_inputs(u)]
    o.add(node, Buffer(Holds.HOSTED, node, landed=False, source=leaving))


def _order_write_out(o: Order, node: fx.Node) -> None:
    hosted = _on(o, Holds.HOSTED, node, "writes")
    _is_first(o, node, hosted, "written")
    hosted.written = node
    o.add(node, Buffer(Holds.STORED, node, landed=False, source=hosted))


def _order_read_back(o: Order, node: fx.Node) -> None:
    stored = _on(o, Holds.STORED, node, "reads")
    o.add(node, Buffer(Holds.HOSTED, node, landed=False, source=stored))


def _order_reload(o: Order, node: fx.Node) -> None:
    hosted = _on(o, Holds.HOSTED, node, "reloads")
    _is_first(o, node, hosted, "reloaded")
    hosted.reloaded = node
    o.add(node, Buffer(Holds.RELOADED, node, landed=False, source=hosted))


def _on(o: Order, kind: Holds, node: fx.Node, verb: str) -> Buffer:
    """Return the buffer that a node moves, which must be on the tier that the op reads from."""
    moved: Any = node.args[0]
    buffers = o.roots[moved]
    if len(buffers) != 1 or buffers[0].kind is not kind:
        where = AWAY[kind].replace("is", "is not")
        o.fail(node, f"{node.name} {verb} {name_of(moved)}, which {where}.")
    return buffers[0]


def _is_first(o: Order, node: fx.Node, moved: Buffer, verb: str) -> None:
    """Check that a copy moves a value once, in one direction."""
    first = moved.reloaded or moved.written
    what = name_of(node.args[0])  # type: ignore[arg-type]
    if first is not None and first.target is node.target:
        o.fail(node, f"{what} is {verb} twice: by {first.name} and {node.name}.")
    if first is not None:
        o.fail(node, f"{node.name} moves {what}, which {first.name} has moved already.")


def _end(o: Order, node: fx.Node, launch: fx.Node) -> None:
    (buffer,) = o.roots[launch]
    if buffer.landed:
        o.fail(node, f"{launch.name} is waited for twice, the second time by {node.name}.")
    buffer.landed = True
    source = buffer.source if buffer.kind in AWAY else None
    if source is not None and source.kind is not Holds.STORED:  # a file is kept for the whole call
        source.released = node
    o.roots.set(node, buffer)


# -- the ops --------------------------------------------------------------------------------------
offload = define(
    OpSpec(
        schema="offload(Tensor x) -> Tensor",
        kind=Kind.LAUNCH,
        carries=Carries.VALUE,
        lands=Tier.HOST,
        fake=fake_on_host,
        run=lambda calls, x: calls.offload(x),
        lane=Lane.D2H,
        verb="D2H",
        means="copy from device to host",
        task=_task,
        moves=_moves_out,
        hold=_hold,
        arrive=hold_at_source,
        frees_at_wait=True,
        stem="offload",
        arrives_as=_on_host,
        write=_write_to_host,
        read=_read_offload,
        order=_order_offload,
        end=_end,
        erase=same,
    )
)
reload = define(
    OpSpec(
        schema="reload(Tensor host, *, Device device) -> Tensor",
        kind=Kind.LAUNCH,
        carries=Carries.VALUE,
        takes=frozenset({Holds.HOSTED}),
        fake=_fake_reload,
        run=lambda calls, host, *, device: calls.reload(host),
        lane=Lane.H2D,
        verb="H2D",
        means="copy from host to device",
        task=_task,
        moves=_moves_in,
        hold=_hold,
        arrive=hold_at_source,
        adds=lambda node: nbytes(value(node)),
        stem="reload",
        arrives_as=_on_device,
        write=_write_to_device,
        read=_read_reload,
        order=_order_reload,
        end=_end,
        erase=same,
    )
)
write_out = define(
    OpSpec(
        schema="write_out(Tensor host, str name) -> Tensor",
        kind=Kind.LAUNCH,
        carries=Carries.VALUE,
        lands=Tier.NVME,
        takes=frozenset({Holds.HOSTED}),
        fake=lambda host, name: fake_on_host(host),
        run=lambda calls, host, name: calls.write_out(host, name),
        lane=Lane.TO_NVME,
        verb="WR",
        means="write to NVMe",
        task=_task,
        moves=_moves_to_nvme,
        hold=_hold,
        arrive=hold_at_source,
        stem="write",
        arrives_as=_on_nvme,
        write=_write_to_nvme,
        read=_read_write_out,
        order=_order_write_out,
        end=_end,
        erase=same,
    )
)
read_back = define(
    OpSpec(
        schema="read_back(Tensor stored) -> Tensor",
        kind=Kind.LAUNCH,
        carries=Carries.VALUE,
        lands=Tier.HOST,
        takes=frozenset({Holds.STORED}),
        fake=fake_on_host,
        run=lambda calls, stored: calls.read_back(stored),
        lane=Lane.NVME,
        verb="RD",
        means="read from NVMe",
        task=_task,
        moves=_moves_from_nvme,
        hold=_hold,
        arrive=hold_at_source,
        stem="read",
        arrives_as=_on_host,
        write=_write_from_nvme,
        read=_read_read_back,
        order=_order_read_back,
        end=_end,
        erase=same,
    )
)
