"""Gradients: packed into a bucket's buffer, reduced, stored in p.grad, and used by updates.

`grad_buffer` allocates the flat buffer, `pack` writes gradients into it, `reduce_scatter` (or
`all_reduce`, if nothing is sharded) launches the reduction, and `store_grad` moves the result to
p.grad. `update` runs the optimizer on a shard in place, during backward if the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Category, Storage, is_scaled, landing_dtype
from zerofx.analysis.time.tasks import Walk, update_beside
from zerofx.codegen.load_calls import Calls
from zerofx.codegen.schedule import Function
from zerofx.codegen.text import wrap_list
from zerofx.comm.collectives import all_reduce_bytes
from zerofx.ir.graphs import is_in_place
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.order import FULL, Buffer, Order, argument
from zerofx.ir.program import Planned
from zerofx.ir.spec import (
    Carries,
    Holds,
    Kind,
    Lane,
    OpSpec,
    Payload,
    define,
    launch_of,
    slot_of,
    spec_of,
)
from zerofx.ir.verify_fault import name_of, user_line
from zerofx.ir.verify_values import Numbering, Packed
from zerofx.layout.buckets import Bucket, Layout
from zerofx.layout.tiers import Tier
from zerofx.ops.gathers import erase_to_nothing, hold_nothing, is_in_slot, is_lasting
from zerofx.ops.waits import same
from zerofx.policy import exchange, reduction
from zerofx.policy.reduction import Leg

_Format = torch.dtype | None


# -- what torch needs -----------------------------------------------------------------------------
def _fake_grad_buffer(
    like: Tensor, bucket: int, numel: int, zero: bool, slot: int = -1, *, dtype: _Format = None
) -> Tensor:
    return like.new_empty(numel, dtype=dtype)


def _run_grad_buffer(
    calls: Any, like: Tensor, bucket: int, numel: int, zero: bool, slot: int = -1,
    *, dtype: _Format = None,
) -> Tensor:  # fmt: skip
    return calls.grad_buffer(bucket, zero, slot)


def _fake_store_grad(reduced: Tensor, bucket: int, *, dtype: _Format = None) -> Tensor:
    return torch.empty_like(reduced, dtype=dtype)


# -- code -----------------------------------------------------------------------------------------
def _write_grad_buffer(w: Function, node: fx.Node) -> tuple[str, ...]:
    where = info(node)
    zero = ", zero=True" if node.args[3] else ""
    call = f"rt.grad_buffer(bucket={where.index}{zero}, slot={slot_of(node)})"
    return f"{w.bind(node)} = {call}", where.unit, f"+{w.size(node)}"


def _read_grad_buffer(r: Calls, bucket: int, zero: bool = False, slot: int = -1) -> Tensor:
    b = r.bucket(bucket)
    node = r.value(r.shards[bucket], "the shard")
    slots = () if slot == -1 else (slot,)
    made = r.append(
        grad_buffer, node, bucket, b.numel, zero, *slots,
        named=_cast(b, b.reduce_dtype), **r.of_bucket(b),
    ).meta["val"]  # fmt: skip
    r.filling[id(made)] = bucket
    return made


def _cast(bucket: Bucket, dtype: torch.dtype) -> dict[str, Any] | None:
    """Return the dtype argument if gradients are reduced in another format than the shards'."""
    return {"dtype": dtype} if bucket.reduce_dtype is not bucket.dtype else None


def _write_pack(w: Function, node: fx.Node) -> tuple[str, ...]:
    flat: Any
    grads: Any
    offsets: Any
    flat, grads, offsets = node.args
    bucket = w.program.layout.buckets[info(node).index]
    places = {p.offset: i for i, p in enumerate(bucket.params)}
    positions = tuple(places[o] for o in offsets)
    w.names.share(node, flat)
    head = f"rt.pack({w.bind(flat)}, {bucket.index}, {positions}, "
    return (f"{head}{wrap_list([w.bind(g) for g in grads], len(head) + 5)})",)


