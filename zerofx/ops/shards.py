"""Shards that are kept off the device: reloaded for a gather, and their gradients offloaded.

`reload_shard` copies a shard to the device, `refresh_shard` updates its resident copy there,
`read_shard` reads a shard from NVMe into host memory, and `offload_grad` copies a reduced slice to
the tier of its shard. All are local launches.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Category, Storage, is_scaled, landing_dtype, sent_as
from zerofx.analysis.time.tasks import Walk
from zerofx.codegen.load_calls import Calls
from zerofx.codegen.schedule import Function
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.order import Buffer, Order
from zerofx.ir.program import FORWARD, Planned
from zerofx.ir.spec import (
    Carries,
    Holds,
    Kind,
    Lane,
    OpSpec,
    Payload,
    define,
    slot_of,
    spec_of,
)
from zerofx.ir.verify_fault import name_of
from zerofx.layout.buckets import Bucket
from zerofx.layout.tiers import Tier
from zerofx.ops.gathers import (
    append_from_shard,
    erase_to_bucket,
    fake_full,
    is_in_slot,
    is_lasting,
    under_way,
    write_into_slot,
    write_of_shard,
)
from zerofx.ops.gradients import reduced_slice
from zerofx.ops.values import fake_on_host
from zerofx.ops.waits import end_once, hold_at_source, same
from zerofx.policy import reduction, shard_copies
from zerofx.policy.shard_copies import SentAs
from zerofx.runtime.tiers.homes import staged_bytes
from zerofx.runtime.tiers.host_tier import D2H, H2D, NVME_READ, dense_bytes


def _arrives_as(wait: fx.Node) -> str:
    """Name a reloaded shard, or the bucket if the shard is the whole bucket."""
    sent = [spec_of(u) for u in wait.users]
    is_sent = any(s is not None and s.is_gather and s.slot is not None for s in sent)
    return f"shard_{info(wait).index}" if is_sent else f"full_{info(wait).index}"


# -- code -----------------------------------------------------------------------------------------
def _read_reload(r: Calls, shard: Tensor, bucket: int, slot: int = -1) -> Any:
    return r.launch(append_from_shard(r, reload_shard, shard, bucket, r.layout.shard_numel, slot))


def _read_refresh(r: Calls, shard: Tensor, bucket: int) -> Any:
    return r.launch(append_from_shard(r, refresh_shard, shard, bucket, r.layout.shard_numel, -1))


def _write_read_shard(w: Function, node: fx.Node) -> tuple[str, ...]:
    shard = w.buffer(node.all_input_nodes[0])
    call = f"rt.read_shard({shard}, bucket={info(node).index})"
    return f"{w.bind(node)} = {call}", info(node).unit, f"host +{w.size(node)}"


def _read_read_shard(r: Calls, shard: Tensor, bucket: int) -> Any:
    b = r.bucket(bucket)
    node = r.value(shard, f"the shard of bucket {bucket}")
    numel = r.layout.shard_numel(b)
    return r.launch(r.append(read_shard, node, bucket, numel, **r.of_bucket(b)))


def _write_offload_grad(w: Function, node: fx.Node) -> tuple[str, ...]:
    reduced = w.bind(node.all_input_nodes[0])
    call = f"rt.offload_grad({reduced}, bucket={info(node).index})"
    return f"{w.bind(node)} = {call}", info(node).unit, f"host +{w.size(node)}"


def _read_offload_grad(r: Calls, reduced: Tensor, bucket: int) -> Any:
    b = r.bucket(bucket)
    node = r.value(reduced, "the reduced slice")
    return r.launch(r.append(offload_grad, node, bucket, **r.of_bucket(b)))


# -- time -----------------------------------------------------------------------------------------
def _task_reload(w: Walk, node: fx.Node) -> None:
    w.reload(node, nbytes(value(node)))


def _task_refresh(w: Walk, node: fx.Node) -> None:
    if w.refresh_moves(node):
        w.reload(node, nbytes(value(node)))


def _task_read_shard(w: Walk, node: fx.Node) -> None:
    w.copy(node, Lane.NVME, staged_bytes(w.layout, info(node).index), beside=True)


def _task_offload_grad(w: Walk, node: fx.Node) -> None:
    bucket = w.bucket(node)
    if w.reduces(bucket):
        size = value(node).numel() * landing_dtype(w.program, bucket).itemsize
        w.copy(node, Lane.D2H, size)


def _moves_reload(program: Planned, graph: str, node: fx.Node) -> list[Payload]:
    return [Payload(H2D, dense_bytes(value(node)), value(node).element_size())]


def _moves_refresh(program: Planned, graph: str, node: fx.Node) -> list[Payload]:
    if not shard_copies.refresh_moves(graph == FORWARD):
        return []
    return _moves_reload(program, graph, node)


def _moves_read(program: Planned, graph: str, node: fx.Node) -> list[Payload]:
    size = staged_bytes(program.layout, info(node).index)
    return [Payload(NVME_READ, size, value(node).element_size())]


def _moves_offload_grad(program: Planned, graph: str, node: fx.Node) -> list[Payload]:
    itemsize = landing_dtype(program, program.layout.buckets[info(node).index]).itemsize
    return [Payload(D2H, value(node).numel() * itemsize, itemsize)]


# -- memory ---------------------------------------------------------------------------------------
def _hold_reload(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    name = info(node).unit or node.name
    made = p.own(node, Category.GATHERED, value(node), time, slot_of(node), name=name)
    return made + _sent(p, node, time)


def _sent(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the storage that a reload holds until its wait: its source, or a cast copy of it."""
    if sent_as(p.program, p.bucket(node)) is SentAs.CAST:
        return p.own(node, Category.HOST, value(node), time, name="cast copy")
    return p.held[node.all_input_nodes[0]]


