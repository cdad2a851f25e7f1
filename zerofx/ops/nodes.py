"""Collectives in two steps: a bucket gathered across nodes and then within, or reduced in reverse.

With S ranks on the shard axis in nodes of k, a rank's shard goes to the S / k ranks that have its
position in their nodes. In each node, its ranks then gather what they have received. A reduction
sums within the node, and then across nodes: the sums of nodes, each in rank order, in the order of
the nodes. Across nodes, both send 1 / k of the bytes that one step sends.

The second step is launched at the wait of the first, as for a reduction over a replicate axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, fx

from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Category, Storage
from zerofx.analysis.time.tasks import Walk
from zerofx.codegen.load_calls import Calls
from zerofx.comm.collectives import Axis, Work
from zerofx.comm.world import Then
from zerofx.ir.meta import nbytes, value
from zerofx.ir.order import Order
from zerofx.ir.program import Planned
from zerofx.ir.spec import Payload, define, launch_of
from zerofx.layout.buckets import ACROSS, NODE
from zerofx.ops.gathers import ALL_GATHER, append_from_shard
from zerofx.ops.gradients import SCATTER, append_reduction, hold_reduced
from zerofx.policy import exchange, reduction
from zerofx.runtime.schedule import Flight, label

_HELD = "between two steps"


@dataclass(slots=True)
class Together(Work):
    """Collectives that were launched together."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _held(p: Places, node: fx.Node, numel: int, time: int) -> tuple[Storage, ...]:
    """Return the storage of this rank's part of each node, from the launch to the wait."""
    parts = value(node).new_empty(numel)
    return p.own(node, Category.COMMUNICATION, parts, time, name=_HELD)


def _arrived(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    return tuple(s for s in p.held[launch_of(node)] if s.name != _HELD)


def _check_nodes(o: Order, node: fx.Node) -> None:
    if o.layout.node_size == 1:
        o.fail(
            node,
            f"{node.name} has a step within nodes, and the plan has none over these ranks. Set "
            "hierarchical_size below the number of ranks that share a bucket, or use one step.",
        )


# -- gathers --------------------------------------------------------------------------------------
def _gather_on_rank(engine: Any, shard: Tensor, bucket: int, slot: int = -1) -> Flight:
    """Launch the gather of a bucket into `slot`, in two steps.

    Ranks that only take part in the collectives of an island gather in one step. While ranks take
    turns, so does every rank.
    """
    flight: Flight
    if engine.turns.are_taken:
        flight = engine.all_gather(shard, bucket, slot)
        return flight
    b, node, across = engine.layout.buckets[bucket], *map(engine.world.axis, (NODE, ACROSS))
    out = engine.slots.take(slot, b.numel, b.compute_dtype)
    mine = engine.cast(shard, out)
    parts = out.new_empty(across.size * mine.numel())
    named = label("all-gather by node", b)

    def within() -> Work:
        pairs = zip(out.view(across.size, -1), parts.view(across.size, -1), strict=True)
        return Together([node.all_gather(whole, part, named) for whole, part in pairs])

    return Flight(out, Then(across.all_gather(parts, mine, named), within), bucket)


def _run_gather(
    calls: Any, shard: Tensor, bucket: int, numel: int, slot: int = -1, *, dtype: Any = None
) -> Any:
    return calls.moved(calls.engine.all_gather_by_node(shard, bucket, slot))


def _read_gather(r: Calls, shard: Tensor, bucket: int, slot: int = -1) -> Any:
    made = append_from_shard(r, all_gather_by_node, shard, bucket, lambda b: b.numel, slot)
    return r.launch(made)


def _task_gather(w: Walk, node: fx.Node) -> None:
    full = nbytes(value(node))
    w.collective(node, "all_gather", full // w.layout.node_size, ACROSS)
    w.found.ended.add(w.behind[node])
    w.collective(node, "all_gather", full, NODE, w.layout.mesh.along(ACROSS))


def _sends_gather(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
    mesh, full = program.layout.mesh, value(node)
    part, item = nbytes(full) // program.layout.shard_size, full.element_size()
    nodes = mesh.along(ACROSS)
    first = Payload("all_gather", exchange.part_sent(part, nodes), item, ACROSS)
    then = Payload("all_gather", exchange.part_sent(part, mesh.node), item, NODE)
    return [first, *[then] * nodes]


def _hold_gather(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    held = ALL_GATHER.hold
    assert held is not None
    numel = value(node).numel() // p.program.layout.node_size
    return held(p, node, time) + _held(p, node, numel, time)


def _order_gather(o: Order, node: fx.Node) -> None:
    _check_nodes(o, node)
    ALL_GATHER.order(o, node)


all_gather_by_node = define(
    replace(
        ALL_GATHER,
        schema=f"all_gather_by_node{ALL_GATHER.schema.removeprefix('all_gather')}",
        run=_run_gather,
        runtime=_gather_on_rank,
        verb="AGn",
        means="all-gather across nodes, then within",
        task=_task_gather,
        sends=_sends_gather,
        hold=_hold_gather,
        arrive=_arrived,
        read=_read_gather,
        order=_order_gather,
    )
)


# -- reductions -----------------------------------------------------------------------------------
def reduce_in_steps(
    node: Axis, across: Axis, _: Axis, out: Tensor, full: Tensor, scale: float, label: str
) -> Work:
    """Launch the reduction of this rank's slice of `full` into `out`, in two steps.

    Shapes: full [nodes * ranks per node * k], out [k].
    """
    sums = out.new_empty(across.size, out.numel())
    parts = zip(sums, full.view(across.size, -1), strict=True)
    first = Together([node.reduce_scatter(total, part, 1.0, label) for total, part in parts])
    return Then(first, partial(across.reduce_scatter, out, sums.view(-1), scale, label))


def _reduce_on_rank(engine: Any, buffer: Tensor, bucket: int, scale: float) -> Any:
    """Launch the reduction of a packed bucket; in one step where ranks take turns."""
    node, across = map(engine.world.axis, (NODE, ACROSS))
    steps = None if engine.turns.are_taken else partial(reduce_in_steps, node, across)
    return engine.gradients.reduce(buffer, bucket, scale, over_shards=steps)


def _run_reduction(calls: Any, packed: Tensor, bucket: int, numel: int, scale: float) -> Any:
    flight = calls.engine.reduce_scatter_by_node(packed, bucket, scale)
    return calls.reduced(flight, packed, bucket)


def _read_reduction(r: Calls, buffer: Tensor, bucket: int, scale: float) -> Any:
    return append_reduction(r, reduce_scatter_by_node, buffer, bucket, scale)


def _hold_reduction(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return what the sum lies in, and the sums of this node."""
    numel = value(node).numel() * p.program.layout.mesh.along(ACROSS)
    return hold_reduced(p, node, time) + _held(p, node, numel, time)


def _order_reduction(o: Order, node: fx.Node) -> None:
    _check_nodes(o, node)
    SCATTER.order(o, node)


reduce_scatter_by_node = define(
    replace(
        SCATTER,
        schema=f"reduce_scatter_by_node{SCATTER.schema.removeprefix('reduce_scatter')}",
        run=_run_reduction,
        runtime=_reduce_on_rank,
        verb="RSn",
        means="reduce-scatter within nodes, then across",
        hold=_hold_reduction,
        arrive=_arrived,
        legs=reduction.legs_by_node,
        read=_read_reduction,
        order=_order_reduction,
    )
)