def _read_pack(
    r: Calls, buffer: Tensor, bucket: int, params: tuple[int, ...], grads: Sequence[Tensor]
) -> None:
    if r.filling.get(id(buffer), bucket) != bucket:
        mine = r.filling[id(buffer)]
        raise r.refuse(f"rt.pack names bucket {bucket}, but the buffer is that of bucket {mine}.")
    node = r.value(buffer, "the gradient buffer")
    offsets = [p.offset for p in r.members(bucket, params)]
    given = [r.value(g, "a gradient") for g in grads]
    r.append(pack, node, given, offsets, **r.of_bucket(r.bucket(bucket)))


def _write_reduce(w: Function, node: fx.Node) -> tuple[str, ...]:
    packed: Any
    packed, bucket, _, scale = node.args[:4]
    call = f"rt.{w.method(node)}({w.bind(packed)}, bucket={bucket}, scale={scale!r})"
    return f"{w.bind(node)} = {call}", info(node).unit


def _read_reduce_scatter(r: Calls, buffer: Tensor, bucket: int, scale: float) -> Any:
    return append_reduction(r, reduce_scatter, buffer, bucket, scale)


def _read_all_reduce(r: Calls, buffer: Tensor, bucket: int, scale: float) -> Any:
    return append_reduction(r, all_reduce, buffer, bucket, scale)


def append_reduction(
    r: Calls, target: Any, buffer: Tensor, bucket: int, scale: float, *more: Any
) -> Any:
    """Append a reduction of a packed buffer, and return what its wait takes."""
    b = r.bucket(bucket)
    node = r.value(buffer, "the gradient buffer")
    numel = r.layout.shard_numel(b)
    return r.launch(r.append(target, node, bucket, numel, scale, *more, **r.of_bucket(b)))


def _write_rows(w: Function, node: fx.Node) -> tuple[str, ...]:
    indices: Any = node.args[4]
    call, unit = _write_reduce(w, node)
    return f"{call[:-1]}, indices=[{', '.join(w.bind(i) for i in indices)}])", unit


def _read_reduce_scatter_rows(
    r: Calls, buffer: Tensor, bucket: int, scale: float, indices: Sequence[Tensor]
) -> Any:
    given = [r.value(i, "indices of rows") for i in indices]
    return append_reduction(r, reduce_scatter_rows, buffer, bucket, scale, given)


def _read_all_reduce_rows(
    r: Calls, buffer: Tensor, bucket: int, scale: float, indices: Sequence[Tensor]
) -> Any:
    given = [r.value(i, "indices of rows") for i in indices]
    return append_reduction(r, all_reduce_rows, buffer, bucket, scale, given)


def _write_store(w: Function, node: fx.Node) -> tuple[str, ...]:
    reduced = w.bind(node.all_input_nodes[0])
    return f"rt.store_grad({reduced}, bucket={info(node).index})", info(node).unit


def _read_store(r: Calls, reduced: Tensor, bucket: int) -> None:
    b = r.bucket(bucket)
    node = r.value(reduced, "the reduced slice")
    r.stored[bucket] = r.append(store_grad, node, bucket, named=_cast(b, b.dtype), **r.of_bucket(b))


def _write_update(w: Function, node: fx.Node) -> tuple[str, ...]:
    stored, shard = node.all_input_nodes
    call = f"rt.update({w.buffer(shard)}, bucket={info(node).index})"
    return call, info(node).unit, f"-{w.size(stored)}"


def _read_update(r: Calls, shard: Tensor, bucket: int) -> None:
    node = r.value(shard, f"the shard of bucket {bucket}")
    stored = r.stored.get(bucket)
    if stored is None:
        raise r.refuse(f"rt.update of bucket {bucket} comes before rt.store_grad of it.")
    r.append(update, stored, node, bucket, **r.of_bucket(r.bucket(bucket)))


# -- time -----------------------------------------------------------------------------------------
def _task_grad_buffer(w: Walk, node: fx.Node) -> None:
    if node.args[3]:
        price = w.found.prices.touch(nbytes(value(node)))
        w.found.computes("pack", f"zero b{info(node).index}", price, info(node))


