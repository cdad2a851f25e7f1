"""Secondary shards: parts of gathered buckets that stay in a node from forward to backward.

`secondary_shard` copies this rank's part of a bucket that forward has gathered over the shard axis:
one of as many equal parts as there are ranks on the node axis. `gather_secondary` gathers these
parts over the node axis, in rank order, which gives the bucket back bit for bit. A call's backward
thus reads what its own forward has gathered, and never parts of an earlier step.

Source: ZeRO++ (arXiv 2306.10209), hierarchical weight partition (hpZ).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Category, Storage
from zerofx.analysis.time.tasks import Walk
from zerofx.codegen.load_calls import Calls
from zerofx.codegen.schedule import Function
from zerofx.comm.collectives import Work
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.order import Buffer, Order
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.spec import Carries, Holds, Kind, OpSpec, Payload, define, kind_of, slot_of
from zerofx.ir.verify_fault import name_of
from zerofx.ir.verify_values import Numbering, digest
from zerofx.layout.buckets import NODE, Bucket
from zerofx.ops.gathers import ALL_GATHER, hold_gathered, write_of_shard
from zerofx.ops.waits import hold_at_source
from zerofx.policy import exchange
from zerofx.runtime.schedule import Flight, label


def _bucket(o: Order, node: fx.Node, graph: str) -> Bucket:
    """Return the bucket of a node, and check that it is in a graph that may have it."""
    bucket = o.bucket(node)
    if o.layout.node_size == 1:
        o.fail(
            node,
            f"{node.name} uses a secondary shard, and the plan has none over these ranks. Set "
            "secondary_shard_size below the number of ranks that share a bucket, or drop the op.",
        )
    if o.name != graph:
        o.fail(node, f"{node.name} is in {o.name}. Move it to {graph}.")
    return bucket


# -- the copy -------------------------------------------------------------------------------------
def _copy_on_rank(engine: Any, full: Tensor, bucket: int) -> Tensor:
    """Return a copy of this rank's part of a gathered bucket.

    Shapes: full [node_size * k]; the result is [k].
    """
    node = engine.world.axis(NODE)
    with torch.no_grad():
        return full.view(node.size, -1)[node.rank].clone()


def _run_copy(calls: Any, full: Tensor, bucket: int, numel: int) -> Tensor:
    made: Tensor = calls.engine.secondary_shard(full, bucket)
    return made


def _read_copy(r: Calls, full: Tensor, bucket: int) -> Any:
    b, node = r.bucket(bucket), r.value(full, "what rt.secondary_shard copies from")
    numel = r.layout.secondary_numel(b)
    return r.append(secondary_shard, node, bucket, numel, **r.of_bucket(b)).meta["val"]


def _write_copy(w: Function, node: fx.Node) -> tuple[str, ...]:
    return *write_of_shard(w, node), f"+{w.size(node)}"


def _task_copy(w: Walk, node: fx.Node) -> None:
    price = w.found.prices.touch(2 * nbytes(value(node)))
    w.found.computes("store", f"copy secondary {w.label(node)}", price, info(node))


def _hold_copy(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    return p.own(node, Category.GATHERED, value(node), time, name="secondary shard")


def _order_copy(o: Order, node: fx.Node) -> None:
    """Check a copy: it reads its whole bucket, as a gather over the shard axis delivered it."""
    bucket = _bucket(o, node, FORWARD)
    full: Any = node.args[0]
    buffers = o.roots[full]
    kinds = [(b.kind, b.bucket) for b in buffers]
    if kinds != [(Holds.GATHERED, bucket.index)] or kind_of(full) is not Kind.WAIT:
        what = o.label(buffers[0]) if buffers else name_of(full)
        o.fail(
            node,
            f"{node.name} takes a part of bucket {bucket.index} ({bucket.label()}) and is given "
            f"{what}. Give it the wait of that bucket's gather.",
        )
    wanted = f"a secondary shard of bucket {bucket.index} over {o.layout.node_size} ranks"
    o.numel(node, o.layout.secondary_numel(bucket), wanted)
    o.dtype(node, bucket.compute_dtype, wanted)
    o.add(node, Buffer(Holds.SECONDARY, node, bucket.index))


def _erase_copy(numbering: Numbering, node: fx.Node) -> Any:
    source: Any = numbering.of[node.args[0]]  # type: ignore[index]
    if source == ("bucket", node.args[1]):
        return ("secondary", node.args[1])
    return digest(f"secondary {node.args[1]} of {source}")


secondary_shard = define(
    OpSpec(
        schema="secondary_shard(Tensor full, int bucket, int numel) -> Tensor",
        kind=Kind.MAKE,
        carries=Carries.SHARD,
        bucket=1,
        fake=lambda full, bucket, numel: full.new_empty(numel),
        run=_run_copy,
        runtime=_copy_on_rank,
        task=_task_copy,
        hold=_hold_copy,
        adds=lambda node: nbytes(value(node)),
        stem="secondary",
        write=_write_copy,
        read=_read_copy,
        order=_order_copy,
        erase=_erase_copy,
    )
)


# -- the gather within the node -------------------------------------------------------------------
@dataclass(slots=True)
class GatherInNode(Work):
    """A gather in flight, which holds the part that this rank sends until the wait."""

    work: Work
    sent: Tensor | None

    def wait(self) -> None:
        self.work.wait()
        self.sent = None


def _gather_on_rank(engine: Any, secondary: Tensor, bucket: int, slot: int = -1) -> Flight:
    """Launch the gather of a bucket's secondary shards into `slot`, within the node.

    Ranks that only take part in the collectives of an island have no secondary shard. While ranks
    take turns, the bucket is gathered over all ranks that share it, from their shards.
    """
    if engine.turns.are_taken:
        flight: Flight = engine.all_gather(engine.turns.shard(bucket), bucket, slot)
        return flight
    b = engine.layout.buckets[bucket]
    out = engine.slots.take(slot, b.numel, b.compute_dtype)
    work = engine.world.axis(NODE).all_gather(out, secondary, label("all-gather in the node", b))
    return Flight(out, GatherInNode(work, secondary), bucket)


def _run_gather(calls: Any, secondary: Tensor, bucket: int, numel: int, slot: int = -1) -> Any:
    return calls.moved(calls.engine.gather_secondary(secondary, bucket, slot))


def _read_gather(r: Calls, secondary: Tensor, bucket: int, slot: int = -1) -> Any:
    b, node = r.bucket(bucket), r.value(secondary, f"the secondary shard of bucket {bucket}")
    slots = () if slot == -1 else (slot,)
    return r.launch(r.append(gather_secondary, node, bucket, b.numel, *slots, **r.of_bucket(b)))


def _task_gather(w: Walk, node: fx.Node) -> None:
    w.collective(node, "all_gather", nbytes(value(node)), NODE)


def _sends_gather(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
    ranks, full = program.layout.node_size, value(node)
    sent = exchange.part_sent(nbytes(full) // ranks, ranks)
    return [Payload("all_gather", sent, full.element_size())]


def _hold_gather(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the storage of the gathered bucket, and its source, which is held until the wait."""
    return hold_gathered(p, node, time) + p.held[node.all_input_nodes[0]]


