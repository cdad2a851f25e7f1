"""What a rank sends in one step: every collective of a program, counted and weighed.

On equal slices a ring and a direct exchange send the same: an all-gather or reduce-scatter of n
bytes over w ranks costs each rank n * (w - 1) / w, an all-reduce twice that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx.analysis.storage import landing_dtype
from zerofx.ir import ops
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.program import BACKWARD, FORWARD, Program
from zerofx.runtime.collectives import KINDS, all_reduce_bytes
from zerofx.runtime.homes import ADAMW_STATES, staged_bytes
from zerofx.runtime.host_tier import D2H, H2D, NVME_READ, NVME_WRITE, dense_bytes
from zerofx.runtime.policy import exchange, shard_copies
from zerofx.runtime.tiers import Tier

LANES = (D2H, H2D, NVME_READ, NVME_WRITE)


@dataclass(frozen=True)
class Sent:
    """The collectives of one kind: how many, and what one rank sends in all of them."""

    calls: int = 0
    sent_numel: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one forward and its backward, by kind of collective.

    moved: what it copies between device, host and NVMe, by lane; the step of AdamW included.
    """

    kinds: dict[str, Sent]
    moved: dict[str, Sent] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        return sum(sent.sent_bytes for sent in self.kinds.values())

    @property
    def sent_numel(self) -> int:
        return sum(sent.sent_numel for sent in self.kinds.values())


def traffic(program: Program, rank: int = 0) -> Traffic:
    """Return what `rank` sends in a step in which every parameter was updated before.

    Gradients are taken to be reduced in this step (no `no_sync`), and bytes to be those of gloo's
    and NCCL's large-message algorithms.
    """
    kinds, moved = dict.fromkeys(KINDS, Sent()), dict.fromkeys(LANES, Sent())
    for name, gm in program.graphs.items():
        for node in gm.graph.nodes:
            for kind, sent_bytes, itemsize in _collectives(program, node, rank):
                kinds[kind] = _more(kinds[kind], sent_bytes, itemsize)
            for lane, nbytes_moved, itemsize in _copies(program, name, node):
                moved[lane] = _more(moved[lane], nbytes_moved, itemsize)
    for nbytes_stepped, itemsize in _stepped_on_nvme(program):
        for lane in (NVME_READ, NVME_WRITE):
            for _ in range(1 + ADAMW_STATES):
                moved[lane] = _more(moved[lane], nbytes_stepped, itemsize)
    return Traffic(kinds, moved)


def _stepped_on_nvme(program: Program) -> list[tuple[int, int]]:
    """Return (bytes, bytes an element) of what is stepped on NVMe: parameters, states as much."""
    layout = program.layout
    if layout is None or BACKWARD not in program.graphs:
        return []
    stored = [n for n in program.graph(BACKWARD).nodes if n.target is ops.store_grad]
    numbers = dict.fromkeys(layout.block_of[info(n).index] for n in stored)
    blocks = [layout.blocks[number] for number in numbers]
    return [
        (layout.block_numel(block) * block[0].dtype.itemsize, block[0].dtype.itemsize)
        for block in blocks
        if block[0].home is Tier.NVME
    ]


def _copies(program: Program, graph: str, node: fx.Node) -> list[tuple[str, int, int]]:
    """Return (lane, bytes, bytes an element) of what a node copies between device and host."""
    if node.target not in ops.COPIES | ops.MOVES | {ops.refresh}:
        return []
    copied = value(node)
    if node.target is ops.write_out:
        return [(NVME_WRITE, nbytes(copied), copied.element_size())]
    if node.target is ops.read_shard and program.layout is not None:
        size = staged_bytes(program.layout, info(node).index)
        return [(NVME_READ, size, copied.element_size())]
    if node.target is ops.read_back:
        return [(NVME_READ, nbytes(copied), copied.element_size())]
    leaves = node.target in (ops.offload, ops.offload_grad)
    nbytes_moved = dense_bytes(copied)
    if node.target is ops.refresh:  # of a shard that lives off the device: this rank's slice
        layout = program.layout
        if layout is None or not layout.buckets[info(node).index].is_away:
            return []
        nbytes_moved //= layout.shard_size
    if node.target is ops.refresh_shard and not shard_copies.refresh_moves(graph == FORWARD):
        return []
    itemsize = copied.element_size()
    if node.target is ops.offload_grad:
        assert program.layout is not None
        itemsize = landing_dtype(program, program.layout.buckets[info(node).index]).itemsize
        nbytes_moved = copied.numel() * itemsize
    return [(D2H if leaves else H2D, nbytes_moved, itemsize)]


def _more(before: Sent, sent_bytes: int, itemsize: int) -> Sent:
    return Sent(
        before.calls + 1, before.sent_numel + sent_bytes // itemsize, before.sent_bytes + sent_bytes
    )


def _collectives(program: Program, node: fx.Node, rank: int) -> list[tuple[str, int, int]]:
    """Return (kind, bytes that `rank` sends, bytes an element) of what a node launches."""
    layout = program.layout
    if layout is None or node.op != "call_function" or node.target not in ops.ALL:
        return []
    shards, replicas = layout.shard_size, layout.replicate_size
    if node.target in ops.GATHERS and shards > 1:
        full = value(node)
        sent = exchange.part_sent(nbytes(full) // shards, shards)
        return [("all_gather", sent, full.element_size())]
    if node.target in ops.REDUCES:
        out = value(node)
        found = []
        if shards > 1:
            sent = exchange.part_sent(nbytes(out), shards)
            found.append(("reduce_scatter", sent, out.element_size()))
        if replicas > 1:
            sent = all_reduce_bytes(out, rank // shards, replicas)
            found.append(("all_reduce", sent, out.element_size()))
        return found
    if node.target is ops.sync_buffers and program.world_size > 1:
        sent = sum(map(nbytes, value(node))) * (program.world_size - 1) if rank == 0 else 0
        return [("broadcast", sent, torch.uint8.itemsize)]  # every dtype travels as bytes
    return []