def _task_pack(w: Walk, node: fx.Node) -> None:
    size = sum(nbytes(value(g)) for g in node.all_input_nodes[1:])
    price = w.found.prices.touch(2 * size)
    w.found.computes("pack", f"pack b{info(node).index}", price, info(node))


def _task_reduce(w: Walk, node: fx.Node) -> None:
    bucket = w.bucket(node)
    if not w.reduces(bucket):
        size = 3 * nbytes(value(node.all_input_nodes[0]))
        price = w.found.prices.touch(size)
        w.found.computes("store", f"sum b{bucket.index}", price, info(node))
        return
    shard, spec = nbytes(value(node)), spec_of(node)
    assert spec is not None
    before: Leg | None = None
    for leg in spec.legs(w.layout.mesh):
        if before is not None:
            w.arrive(node, shard * before.times, before.size)
        size = shard * leg.num_slices * leg.times
        w.collective(node, leg.kind, size, leg.axis, leg.times)
        before = leg


def _most_rows(program: Planned, node: fx.Node) -> int | None:
    """Return the most rows that a reduction sends, or None if it sends the whole table."""
    indices: Any = node.args[4]
    bucket = program.layout.buckets[info(node).index]
    rows = min(sum(value(i).numel() for i in indices), bucket.params[0].shape[0])
    is_reduced = bool(reduction.legs(program.layout.mesh))
    return rows if is_reduced and reduction.rows_are_less(program.layout, bucket, rows) else None


def _task_rows(w: Walk, node: fx.Node) -> None:
    bucket, rows = w.bucket(node), _most_rows(w.program, node)
    if rows is None or not w.reduces(bucket):
        _task_reduce(w, node)
        return
    (leg,) = reduction.legs(w.layout.mesh)
    width = bucket.params[0].shape[1]
    size = rows * (width * value(node).element_size() + reduction.ROW_NUMBER_BYTES) * leg.size
    w.collective(node, "all_gather", size, leg.axis)


