"""Traffic: the bytes that a rank sends in one step, by kind of collective.

On equal slices a ring and a direct exchange send the same amount: an all-gather or reduce-scatter
of n bytes over w ranks costs each rank n * (w - 1) / w, an all-reduce twice that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zerofx.comm.collectives import KINDS
from zerofx.ir.meta import info
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Kind, Payload, kind_of, spec_of
from zerofx.layout.buckets import ACROSS, AXES, CONTEXT, NODE, Mesh
from zerofx.layout.tiers import Tier
from zerofx.runtime.tiers.homes import ADAMW_STATES
from zerofx.runtime.tiers.host_tier import D2H, H2D, NVME_READ, NVME_WRITE

LANES = (D2H, H2D, NVME_READ, NVME_WRITE)


@dataclass(frozen=True)
class Sent:
    """The collectives of one kind: their number, and the total that one rank sends in them.

    across_bytes: the part of `sent_bytes` that goes to ranks of other nodes.
    """

    calls: int = 0
    sent_numel: int = 0
    sent_bytes: int = 0
    across_bytes: int = 0


@dataclass(frozen=True)
class Traffic:
    """The data that one rank sends in one forward and its backward, by kind of collective.

    moved: the copies between device, host and NVMe, by lane, including the step of AdamW.
    """

    kinds: dict[str, Sent]
    moved: dict[str, Sent] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        return sum(sent.sent_bytes for sent in self.kinds.values())

    @property
    def sent_numel(self) -> int:
        return sum(sent.sent_numel for sent in self.kinds.values())

    @property
    def across_bytes(self) -> int:
        """The part of `sent_bytes` that goes to ranks of other nodes."""
        return sum(sent.across_bytes for sent in self.kinds.values())


def traffic(program: Planned, rank: int = 0, per_node: int | None = None) -> Traffic:
    """Return the data that `rank` sends in a step before which every parameter was updated.

    It assumes that gradients are reduced in this step (no `no_sync`), and counts the bytes of
    gloo's and NCCL's large-message algorithms. What goes across nodes is counted as in a direct
    exchange, in which each rank sends to each other one.

    per_node: the number of neighbouring ranks that form a node. Default: that of the plan, or else
        of the hardware.
    """
    per_node = per_node or ranks_per_node(program)
    kinds, moved = dict.fromkeys(KINDS, Sent()), dict.fromkeys(LANES, Sent())
    for name, gm in program.graphs.items():
        for node in gm.graph.nodes:
            spec = spec_of(node)
            if spec is None:
                continue
            for sent in spec.sends(program, node, rank):
                before, axis = kinds.get(sent.what, Sent()), sent.axis or spec.axis
                across = _across(program.layout.mesh, axis, rank, per_node, sent)
                kinds[sent.what] = _more(before, sent.nbytes, sent.itemsize, across)
            for copy in spec.moves(program, name, node):
                moved[copy.what] = _more(moved[copy.what], copy.nbytes, copy.itemsize)
    for nbytes_stepped, itemsize in _stepped_on_nvme(program):
        for lane in (NVME_READ, NVME_WRITE):
            for _ in range(1 + ADAMW_STATES):
                moved[lane] = _more(moved[lane], nbytes_stepped, itemsize)
    return Traffic(kinds, moved)


def ranks_per_node(program: Planned) -> int:
    """Return the number of neighbouring ranks per node, by the plan or else by the hardware."""
    mesh = program.layout.mesh
    if mesh.node > 1:
        return mesh.node * mesh.stride(NODE)
    return program.hardware.devices_per_node


def _across(mesh: Mesh, axis: str, rank: int, per_node: int, sent: Payload) -> int:
    """Return the bytes of a payload that leave the rank's node."""
    if axis in (*AXES, CONTEXT, NODE, ACROSS):
        stride, size = mesh.stride(axis), mesh.along(axis)
        first = rank - mesh.position(axis, rank) * stride
        peers = [first + at * stride for at in range(size)]
    else:
        peers = list(range(mesh.num_ranks))
    if sent.what == "send":  # around a ring
        peers = [rank, peers[(peers.index(rank) + 1) % len(peers)]]
    far = sum(peer // per_node != rank // per_node for peer in peers)
    return sent.nbytes * far // max(len(peers) - 1, 1)


def _stepped_on_nvme(program: Planned) -> list[tuple[int, int]]:
    """Return (bytes, bytes per element) of parameters updated on NVMe; states are as large."""
    layout = program.layout
    if BACKWARD not in program.graphs:
        return []
    stored = [n for n in program.graph(BACKWARD).nodes if kind_of(n) is Kind.STORE]
    numbers = dict.fromkeys(layout.block_of[info(n).index] for n in stored)
    blocks = [layout.blocks[number] for number in numbers]
    return [
        (layout.block_numel(block) * block[0].dtype.itemsize, block[0].dtype.itemsize)
        for block in blocks
        if block[0].home is Tier.NVME
    ]


def _more(before: Sent, sent_bytes: int, itemsize: int, across_bytes: int = 0) -> Sent:
    return Sent(
        before.calls + 1,
        before.sent_numel + sent_bytes // itemsize,
        before.sent_bytes + sent_bytes,
        before.across_bytes + across_bytes,
    )