def _order_gather(o: Order, node: fx.Node) -> None:
    bucket = _bucket(o, node, BACKWARD)
    given: Any = node.args[0]
    buffers = o.roots[given]
    if [(b.kind, b.bucket) for b in buffers] != [(Holds.SECONDARY, bucket.index)]:
        what = o.label(buffers[0]) if buffers else name_of(given)
        o.fail(
            node,
            f"{node.name} of bucket {bucket.index} ({bucket.label()}) is given {what}. Give it the "
            "secondary shard that forward has kept of this bucket.",
        )
    o.numel(node, bucket.numel, f"bucket {bucket.index}")
    o.dtype(node, bucket.compute_dtype, f"bucket {bucket.index} gathered")
    buffer = Buffer(Holds.GATHERED, node, bucket.index, slot_of(node), landed=False)
    o.add(node, buffer)
    o.claim(node, buffer)


def _erase_gather(numbering: Numbering, node: fx.Node) -> Any:
    source: Any = numbering.of[node.args[0]]  # type: ignore[index]
    if source == ("secondary", node.args[1]):
        return ("bucket", node.args[1])
    return digest(f"gather {node.args[1]} of {source}")


gather_secondary = define(
    replace(
        ALL_GATHER,
        schema="gather_secondary(Tensor secondary, int bucket, int numel, int slot=-1) -> Tensor",
        axis=NODE,
        takes=frozenset({Holds.SECONDARY}),
        fake=lambda secondary, bucket, numel, slot=-1: secondary.new_empty(numel),
        run=_run_gather,
        runtime=_gather_on_rank,
        verb="AGs",
        means="all-gather of secondary shards, within the node",
        task=_task_gather,
        sends=_sends_gather,
        hold=_hold_gather,
        arrive=hold_at_source,
        read=_read_gather,
        order=_order_gather,
        erase=_erase_gather,
    )
)