def _hold_refresh(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return no device storage, as the copy is resident, and a host shard's temporary cast."""
    if not p.is_cast_on_way(node):
        return ()
    return p.nothing(node, time), *p.own(node, Category.HOST, value(node), time)


def _hold_read(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    made = p.own(node, Category.HOST, value(node), time)
    made[0].nbytes = staged_bytes(p.program.layout, info(node).index)
    return made


def _hold_offload_grad(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    return (*_landing(p, node, time), *_leaving(p, node, time))


def _landing(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the destination of a reduced slice: p.grad, or separate memory in another format."""
    scaled = is_scaled(p.program)
    if reduction.lands_in_gradient(p.bucket(node), scaled, p.packs_apart):
        return (p.nothing(node, time),)
    return p.own(node, Category.HOST, value(node), time)


def _leaving(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the source of the copy: the slice itself, or its unscaled version."""
    bucket = p.bucket(node)
    if landing_dtype(p.program, bucket) is value(node).dtype:
        return p.held[node.all_input_nodes[0]]
    wide = value(node).to(bucket.dtype)
    return p.own(node, Category.GRADIENTS, wide, time, name="reduced slice, unscaled")


# -- proof ----------------------------------------------------------------------------------------
def _order_read(o: Order, node: fx.Node) -> None:
    bucket = o.bucket(node)
    o.own_shard(node, bucket)
    if bucket.source is not Tier.NVME:
        where = f"bucket {bucket.index} ({bucket.label()}) is gathered"
        o.fail(node, f"{node.name}: {where} from the {bucket.source.value}, not from nvme.")
    o.numel(node, o.layout.shard_numel(bucket), f"a shard of bucket {bucket.index}")
    o.add(node, Buffer(Holds.STAGED, node, bucket.index, landed=False))


def _order_reload(o: Order, node: fx.Node) -> None:
    bucket, spec = o.bucket(node), spec_of(node)
    assert spec is not None
    label = f"bucket {bucket.index} ({bucket.label()})"
    _staged_shard(o, node, bucket)
    if not bucket.is_away:
        o.fail(node, f"{node.name} reloads {label}, whose shard lives on the device.")
    o.numel(node, o.layout.shard_numel(bucket), f"a shard of {label}")
    o.dtype(node, bucket.compute_dtype, f"a reloaded shard of {label}")
    whole = o.layout.shard_size == 1
    if spec.stays != (bucket.source is Tier.DEVICE) or (spec.stays and whole):
        copied = "refresh" if whole else "refresh_shard"
        wanted = copied if bucket.source is Tier.DEVICE else "reload_shard"
        o.fail(node, f"{label} is gathered from the {bucket.source.value}: use rt.{wanted}.")
    kind = Holds.GATHERED if whole else Holds.NEAR
    buffer = Buffer(kind, node, bucket.index, slot_of(node), landed=False)
    buffer.behind = under_way(o, bucket) if spec.stays else None
    o.add(node, buffer)
    o.claim(node, buffer)


def _staged_shard(o: Order, node: fx.Node, bucket: Bucket) -> None:
    """Check that a reload copies its bucket's shard, after a read if the shard is on NVMe."""
    given: Any = node.args[0]
    buffers = o.roots[given]
    is_staged = len(buffers) == 1 and buffers[0].kind is Holds.STAGED
    if not is_staged:
        o.own_shard(node, bucket)
    if is_staged != (bucket.source is Tier.NVME) or (
        is_staged and buffers[0].bucket != bucket.index
    ):
        what = o.label(buffers[0]) if buffers else name_of(given)
        o.fail(
            node,
            f"{node.name} of bucket {bucket.index} ({bucket.label()}), which is gathered from "
            f"{bucket.source.value}, is given {what}.",
        )


def _order_offload_grad(o: Order, node: fx.Node) -> None:
    bucket = o.bucket(node)
    buffer = reduced_slice(o, node, bucket, "offloads")
    buffer.offloaded, buffer.landed = node, False
    o.roots.set(node, buffer)


# -- the ops --------------------------------------------------------------------------------------
reload_shard = define(
    OpSpec(
        schema="reload_shard(Tensor shard, int bucket, int numel, int slot=-1, *, "
        "ScalarType? dtype=None) -> Tensor",
        kind=Kind.LAUNCH,
        carries=Carries.SHARD,
        bucket=1,
        slot=3,
        takes=frozenset({Holds.SHARD, Holds.STAGED}),
        fake=fake_full,
        run=lambda calls, shard, bucket, numel, slot=-1, *, dtype=None: calls.reload_shard(
            shard, bucket, slot
        ),
        lane=Lane.H2D,
        verb="H2D",
        means="copy from host to device",
        task=_task_reload,
        moves=_moves_reload,
        hold=_hold_reload,
        arrive=hold_at_source,
        is_static=is_in_slot,
        adds=lambda node: nbytes(value(node)),
        stem="reload",
        arrives_as=_arrives_as,
        write=write_into_slot,
        read=_read_reload,
        order=_order_reload,
        end=end_once,
        erase=erase_to_bucket,
    )
)
refresh_shard = define(
    OpSpec(
        schema="refresh_shard(Tensor shard, int bucket, int numel, *, ScalarType? dtype=None)"
        " -> Tensor",
        kind=Kind.LAUNCH,
        carries=Carries.SHARD,
        bucket=1,
        stays=True,
        takes=frozenset({Holds.SHARD, Holds.STAGED}),
        fake=fake_full,
        run=lambda calls, shard, bucket, numel, *, dtype=None: calls.refresh_shard(shard, bucket),
        lane=Lane.H2D,
        verb="H2D",
        means="copy from host to device",
        task=_task_refresh,
        moves=_moves_refresh,
        hold=_hold_refresh,
        arrive=hold_at_source,
        is_static=is_lasting,
        adds=lambda node: nbytes(value(node)),
        stem="refresh",
        arrives_as=_arrives_as,
        write=write_of_shard,
        read=_read_refresh,
        order=_order_reload,
        end=end_once,
        erase=erase_to_bucket,
    )
)
read_shard = define(
    OpSpec(
        schema="read_shard(Tensor shard, int bucket, int numel) -> Tensor",
        kind=Kind.LAUNCH,
        carries=Carries.SHARD,
        lands=Tier.HOST,
        bucket=1,
        takes=frozenset({Holds.SHARD}),
        fake=lambda shard, bucket, numel: shard.new_empty(numel, device="cpu"),
        run=lambda calls, shard, bucket, numel: calls.read_shard(shard, bucket),
        lane=Lane.NVME,
        verb="RD",
        means="read from NVMe",
        task=_task_read_shard,
        moves=_moves_read,
        hold=_hold_read,
        adds=lambda node: nbytes(value(node)),
        stem="read",
        arrives_as=lambda wait: f"staged_{info(wait).index}",
        write=_write_read_shard,
        read=_read_read_shard,
        order=_order_read,
        end=end_once,
        erase=erase_to_bucket,
    )
)
offload_grad = define(
    OpSpec(
        schema="offload_grad(Tensor reduced, int bucket) -> Tensor",
        kind=Kind.LAUNCH,
        carries=Carries.REDUCED,
        lands=Tier.HOST,
        bucket=1,
        in_backward=True,
        takes=frozenset({Holds.REDUCED}),
        fake=lambda reduced, bucket: fake_on_host(reduced),
        run=lambda calls, reduced, bucket: calls.offload_grad(reduced, bucket),
        has_effect=True,
        lane=Lane.D2H,
        verb="D2H",
        means="copy from device to host",
        task=_task_offload_grad,
        moves=_moves_offload_grad,
        hold=_hold_offload_grad,
        arrive=hold_at_source,
        frees_at_wait=True,
        stem="offload",
        arrives_as=lambda wait: f"away_{info(wait).index}",
        write=_write_offload_grad,
        read=_read_offload_grad,
        order=_order_offload_grad,
        end=end_once,
        erase=same,
    )
)
