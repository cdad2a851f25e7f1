"""One statement of the schedule per zerofx op: the call, and the comment beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from zerofx.codegen.names import Names
from zerofx.codegen.text import describe, wrap_list, wrap_tuple
from zerofx.ir import ops
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.program import Program
from zerofx.sizes import format_bytes

Statement = tuple[str, ...]


def statement(node: fx.Node, names: Names, program: Program) -> Statement:
    """Return a communication node's statement, and the fields of the comment beside it."""
    return _WRITERS[node.target](node, names, program)


def buffer(node: fx.Node, names: Names) -> str:
    """Name a flat buffer: a shard by its place in `shards`, any other by its own name."""
    if info(node).role is Role.SHARD:
        return f"shards[{info(node).index}]"
    return names.bind(node)


def slot_of(node: fx.Node) -> int:
    """Return the slot of a gather, reload, grad_buffer or release; -1 where it has none."""
    position = {ops.all_gather: 3, ops.reload_shard: 3, ops.grad_buffer: 4, ops.release: 1}[
        node.target  # type: ignore[index]
    ]
    args: Any = node.args
    return int(args[position]) if len(args) > position else -1


def _size(node: fx.Node) -> str:
    return format_bytes(nbytes(value(node)))


def _into_slot(verb: str) -> Callable[[fx.Node, Names, Program], Statement]:
    def write(node: fx.Node, names: Names, program: Program) -> Statement:
        where = info(node)
        shard = buffer(node.all_input_nodes[0], names)
        call = f"rt.{verb}({shard}, bucket={where.index}, slot={slot_of(node)})"
        return f"{names.bind(node)} = {call}", where.unit, describe(value(node)), f"+{_size(node)}"

    return write


def _full(verb: str) -> Callable[[fx.Node, Names, Program], Statement]:
    def write(node: fx.Node, names: Names, program: Program) -> Statement:
        shard = buffer(node.all_input_nodes[0], names)
        call = f"rt.{verb}({shard}, bucket={info(node).index})"
        return f"{names.bind(node)} = {call}", info(node).unit

    return write


def _wait(node: fx.Node, names: Names, program: Program) -> Statement:
    launch = node.all_input_nodes[0]
    call = f"{names.bind(node)} = rt.wait({names.bind(launch)})"
    if launch.target in (ops.offload, ops.offload_grad):
        return call, info(node).unit, f"-{_size(launch)}"
    if launch.target is ops.write_out:
        return call, info(node).unit, f"host -{_size(launch)}"
    return (call,)


def _offload(node: fx.Node, names: Names, program: Program) -> Statement:
    call = f"rt.offload({names.bind(node.all_input_nodes[0])})"
    made = f"{names.bind(node)} = {call}"
    return made, info(node).unit, describe(value(node)), f"host +{_size(node)}"


def _reload(node: fx.Node, names: Names, program: Program) -> Statement:
    call = f"rt.reload({names.bind(node.all_input_nodes[0])})"
    made = f"{names.bind(node)} = {call}"
    return made, info(node).unit, describe(value(node)), f"+{_size(node)}"


def _write_out(node: fx.Node, names: Names, program: Program) -> Statement:
    args: Any = node.args
    call = f"rt.write_out({names.bind(args[0])}, {args[1]!r})"
    return f"{names.bind(node)} = {call}", info(node).unit, f"nvme +{_size(node)}"


def _read_back(node: fx.Node, names: Names, program: Program) -> Statement:
    call = f"rt.read_back({names.bind(node.all_input_nodes[0])})"
    return f"{names.bind(node)} = {call}", info(node).unit, f"host +{_size(node)}"


def _read(node: fx.Node, names: Names, program: Program) -> Statement:
    shard = buffer(node.all_input_nodes[0], names)
    call = f"rt.read_shard({shard}, bucket={info(node).index})"
    return f"{names.bind(node)} = {call}", info(node).unit, f"host +{_size(node)}"


def _offload_grad(node: fx.Node, names: Names, program: Program) -> Statement:
    reduced = names.bind(node.all_input_nodes[0])
    call = f"rt.offload_grad({reduced}, bucket={info(node).index})"
    return f"{names.bind(node)} = {call}", info(node).unit, f"host +{_size(node)}"


def _release(node: fx.Node, names: Names, program: Program) -> Statement:
    full = node.all_input_nodes[0]
    call = f"rt.release({buffer(full, names)}, slot={slot_of(node)})"
    return call, info(node).unit, f"-{_size(full)}"


def _grad_buffer(node: fx.Node, names: Names, program: Program) -> Statement:
    where = info(node)
    zero = ", zero=True" if node.args[3] else ""
    call = f"rt.grad_buffer(bucket={where.index}{zero}, slot={slot_of(node)})"
    return f"{names.bind(node)} = {call}", where.unit, f"+{_size(node)}"


def _pack(node: fx.Node, names: Names, program: Program) -> Statement:
    assert program.layout is not None
    args: Any = node.args
    flat, grads, offsets = args
    bucket = program.layout.buckets[info(node).index]
    places = {p.offset: i for i, p in enumerate(bucket.params)}
    positions = tuple(places[o] for o in offsets)
    head = f"rt.pack({names.bind(flat)}, {bucket.index}, {positions}, "
    return (f"{head}{wrap_list([names.bind(g) for g in grads], len(head) + 5)})",)


def _reduce(verb: str) -> Callable[[fx.Node, Names, Program], Statement]:
    def write(node: fx.Node, names: Names, program: Program) -> Statement:
        args: Any = node.args
        packed, bucket, _, scale = args
        call = f"rt.{verb}({names.bind(packed)}, bucket={bucket}, scale={scale!r})"
        return f"{names.bind(node)} = {call}", info(node).unit

    return write


def _store(node: fx.Node, names: Names, program: Program) -> Statement:
    reduced = names.bind(node.all_input_nodes[0])
    return f"rt.store_grad({reduced}, bucket={info(node).index})", info(node).unit


def _update(node: fx.Node, names: Names, program: Program) -> Statement:
    args: Any = node.args
    call = f"rt.update({buffer(args[1], names)}, bucket={info(node).index})"
    return call, info(node).unit, f"-{_size(args[0])}"


def _sync(node: fx.Node, names: Names, program: Program) -> Statement:
    values = wrap_list([names.bind(n) for n in node.all_input_nodes], 40)
    users: list[Any] = list(node.users)
    gives = [names.bind(u) for u in sorted(users, key=lambda u: u.args[1])]
    return f"{wrap_tuple(gives, 0)} = rt.sync_buffers({values})", ""


_WRITERS: dict[Any, Callable[[fx.Node, Names, Program], Statement]] = {
    ops.all_gather: _into_slot("all_gather"),
    ops.reload_shard: _into_slot("reload_shard"),
    ops.refresh_shard: _full("refresh_shard"),
    ops.read_shard: _read,
    ops.offload_grad: _offload_grad,
    ops.refresh: _full("refresh"),
    ops.resident: _full("resident"),
    ops.wait: _wait,
    ops.release: _release,
    ops.grad_buffer: _grad_buffer,
    ops.pack: _pack,
    ops.reduce_scatter: _reduce("reduce_scatter"),
    ops.all_reduce: _reduce("all_reduce"),
    ops.store_grad: _store,
    ops.update: _update,
    ops.sync_buffers: _sync,
    ops.offload: _offload,
    ops.reload: _reload,
    ops.write_out: _write_out,
    ops.read_back: _read_back,
}
