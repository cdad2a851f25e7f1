"""Collectives in 8-bit blocks: the gather of a bucket and the reduction of its gradients, coded.

Each is the exact op with another form on the wire: the same arguments, the same checks of order,
and the same place in a schedule. Its values are `Bounded`, so that `verify` accepts it under
`Plan(numerics="fast")` alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Category, Storage
from zerofx.analysis.time.tasks import Walk
from zerofx.codegen.load_calls import Calls
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.program import Planned
from zerofx.ir.spec import Bounded, Payload, define, launch_of
from zerofx.kernels.blocks import BLOCK, RELATIVE_ERROR, message_bytes
from zerofx.ops.gathers import ALL_GATHER, append_from_shard
from zerofx.ops.gradients import SCATTER, append_reduction, hold_reduced, sends_reduction
from zerofx.policy import exchange, reduction
from zerofx.runtime.wire.blocks import all_gather_blocks as gather_on_rank
from zerofx.runtime.wire.blocks import reduce_scatter_blocks as reduce_on_rank

_BOUND = Bounded(relative=RELATIVE_ERROR, block=BLOCK)
_HELD = "codes and scales"


def _held(p: Places, node: fx.Node, size: int, time: int) -> tuple[Storage, ...]:
    """Return the storage of the messages that a rank holds from the launch to the wait."""
    messages = value(node).new_empty(size, dtype=torch.int8)
    return p.own(node, Category.COMMUNICATION, messages, time, name=_HELD)


def _arrived(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return what is still held once the launch of a wait has ended: all but its messages."""
    return tuple(s for s in p.held[launch_of(node)] if s.name != _HELD)


# -- gathers --------------------------------------------------------------------------------------
def _gathered_bytes(node: fx.Node, ranks: int) -> int:
    """Return the bytes of the messages of all ranks."""
    return message_bytes(value(node).numel() // ranks) * ranks


def _run_gather(
    calls: Any, shard: Tensor, bucket: int, numel: int, slot: int = -1, *, dtype: Any = None
) -> Any:
    return calls.moved(calls.engine.all_gather_blocks(shard, bucket, slot))


def _read_gather(r: Calls, shard: Tensor, bucket: int, slot: int = -1) -> Any:
    made = append_from_shard(r, all_gather_blocks, shard, bucket, lambda b: b.numel, slot)
    return r.launch(made)


def _task_gather(w: Walk, node: fx.Node) -> None:
    """Append the transfer, and the passes that code the shard and decode what arrives."""
    ranks = w.layout.shard_size
    size, full = _gathered_bytes(node, ranks), nbytes(value(node))
    price = w.found.prices.touch(full // ranks + 2 * full)
    w.found.computes("cast", f"code b{info(node).index}", price, info(node))
    w.collective(node, "all_gather", size)


def _sends_gather(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
    ranks = program.layout.shard_size
    sent = exchange.part_sent(_gathered_bytes(node, ranks) // ranks, ranks)
    return [Payload("all_gather", sent, 1)]


def _hold_gather(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    held = ALL_GATHER.hold
    assert held is not None
    size = _gathered_bytes(node, p.program.layout.shard_size)
    return held(p, node, time) + _held(p, node, size, time)


all_gather_blocks = define(
    replace(
        ALL_GATHER,
        schema=f"all_gather_blocks{ALL_GATHER.schema.removeprefix('all_gather')}",
        run=_run_gather,
        runtime=gather_on_rank,
        verb="AGq",
        means="all-gather in 8-bit blocks",
        task=_task_gather,
        sends=_sends_gather,
        hold=_hold_gather,
        arrive=_arrived,
        read=_read_gather,
        precision=_BOUND,
    )
)


# -- reductions -----------------------------------------------------------------------------------
def _sliced_bytes(program: Planned, node: fx.Node) -> int:
    """Return the bytes of one message per rank of the shard axis."""
    return message_bytes(value(node).numel()) * program.layout.shard_size


def _reduce_on_rank(engine: Any, buffer: Tensor, bucket: int, scale: float) -> Any:
    """Launch the reduction of a packed bucket; whole where ranks take turns, as gathers do."""
    coded = None if engine.turns.are_taken else reduce_on_rank
    return engine.gradients.reduce(buffer, bucket, scale, over_shards=coded)


def _run_reduction(calls: Any, packed: Tensor, bucket: int, numel: int, scale: float) -> Any:
    return calls.reduced(calls.engine.reduce_scatter_blocks(packed, bucket, scale), packed, bucket)


def _read_reduction(r: Calls, buffer: Tensor, bucket: int, scale: float) -> Any:
    return append_reduction(r, reduce_scatter_blocks, buffer, bucket, scale)


def _task_reduction(w: Walk, node: fx.Node) -> None:
    """Append the all-to-all of codes, the passes around it, and what other axes add, exact."""
    bucket = w.bucket(node)
    if not w.reduces(bucket):
        SCATTER.task(w, node)
        return
    shard, full = nbytes(value(node)), nbytes(value(node.all_input_nodes[0]))
    price = w.found.prices.touch(2 * full)
    w.found.computes("cast", f"code gradients b{bucket.index}", price, info(node))
    first, *later = reduction.legs(w.layout.mesh)
    w.collective(node, first.kind, _sliced_bytes(w.program, node), first.axis)
    before = first
    for leg in later:
        w.arrive(node, shard, before.size)
        w.collective(node, leg.kind, shard * leg.num_slices, leg.axis)
        before = leg


def _sends_reduction(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
    _, *later = sends_reduction(program, node, rank)
    ranks = program.layout.shard_size
    sent = exchange.part_sent(_sliced_bytes(program, node) // ranks, ranks)
    return [Payload("all_to_all", sent, 1), *later]


def _hold_reduction(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return what the sum lies in, and the messages that are sent and received."""
    return hold_reduced(p, node, time) + _held(p, node, 2 * _sliced_bytes(p.program, node), time)


reduce_scatter_blocks = define(
    replace(
        SCATTER,
        schema=f"reduce_scatter_blocks{SCATTER.schema.removeprefix('reduce_scatter')}",
        run=_run_reduction,
        runtime=_reduce_on_rank,
        verb="RSq",
        means="reduce-scatter in 8-bit blocks",
        task=_task_reduction,
        sends=_sends_reduction,
        hold=_hold_reduction,
        arrive=_arrived,
        borrows=lambda program, node: len(reduction.legs(program.layout.mesh)) > 1,
        read=_read_reduction,
        precision=_BOUND,
    )
)