def _sends_rows(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
    """Return the payloads of the most rows possible, after the exchange of row counts."""
    rows = _most_rows(program, node)
    legs = reduction.legs(program.layout.mesh)
    number = reduction.ROW_NUMBER_BYTES
    counts = [
        Payload("all_gather", exchange.part_sent(number, leg.size), number, leg.axis)
        for leg in legs
    ]
    if rows is None:
        return counts + sends_reduction(program, node, rank)
    table, item = program.layout.buckets[info(node).index].params[0], value(node).element_size()
    sizes = (rows * number, number), (rows * table.shape[1] * item, item)
    return counts + [
        Payload("all_gather", exchange.part_sent(n, legs[0].size), i, legs[0].axis)
        for n, i in sizes
    ]


def sends_reduction(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
    """Return the payload of a reduction over each axis."""
    mesh, out, spec = program.layout.mesh, value(node), spec_of(node)
    assert spec is not None
    found = []
    for leg in spec.legs(mesh):
        if leg.kind == "reduce_scatter":
            sent = exchange.part_sent(nbytes(out), leg.size)
        else:
            sent = all_reduce_bytes(out, mesh.position(leg.axis, rank), leg.size)
        found += [Payload(leg.kind, sent, out.element_size(), leg.axis)] * leg.times
    return found


def _task_store(w: Walk, node: fx.Node) -> None:
    """Append the task that moves a reduced slice to p.grad; none if it was reduced there."""
    bucket = w.bucket(node)
    if not w.reduces(bucket):
        return
    adds, scaled = w.found.micro > 0, is_scaled(w.program)
    landed = landing_dtype(w.program, bucket) if bucket.is_away else bucket.reduce_dtype
    arrived = w.data(node)
    if reduction.is_stored_apart(w.layout, bucket, scaled, adds):
        numel = w.layout.shard_numel(bucket)
        size = numel * (landed.itemsize + (1 + adds) * bucket.dtype.itemsize)
        name = f"store b{bucket.index}"
        if bucket.is_away:
            price = w.found.prices.touch(size, Tier.HOST)
            w.found.hosts("store", name, price, info(node), arrived)
        else:
            price = w.found.prices.touch(size)
            w.found.computes("store", name, price, info(node))
    w.stored[bucket.index] = arrived[0] if arrived else w.found.compute


def _task_update(w: Walk, node: fx.Node) -> None:
    bucket = w.bucket(node)
    if bucket.is_away:
        needs = [t for t in [w.stored.get(bucket.index)] if t is not None]
        w.updates.append(update_beside(w.found, w.layout, bucket, needs))
        return
    numel = w.layout.shard_numel(bucket)
    price = w.found.prices.update(Tier.DEVICE, numel)
    w.found.computes("update", f"update b{bucket.index}", price, info(node))


# -- memory ---------------------------------------------------------------------------------------
def _hold_grad_buffer(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    if is_in_place(node, p.program.layout) and not p.packs_apart:
        return ()  # the gradient's own memory
    name = info(node).unit or node.name
    return p.own(node, Category.GRADIENTS, value(node), time, slot_of(node), name=name)


def hold_reduced(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the storage of a reduced slice: none of its own if the reduction ends in p.grad.

    A micro-batch whose gradients are only summed has no reduced slice.
    """
    if not p.micro.reduces:
        return ()
    if p.home(node) is not Tier.DEVICE:  # until it has been offloaded
        return p.own(node, Category.GRADIENTS, value(node), time, name="reduced slice")
    if not p.reduces_apart(node):
        return ()  # the gradient's shard, or a borrowed buffer
    return hold_first(p, node, time)


_ROWS = "rows of a table"


def _hold_rows(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the storages of the result, and of all ranks' rows, which are held until the wait."""
    held, rows = hold_reduced(p, node, time), _most_rows(p.program, node)
    if rows is None or not p.micro.reduces:
        return held
    (leg,) = reduction.legs(p.program.layout.mesh)
    width, out = p.bucket(node).params[0].shape[1], value(node)
    size = leg.size * rows * (width * out.element_size() + reduction.ROW_NUMBER_BYTES)
    received = out.new_empty(size, dtype=torch.int8)
    return held + p.own(node, Category.COMMUNICATION, received, time, name=_ROWS)


def _not_rows(held: tuple[Storage, ...]) -> tuple[Storage, ...]:
    return tuple(s for s in held if s.name != _ROWS)


def hold_first(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the storages of the first argument, which the result aliases."""
    return p.held[node.all_input_nodes[0]]


def _is_reduced_static(node: fx.Node, layout: Layout) -> bool:
    """Return whether the result of a reduction stays: in p.grad, or in a buffer of the engine.

    A result that is offloaded does not. Neither does one that is reduced where it was packed: that
    memory is p.grad in the first backward of a step, but separate memory in later ones
    (`policy.reduction.end_of`).
    """
    bucket = layout.buckets[info(node).index]
    return not bucket.is_away and not layout.reduces_in_place(bucket)


# -- proof ----------------------------------------------------------------------------------------
def _order_grad_buffer(o: Order, node: fx.Node) -> None:
    bucket = o.bucket(node)
    o.numel(node, bucket.numel, f"bucket {bucket.index}")
    o.dtype(node, bucket.reduce_dtype, f"a gradient of bucket {bucket.index} on its way")
    before = o.filling.get(bucket.index)
    if before is not None and before.packed:
        o.fail(
            node,
            f"{node.name} is a second gradient buffer of bucket {bucket.index} "
            f"({bucket.label()}), after {before.made.name}. Pack into that one.",
        )
    buffer = Buffer(Holds.PACKED, node, bucket.index, slot_of(node))
    buffer.zeroed = bool(argument(node, 3))
    o.filling[bucket.index] = buffer
    o.add(node, buffer)
    o.claim(node, buffer)


def _order_pack(o: Order, node: fx.Node) -> None:
    grads: Any
    offsets: Any
    buffer = _packed_buffer(o, node)
    bucket = o.layout.buckets[buffer.bucket]
    _, grads, offsets = node.args
    if len(grads) != len(offsets):
        o.fail(node, f"{node.name} packs {len(grads)} gradients at {len(offsets)} offsets.")
    if buffer.reduced is not None:
        o.fail(
            node,
            f"{node.name} packs into bucket {bucket.index} ({bucket.label()}) after "
            f"{buffer.reduced.name} has reduced it. Move the reduction after the last pack.",
        )
    for grad, offset in zip(grads, offsets, strict=True):
        check_gradient(o, node, buffer, bucket, grad, offset)
    o.roots.set(node, buffer)


def _packed_buffer(o: Order, node: fx.Node) -> Buffer:
    packed: Any = node.args[0]
    buffers = o.roots[packed]
    spec = spec_of(packed)
    is_whole = spec is not None and (spec.kind is Kind.PACK or _is_grad_buffer(spec))
    if len(buffers) != 1 or buffers[0].kind is not Holds.PACKED or not is_whole:
        o.fail(node, f"{node.name} is given {packed}, which is no gradient buffer.")
    return buffers[0]


def _is_grad_buffer(spec: OpSpec) -> bool:
    return spec.kind is Kind.MAKE and spec.carries is Carries.GRADIENTS


def check_gradient(
    o: Order, node: fx.Node, buffer: Buffer, bucket: Bucket, grad: fx.Node, offset: int
) -> None:
    """Check a gradient that a node takes at an offset of its bucket, and record it."""
    param = bucket.at.get(offset)
    if param is None:
        o.fail(
            node,
            f"{node.name} packs {name_of(grad)} at offset {offset}, where bucket "
            f"{bucket.index} ({bucket.label()}) has no parameter.",
        )
    given = value(grad)
    if tuple(given.shape) != param.shape or given.dtype != bucket.compute_dtype:
        o.fail(
            node,
            f"the gradient packed for {param.name} is {given.dtype}{list(given.shape)}. The "
            f"parameter is {bucket.compute_dtype}{list(param.shape)} ({user_line(grad)}).",
        )
    before = buffer.packed.get(offset, grad)
    if before is not grad:
        o.fail(
            node,
            f"the gradient of {param.name} is packed twice: {name_of(before)}, then "
            f"{name_of(grad)} ({user_line(grad)}).",
        )
    if o.expected is not None and offset not in o.expected.get(bucket.index, {}):
        o.fail(node, f"{node.name} packs a gradient of {param.name}, which has none.")
    buffer.packed[offset] = grad


def _order_reduce(o: Order, node: fx.Node) -> None:
    bucket, buffer = o.bucket(node), _packed_buffer(o, node)
    label = f"bucket {bucket.index} ({bucket.label()})"
    if buffer.bucket != bucket.index:
        o.fail(node, f"{node.name} reduces as {label} the gradients of bucket {buffer.bucket}.")
    if bucket.index in o.reduced:
        first = o.reduced[bucket.index].made.name
        o.fail(node, f"{label} is reduced twice: by {first} and by {node.name}.")
    spec = spec_of(node)
    assert spec is not None
    axis = reduction.first_axis(o.layout.mesh)
    if spec.axis != axis:
        o.fail(
            node,
            f"{label} is sharded over {o.layout.shard_size} ranks: its reduction is "
            f"{reduction.kind_over(axis)}, not {spec.name}.",
        )
    o.numel(node, o.layout.shard_numel(bucket), f"a shard of bucket {bucket.index}")
    _order_scale(o, node, label)
    _order_complete(o, node, buffer, bucket)
    buffer.reduced, buffer.landed = node, False
    made = Buffer(Holds.REDUCED, node, bucket.index, landed=False, source=buffer)
    made.is_away = o.is_away(bucket)
    o.reduced[bucket.index] = made
    o.add(node, made)


def _order_scale(o: Order, node: fx.Node, label: str) -> None:
    scale, world = argument(node, 3), o.layout.mesh.num_data_ranks
    if scale != 1.0 / world:
        o.fail(
            node,
            f"{label} is reduced at scale {scale!r}. The mean over {world} ranks is "
            f"1/{world} = {1.0 / world!r}.",
        )


def _order_complete(o: Order, node: fx.Node, buffer: Buffer, bucket: Bucket) -> None:
    expected = (o.expected or {}).get(bucket.index, {})
    missing = [p for offset, p in expected.items() if offset not in buffer.packed]
    if missing:
        o.fail(
            node,
            f"{node.name} reduces bucket {bucket.index} before the gradient of "
            f"{missing[0].name} is packed. Move it after the last pack of the bucket.",
        )
    if len(buffer.packed) < len(bucket.params) and not buffer.zeroed:
        rest = next(p.name for p in bucket.params if p.offset not in buffer.packed)
        o.fail(
            node,
            f"{node.name} reduces bucket {bucket.index}, where nothing was packed for {rest}: "
            f"make {buffer.made.name} with zero=True.",
        )


def reduced_slice(o: Order, node: fx.Node, bucket: Bucket, verb: str) -> Buffer:
    """Return the reduced gradients that a node receives, which must be those of its bucket."""
    reduced: Any = node.args[0]
    buffers = o.roots[reduced]
    if len(buffers) != 1 or buffers[0].kind is not Holds.REDUCED:
        o.fail(node, f"{node.name} {verb} {reduced}, which no reduction delivered.")
    if buffers[0].bucket != bucket.index:
        o.fail(
            node,
            f"{node.name} {verb} the reduced gradients of bucket {buffers[0].bucket} as those "
            f"of bucket {bucket.index} ({bucket.label()}).",
        )
    return buffers[0]


def _order_store(o: Order, node: fx.Node) -> None:
    reduced: Any = node.args[0]
    bucket = o.bucket(node)
    buffer = reduced_slice(o, node, bucket, "stores")
    if buffer.is_away and reduced.args[0] is not buffer.offloaded:
        o.fail(
            node,
            f"{node.name} stores {o.label(buffer)} directly from the device. Its bucket "
            "is kept elsewhere. Store what offload_grad's wait returns.",
        )
    if buffer.stored is not None:
        o.fail(node, f"{o.label(buffer)} is stored twice: {buffer.stored.name} did it.")
    o.dtype(node, bucket.dtype, f"a stored gradient of bucket {bucket.index}")
    buffer.stored = node


def _order_update(o: Order, node: fx.Node) -> None:
    stored: Any
    shard: Any
    stored, shard = node.args[:2]
    bucket = o.bucket(node)
    label = f"bucket {bucket.index} ({bucket.label()})"
    if bucket.index in o.updates:
        first = o.updates[bucket.index].name
        o.fail(node, f"{label} is updated twice: by {first} and by {node.name}.")
    reduced = o.reduced.get(bucket.index)
    if reduced is None or reduced.stored is not stored:
        o.fail(node, f"{node.name} updates {label} with {stored}, which is not its gradient.")
    held = o.roots[shard]
    is_shard = shard.op == "placeholder" and len(held) == 1 and held[0].kind is Holds.SHARD
    if not is_shard or held[0].bucket != bucket.index:
        o.fail(node, f"{node.name} updates {label}, but is given {shard} as its shard.")
    for buffer in o.buffers:
        is_sent = buffer.kind in (*FULL, Holds.STAGED, Holds.NEAR) and not buffer.landed
        if buffer.bucket == bucket.index and is_sent:
            o.fail(
                node,
                f"{node.name} overwrites the shard of {label} while {buffer.made.name} still "
                "sends it. Move the update after the wait.",
            )
    held[0].updated = o.updates[bucket.index] = node
    if _is_followed(o, bucket.index):
        for buffer in o.buffers:
            if buffer.bucket == bucket.index and buffer.kind in (Holds.RESIDENT, Holds.NEAR):
                buffer.updated = node


def _is_followed(o: Order, bucket: int) -> bool:
    """Return whether the result of a bucket's update is copied to the resident copies."""
    return not o.program.plan.offload.delayed and bucket in o.program.layout.far_buckets


def looked_up(grad: fx.Node) -> list[fx.Node]:
    """Return the indices of all rows in which a table's gradient may differ from zero.

    Return [] if forward does anything with the table other than looking up rows.
    """
    if grad.target in _LOOKUPS:
        indices: Any = grad.args[1]
        return [indices]
    if grad.target is torch.ops.aten.add.Tensor and not grad.kwargs:
        parts = [looked_up(each) if isinstance(each, fx.Node) else [] for each in grad.args]
        return list(dict.fromkeys(i for part in parts for i in part)) if all(parts) else []
    return []


_LOOKUPS = (
    torch.ops.aten.embedding_dense_backward.default,
    torch.ops.aten._embedding_bag_backward.default,
)


def _order_rows(o: Order, node: fx.Node) -> None:
    _order_reduce(o, node)
    indices: Any = node.args[4]
    for grad in _packed_buffer(o, node).packed.values():
        rows = looked_up(grad)
        if not rows or not set(rows) <= set(indices):
            has = f"those of {[i.name for i in rows]}" if rows else "any"
            o.fail(
                node,
                f"{node.name} sends the rows {[i.name for i in indices]} of {name_of(grad)}, which "
                f"has {has} ({user_line(grad)}).",
            )


def _erase_buffer(numbering: Numbering, node: fx.Node) -> Any:
    return Packed(node.args[1])  # type: ignore[arg-type]


def _erase_pack(numbering: Numbering, node: fx.Node) -> Any:
    flat: Any
    grads: Any
    offsets: Any
    flat, grads, offsets = node.args
    packed = numbering.of[flat]
    assert isinstance(packed, Packed), f"{node} packs into what is no gradient buffer"
    for grad, offset in zip(grads, offsets, strict=True):
        packed.contents[offset] = (str(numbering.of[grad]), node)
    return packed


def _erase_reduce(numbering: Numbering, node: fx.Node) -> Any:
    packed = numbering.of[node.args[0]]  # type: ignore[index]
    assert isinstance(packed, Packed), f"{node} reduces what is no gradient buffer"
    return Packed(packed.bucket, dict(packed.contents))


def _erase_store(numbering: Numbering, node: fx.Node) -> Any:
    stored = same(numbering, node)
    numbering.give(node, stored)
    return stored


def holds_gradients(node: fx.Node) -> bool:
    """Return whether a node allocates the flat buffer of a bucket's gradients."""
    spec = spec_of(node)
    return spec is not None and _is_grad_buffer(spec)


# -- the ops --------------------------------------------------------------------------------------
grad_buffer = define(
    OpSpec(
        schema="grad_buffer(Tensor like, int bucket, int numel, bool zero, int slot=-1, *, "
        "ScalarType? dtype=None) -> Tensor",
        kind=Kind.MAKE,
        carries=Carries.GRADIENTS,
        bucket=1,
        slot=4,
        in_backward=True,
        takes=frozenset({Holds.SHARD}),
        fake=_fake_grad_buffer,
        run=_run_grad_buffer,
        task=_task_grad_buffer,
        hold=_hold_grad_buffer,
        is_static=is_in_slot,
        adds=lambda node: nbytes(value(node)),
        is_quiet=True,
        stem="grads",
        write=_write_grad_buffer,
        read=_read_grad_buffer,
        order=_order_grad_buffer,
        erase=_erase_buffer,
    )
)
pack = define(
    OpSpec(
        schema="pack(Tensor(a!) buffer, Tensor[] grads, int[] offsets) -> Tensor(a!)",
        kind=Kind.PACK,
        carries=Carries.GRADIENTS,
        gradients=1,
        in_backward=True,
        takes=frozenset({Holds.PACKED}),
        fake=lambda buffer, grads, offsets: buffer,
        run=lambda calls, buffer, grads, offsets: calls.pack(buffer, grads, offsets),
        has_effect=True,
        lane=Lane.COMPUTE,
        task=_task_pack,
        hold=hold_first,
        stem="packed",
        write=_write_pack,
        read=_read_pack,
        order=_order_pack,
        erase=_erase_pack,
    )
)


def _reduction(name: str, axis: str, verb: str, read: Callable[..., Any]) -> OpSpec:
    """Return the spec of a reduction over one axis; the two specs differ only in that."""
    return OpSpec(
        schema=f"{name}(Tensor packed, int bucket, int numel, float scale) -> Tensor",
        kind=Kind.LAUNCH,
        carries=Carries.GRADIENTS,
        axis=axis,
        bucket=1,
        in_backward=True,
        takes=frozenset({Holds.PACKED}),
        fake=lambda packed, bucket, numel, scale: packed.new_empty(numel),
        run=lambda calls, packed, bucket, numel, scale: calls.reduce(packed, bucket, scale),
        has_effect=True,
        lane=Lane.REDUCE,
        verb=verb,
        means=name.replace("_", "-"),
        task=_task_reduce,
        sends=sends_reduction,
        hold=hold_reduced,
        is_static=_is_reduced_static,
        stem="reduce",
        arrives_as=lambda wait: f"reduced_{info(wait).index}",
        place="reduce",
        write=_write_reduce,
        read=read,
        order=_order_reduce,
        erase=_erase_reduce,
    )


SCATTER = _reduction("reduce_scatter", "shard", "RS", _read_reduce_scatter)
_ALL = _reduction("all_reduce", "replicate", "AR", _read_all_reduce)
reduce_scatter = define(SCATTER)
all_reduce = define(_ALL)


def _by_rows(dense: OpSpec, read: Callable[..., Any]) -> OpSpec:
    """Return the spec of a table's reduction that sends only the rows of `indices`."""
    return replace(
        dense,
        schema=f"{dense.name}_rows(Tensor packed, int bucket, int numel, float scale, "
        "Tensor[] indices) -> Tensor",
        fake=lambda packed, bucket, numel, scale, indices: packed.new_empty(numel),
        run=lambda calls, packed, bucket, numel, scale, indices: calls.reduce(
            packed, bucket, scale, indices
        ),
        means=f"{dense.means} by rows",
        verb=f"{dense.verb}r",
        task=_task_rows,
        sends=_sends_rows,
        hold=_hold_rows,
        arrive=lambda p, node, time: _not_rows(p.held[launch_of(node)]),
        borrows=lambda program, node: _most_rows(program, node) is None,
        write=_write_rows,
        read=read,
        order=_order_rows,
    )


reduce_scatter_rows = define(_by_rows(SCATTER, _read_reduce_scatter_rows))
all_reduce_rows = define(_by_rows(_ALL, _read_all_reduce_rows))
store_grad = define(
    OpSpec(
        schema="store_grad(Tensor reduced, int bucket, *, ScalarType? dtype=None) -> Tensor",
        kind=Kind.STORE,
        carries=Carries.REDUCED,
        bucket=1,
        in_backward=True,
        takes=frozenset({Holds.REDUCED}),
        fake=_fake_store_grad,
        run=lambda calls, reduced, bucket, *, dtype=None: calls.store_grad(reduced, bucket),
        has_effect=True,
        task=_task_store,
        hold=hold_nothing,  # the stored slice is in p.grad
        is_static=is_lasting,
        is_quiet=True,
        stem="stored",
        write=_write_store,
        read=_read_store,
        order=_order_store,
        erase=_erase_store,
    )
)
update = define(
    OpSpec(
        schema="update(Tensor stored, Tensor(a!) shard, int bucket) -> ()",
        kind=Kind.UPDATE,
        carries=Carries.SHARD,
        bucket=2,
        in_backward=True,
        takes=frozenset({Holds.SHARD}),
        fake=lambda stored, shard, bucket: None,
        run=lambda calls, stored, shard, bucket: calls.update(stored, shard, bucket),
        has_effect=True,
        lane=Lane.COMPUTE,
        task=_task_update,
        hold=hold_first,
        frees=lambda node: nbytes(value(node.all_input_nodes[0])),
        stem="update",
        write=_write_update,
        read=_read_update,
        order=_order_update,
        erase=erase_to_nothing,
    )
)
