"""Gathered parameters: launched from their shards, viewed, released.

`all_gather` gathers a bucket into a slot or into memory of the call's own. `refresh` updates a
resident copy, which persists between calls, and moves nothing if the copy is current. `resident` is
that copy as this step's forward left it. `param_view` is one parameter of a gathered bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Category, Storage, span_bytes
from zerofx.analysis.time.tasks import Walk
from zerofx.codegen.load_calls import Calls
from zerofx.codegen.schedule import Function
from zerofx.codegen.text import describe
from zerofx.ir.graphs import contiguous_stride
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.order import FULL, Buffer, Order
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.spec import (
    Carries,
    Holds,
    Kind,
    Lane,
    OpSpec,
    Payload,
    define,
    kind_of,
    slot_of,
    spec_of,
)
from zerofx.ir.verify_values import Numbering, digest, leaf_digest
from zerofx.layout.buckets import Bucket, Layout
from zerofx.layout.tiers import Tier
from zerofx.policy import exchange
from zerofx.runtime.tiers.host_tier import H2D, dense_bytes

_Format = torch.dtype | None


def fake_full(
    shard: Tensor, bucket: int, numel: int, slot: int = -1, *, dtype: _Format = None
) -> Tensor:
    """Return a flat tensor of `numel` elements, in another format if a dtype is given."""
    return shard.new_empty(numel, dtype=dtype)


def _look(full: Tensor, offset: int, shape: list[int]) -> Tensor:
    """View a parameter by one op instead of three, since this is the most frequent call."""
    return full.as_strided(shape, contiguous_stride(shape), full.storage_offset() + offset)


# -- code -----------------------------------------------------------------------------------------
def write_into_slot(w: Function, node: fx.Node) -> tuple[str, ...]:
    """Write a launch that fills a slot: `g = rt.all_gather(shards[0], bucket=0, slot=1)`."""
    where = info(node)
    shard = w.buffer(node.all_input_nodes[0])
    call = f"rt.{w.method(node)}({shard}, bucket={where.index}, slot={slot_of(node)})"
    return f"{w.bind(node)} = {call}", where.unit, describe(value(node)), f"+{w.size(node)}"


def write_of_shard(w: Function, node: fx.Node) -> tuple[str, ...]:
    """Write a launch that needs no slot: `r = rt.refresh(shards[0], bucket=0)`."""
    shard = w.buffer(node.all_input_nodes[0])
    call = f"rt.{w.method(node)}({shard}, bucket={info(node).index})"
    return f"{w.bind(node)} = {call}", info(node).unit


def append_from_shard(
    r: Calls, target: Any, shard: Tensor, bucket: int, numel: Callable[[Bucket], int], slot: int
) -> fx.Node:
    """Append an op that reads a shard, in the compute format of its bucket."""
    b = r.bucket(bucket)
    node = r.value(shard, f"the shard of bucket {bucket}")
    cast = {"dtype": b.compute_dtype} if b.is_cast else None
    slots = () if slot == -1 else (slot,)
    return r.append(target, node, bucket, numel(b), *slots, named=cast, **r.of_bucket(b))


def _whole(bucket: Bucket) -> int:
    return bucket.numel


def _read_all_gather(r: Calls, shard: Tensor, bucket: int, slot: int = -1) -> Any:
    return r.launch(append_from_shard(r, all_gather, shard, bucket, _whole, slot))


def _read_refresh(r: Calls, shard: Tensor, bucket: int) -> Any:
    return r.launch(append_from_shard(r, refresh, shard, bucket, _whole, -1))


def _read_resident(r: Calls, shard: Tensor, bucket: int) -> Any:
    return append_from_shard(r, resident, shard, bucket, _whole, -1).meta["val"]


def _read_unpack(
    r: Calls, full: Tensor, bucket: int, params: tuple[int, ...]
) -> tuple[Tensor, ...]:
    node = r.value(full, "what rt.unpack takes apart")
    views = []
    for piece in r.members(bucket, params):
        arguments = (node, piece.offset, list(piece.shape))
        unit = r.params[piece.name].unit
        view = r.append(param_view, *arguments, name=piece.name, unit=unit)
        views.append(view.meta["val"])
    return tuple(views)


def _write_release(w: Function, node: fx.Node) -> tuple[str, ...]:
    full = node.all_input_nodes[0]
    call = f"rt.release({w.buffer(full)}, slot={slot_of(node)})"
    return call, info(node).unit, f"-{w.size(full)}"


def _read_release(r: Calls, full: Tensor, slot: int = -1) -> None:
    node = r.value(full, "what rt.release gives back")
    launch = node.args[0] if kind_of(node) is Kind.WAIT else None
    fields = r.of_bucket(r.launched(launch)) if isinstance(launch, fx.Node) else {}
    r.append(release, node, *(() if slot == -1 else (slot,)), **fields)


# -- time -----------------------------------------------------------------------------------------
def sends_shards(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
    """Return the payload of an all-gather: this rank's slice, sent to each other rank."""
    full, shards = value(node), program.layout.shard_size
    if shards == 1:
        return []
    sent = exchange.part_sent(nbytes(full) // shards, shards)
    return [Payload("all_gather", sent, full.element_size())]


def _task_gather(w: Walk, node: fx.Node) -> None:
    w.collective(node, "all_gather", nbytes(value(node)))


def _task_refresh(w: Walk, node: fx.Node) -> None:
    if not w.refresh_moves(node):
        return
    bucket = w.bucket(node)
    if bucket.is_away:
        w.reload(node, nbytes(value(node)) // w.layout.shard_size)
        w.found.ended.add(w.behind[node])
    w.collective(node, "all_gather", nbytes(value(node)))


def _moves_refresh(program: Planned, graph: str, node: fx.Node) -> list[Payload]:
    """Return the copy of a shard that is kept off the device: this rank's slice."""
    layout = program.layout
    if not layout.buckets[info(node).index].is_away:
        return []
    return [Payload(H2D, dense_bytes(value(node)) // layout.shard_size, value(node).element_size())]


# -- memory ---------------------------------------------------------------------------------------
def hold_gathered(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the storage of a gathered bucket: a slot, or memory of the call's own."""
    name = info(node).unit or node.name
    return p.own(node, Category.GATHERED, value(node), time, slot_of(node), name=name)


def is_in_slot(node: fx.Node, layout: Layout) -> bool:
    return slot_of(node) >= 0


def is_lasting(node: fx.Node, layout: Layout) -> bool:
    return True


def _hold_refresh(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return no storage: the copy is resident. Record the temporary cast of a host shard."""
    if not p.is_cast_on_way(node):
        return ()
    cast = span_bytes(value(node)) // p.program.layout.shard_size
    lent = Storage(Category.HOST, cast, "cast copy", time, time, info(node), is_lent=True)
    p.storages.append(lent)
    return ()


def hold_nothing(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return no storage: the result's memory is counted elsewhere."""
    return ()


# -- proof ----------------------------------------------------------------------------------------
def order_gather(o: Order, node: fx.Node) -> None:
    """Check an all-gather: it reads its bucket's shard and writes to unused memory."""
    bucket, near = _order_sent(o, node)
    buffer = Buffer(Holds.GATHERED, node, bucket.index, slot_of(node), landed=False)
    _order_made(o, node, buffer, near)


def _order_sent(o: Order, node: fx.Node) -> tuple[Bucket, Buffer | None]:
    bucket = o.bucket(node)
    near = _sent_shard(o, node, bucket)
    o.numel(node, bucket.numel, f"bucket {bucket.index}")
    o.dtype(node, bucket.compute_dtype, f"bucket {bucket.index} gathered")
    return bucket, near


def _order_made(o: Order, node: fx.Node, buffer: Buffer, near: Buffer | None) -> None:
    if near is not None:
        near.sent.append(buffer)
    o.add(node, buffer)
    o.claim(node, buffer)


def _sent_shard(o: Order, node: fx.Node, bucket: Bucket) -> Buffer | None:
    """Check that a gather sends its bucket's shard; return the reloaded copy, if any."""
    buffers = o.roots[node.args[0]]  # type: ignore[index]
    if len(buffers) != 1 or buffers[0].kind is not Holds.NEAR:
        o.own_shard(node, bucket)
        return None
    if buffers[0].bucket != bucket.index:
        o.fail(
            node,
            f"{node.name} of bucket {bucket.index} ({bucket.label()}) sends the reloaded shard "
            f"of bucket {buffers[0].bucket}.",
        )
    return buffers[0]


def _may_stay(o: Order, node: fx.Node, bucket: Bucket) -> None:
    is_copy = o.layout.shard_size == 1 and bucket.is_away and bucket.source is Tier.DEVICE
    if o.program.plan.stage == 3 and not bucket.persistent and not is_copy:
        o.fail(
            node,
            f"{node.name} keeps bucket {bucket.index} ({bucket.label()}) gathered between "
            "calls. At stage 3 only the persistent bucket is. Use rt.all_gather and release it.",
        )


def under_way(o: Order, bucket: Bucket) -> Buffer | None:
    """Return the copy that another refresh of the bucket is already bringing.

    A refresh moves nothing if the copy is current, and it treats one in flight as current.
    """
    mine = [b for b in o.buffers if b.bucket == bucket.index and not b.landed]
    found = ((b, spec_of(b.made)) for b in mine)
    return next((b for b, s in found if s is not None and s.stays), None)


def _order_refresh(o: Order, node: fx.Node) -> None:
    bucket, near = _order_sent(o, node)
    _may_stay(o, node, bucket)
    if o.name == FORWARD:
        o.crossing.refreshed.add(bucket.index)
    buffer = Buffer(Holds.RESIDENT, node, bucket.index, landed=False)
    buffer.behind = under_way(o, bucket)
    _order_made(o, node, buffer, near)


def _order_resident(o: Order, node: fx.Node) -> None:
    bucket, near = _order_sent(o, node)
    _may_stay(o, node, bucket)
    if o.name != BACKWARD or bucket.index not in o.crossing.refreshed:
        o.fail(
            node,
            f"{node.name} takes bucket {bucket.index} as forward left it, but forward did not "
            "refresh it. Use rt.refresh and wait for it.",
        )
    _order_made(o, node, Buffer(Holds.RESIDENT, node, bucket.index), near)


def _order_view(o: Order, node: fx.Node) -> None:
    full: Any
    offset: Any
    shape: Any
    full, offset, shape = node.args
    o.roots.follow(node)
    buffers = o.roots[full]
    is_whole = isinstance(full, fx.Node) and kind_of(full) is not Kind.VIEW
    kinds = {b.kind for b in buffers}
    if len(buffers) != 1 or not is_whole or not kinds <= {*FULL, Holds.SHARD}:
        o.fail(node, f"{node.name} looks into {full}, which is no gathered bucket.")
    index = buffers[0].bucket
    bucket = o.layout.buckets[index]
    if value(full).numel() != bucket.numel:
        o.fail(node, f"{node.name} looks into a shard of bucket {index}. Gather it first.")
    o.dtype(node, bucket.compute_dtype, f"what is computed with of bucket {index}")
    param = bucket.at.get(offset)
    if (param is None or [*param.shape] != [*shape]) and node.users:
        o.fail(
            node,
            f"{node.name} at offset {offset} with shape {list(shape)} is no parameter of "
            f"bucket {index} ({bucket.label()}). The layout in fingerprint.json has the places.",
        )


def _order_release(o: Order, node: fx.Node) -> None:
    buffers = o.roots[node.args[0]]  # type: ignore[index]
    if len(buffers) != 1 or buffers[0].kind not in (Holds.GATHERED, Holds.NEAR):
        o.fail(node, f"{node.name} releases {node.args[0]}, which is no gathered bucket.")
    buffer = buffers[0]
    if slot_of(node) != buffer.slot:
        o.fail(
            node,
            f"{node.name} gives back slot {slot_of(node)}, but {o.label(buffer)} is in "
            f"slot {buffer.slot}.",
        )
    made = spec_of(buffer.made)
    if made is not None and made.stays:
        o.fail(
            node,
            f"{node.name} releases {o.label(buffer)}, which {buffer.made.name} keeps on the "
            "device between calls. Drop the release.",
        )
    sending = next((b for b in buffer.sent if not b.landed), None)
    if sending is not None:
        o.fail(
            node,
            f"{node.name} releases {o.label(buffer)} while {sending.made.name} still sends "
            "it. Move the release after that one's wait.",
        )
    buffer.released = buffer.released or node


def erase_to_bucket(numbering: Numbering, node: fx.Node) -> Any:
    """Erase an op that delivers a bucket's parameters, or a part of them."""
    return ("bucket", node.args[1])


def _erase_view(numbering: Numbering, node: fx.Node) -> Any:
    full: Any
    offset: Any
    shape: Any
    full, offset, shape = node.args
    source = numbering.of[full]
    layout = numbering.program.layout
    if isinstance(source, tuple) and source[0] == "bucket":
        param = layout.buckets[source[1]].at.get(offset)
        if param is not None and list(param.shape) == list(shape):
            return leaf_digest(Role.PARAM, param.name)
    return digest(f"view {source} {offset} {list(shape)}")


def erase_to_nothing(numbering: Numbering, node: fx.Node) -> Any:
    return digest("nothing")


# -- the ops --------------------------------------------------------------------------------------
ALL_GATHER = OpSpec(
    schema="all_gather(Tensor shard, int bucket, int numel, int slot=-1, *, "
    "ScalarType? dtype=None) -> Tensor",
    kind=Kind.LAUNCH,
    carries=Carries.PARAMETERS,
    axis="shard",
    bucket=1,
    slot=3,
    takes=frozenset({Holds.NEAR}),
    fake=fake_full,
    run=lambda calls, shard, bucket, numel, slot=-1, *, dtype=None: calls.all_gather(
        shard, bucket, slot
    ),
    lane=Lane.GATHER,
    verb="AG",
    means="all-gather",
    task=_task_gather,
    sends=sends_shards,
    hold=hold_gathered,
    is_static=is_in_slot,
    adds=lambda node: nbytes(value(node)),
    stem="gather",
    place="gather",
    write=write_into_slot,
    read=_read_all_gather,
    order=order_gather,
    erase=erase_to_bucket,
)
all_gather = define(ALL_GATHER)

refresh = define(
    OpSpec(
        schema="refresh(Tensor shard, int bucket, int numel, *, ScalarType? dtype=None) -> Tensor",
        kind=Kind.LAUNCH,
        carries=Carries.PARAMETERS,
        axis="shard",
        bucket=1,
        stays=True,
        takes=frozenset({Holds.SHARD}),
        fake=fake_full,
        run=lambda calls, shard, bucket, numel, *, dtype=None: calls.refresh(shard, bucket),
        lane=Lane.GATHER,
        verb="AG",
        means="all-gather",
        task=_task_refresh,
        sends=sends_shards,
        moves=_moves_refresh,
        hold=_hold_refresh,
        is_static=is_lasting,
        adds=lambda node: nbytes(value(node)),
        stem="refresh",
        place="gather",
        write=write_of_shard,
        read=_read_refresh,
        order=_order_refresh,
        erase=erase_to_bucket,
    )
)
resident = define(
    OpSpec(
        schema="resident(Tensor shard, int bucket, int numel, *, ScalarType? dtype=None) -> Tensor",
        kind=Kind.MAKE,
        carries=Carries.PARAMETERS,
        bucket=1,
        stays=True,
        takes=frozenset({Holds.SHARD}),
        fake=fake_full,
        run=lambda calls, shard, bucket, numel, *, dtype=None: calls.resident(shard, bucket),
        hold=hold_nothing,
        is_static=is_lasting,
        stem="full",
        write=write_of_shard,
        read=_read_resident,
        order=_order_resident,
        erase=erase_to_bucket,
    )
)
param_view = define(
    OpSpec(
        schema="param_view(Tensor(a) full, int offset, int[] shape) -> Tensor(a)",
        kind=Kind.VIEW,
        fake=_look,
        run=lambda calls, full, offset, shape: _look(full, offset, shape),
        is_quiet=True,
        method="unpack",
        read=_read_unpack,
        order=_order_view,
        erase=_erase_view,
    )
)
release = define(
    OpSpec(
        schema="release(Tensor full, int slot=-1) -> ()",
        kind=Kind.RELEASE,
        slot=1,
        takes=frozenset({Holds.NEAR}),
        fake=lambda full, slot=-1: None,
        run=lambda calls, full, slot=-1: calls.release(full, slot),
        has_effect=True,
        lane=Lane.GATHER,
        hold=hold_nothing,
        frees=lambda node: nbytes(value(node.all_input_nodes[0])),
        write=_write_release,
        read=_read_release,
        order=_order_release,
        erase=erase_to_nothing,
    )
)
