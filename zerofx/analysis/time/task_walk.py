"""Go through a program's graphs as a rank does, and note what each node takes its time for.

What a task needs is what the runtime orders: its data; the compute that was launched before a
transfer, and with it the release of the slot it fills; for compute, every transfer whose wait
stands before it; for the host, reads from NVMe and copies whose memory it touches itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx

from zerofx.analysis.memory.storage import sent_as
from zerofx.analysis.time.task import Price, TaskList
from zerofx.ir.graphs import regions
from zerofx.ir.meta import Role, info
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.spec import Kind, Lane, kind_of, launch_of, spec_of, verb_of
from zerofx.layout.buckets import Bucket, Layout
from zerofx.layout.tiers import Tier
from zerofx.policy import reduction, shard_copies
from zerofx.policy.shard_copies import SentAs


@dataclass
class Walk:
    """Goes through graphs node by node, as a rank does.

    behind: launch, or value saved by one -> the task that must have ended when it is used.
    stored: bucket -> the task after which its gradient can be used.
    """

    program: Planned
    found: TaskList
    behind: dict[fx.Node, int] = field(default_factory=dict)
    stored: dict[int, int | None] = field(default_factory=dict)
    cast: set[int] = field(default_factory=set)  # buckets whose host copy is current
    updates: list[int] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        return self.program.layout

    def run(self, graph: str) -> None:
        """Append the tasks of one graph."""
        self.found.graph = graph
        gm = self.program.graph(graph)
        first = {nodes[0]: nodes for nodes in regions(gm).values()}
        ranks = self.program.world_size
        self.found.hosts("call", "call", self.found.prices.call(graph, len(first), ranks))
        for node in gm.nodes:
            if node in first:
                self._region(first[node])
            elif (spec := spec_of(node)) is not None:
                spec.task(self, node)
        self._end(gm)

    def _end(self, graph: fx.Graph) -> None:
        """The host waits for copies of shards and gradients, and for updates, where a call ends."""
        mine = [(spec_of(n), t) for n, t in self.behind.items() if n.graph is graph]
        copies = [t for spec, t in mine if spec is not None and spec.is_move]
        if copies or self.updates:
            self.found.hosts("call", "settle", Price(calls=0), needs=[*copies, *self.updates])
        self.updates.clear()
        if self.found.graph == FORWARD and BACKWARD in self.program.graphs:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let backward's saved values that transfers brought away follow these."""
        specs, results = self.program.outputs[FORWARD], self.program.results(FORWARD)
        given = [n for s, n in zip(specs, results, strict=True) if s.role is Role.SAVED]
        taken = self.program.placeholders(BACKWARD, Role.SAVED)
        for node, place in zip(given, sorted(taken, key=lambda p: info(p).index), strict=True):
            if kind_of(node) is Kind.WAIT and launch_of(node) in self.behind:
                self.behind[place] = self.behind[launch_of(node)]

    def _region(self, nodes: list[fx.Node]) -> None:
        named = next((n for n in nodes if info(n).unit), nodes[0])
        where = replace(info(named), index=-1)
        number = info(nodes[0]).region
        assert number is not None
        price = self.found.prices.region(nodes)
        self.found.computes("region", f"region {number}", price, where, number)

    def bucket(self, node: fx.Node) -> Bucket:
        return self.layout.buckets[info(node).index]

    # -- what the ops' own tasks ask --------------------------------------------------------
    def collective(self, node: fx.Node, kind: str, size: int, axis: str = "shard") -> None:
        """Append a collective over a mesh axis; one rank's is a copy, made at once.

        kind: what it is priced as. size: bytes of the full buffer.
        """
        spec = spec_of(node)
        assert spec is not None and spec.lane is not None, f"{node} has no lane"
        ranks, stride = self.layout.mesh.along(axis), self.layout.mesh.stride(axis)
        name = f"{'AR' if kind == 'all_reduce' else spec.verb} {self.label(node)}"
        if ranks == 1:
            if kind == "all_gather":
                price = self.found.prices.touch(2 * size)
                self.behind[node] = self.found.computes("store", f"copy {self.label(node)}", price)
            return
        price = self.found.prices.collective(kind, size, ranks, stride)
        beside = self.found.prices.beside(kind, size, ranks)
        self.behind[node] = self.found.sends(
            spec.lane, name, price, beside, info(node), self.data(node), axis
        )

    def reduces(self, bucket: Bucket) -> bool:
        """Say whether this micro-batch reduces a bucket, and does not only sum on its rank."""
        loop = self.program.loop
        is_last = self.found.micro == loop.accumulation - 1
        can_wait = loop.no_sync and reduction.is_put_off(self.layout, self.program.plan.stage)
        return is_last or not can_wait

    def refresh_moves(self, node: fx.Node) -> bool:
        """Say whether a refresh moves anything: the first one after an update does."""
        in_forward = self.found.graph == FORWARD and info(node).phase.value != BACKWARD
        return shard_copies.refresh_moves(in_forward, self.found.micro)

    def reload(self, node: fx.Node, size: int) -> None:
        """Append a shard's way to the device, cast before it leaves where it must be."""
        bucket = self.bucket(node)
        what = sent_as(self.program, bucket)
        if what is not SentAs.SHARD and bucket.index not in self.cast:
            passed = self.layout.shard_numel(bucket) * bucket.dtype.itemsize + size
            price = self.found.prices.touch(passed, Tier.HOST)
            self.found.hosts("cast", f"cast b{bucket.index}", price, info(node), self.data(node))
            if what is SentAs.COPY:
                self.cast.add(bucket.index)
        self.copy(node, Lane.H2D, size)

    def copy(self, node: fx.Node, lane: Lane, size: int, beside: bool = False) -> None:
        """Append a copy between tiers. beside: something else than the cores moves it."""
        name = f"{verb_of(lane)} {self.label(node)}"
        price = self.found.prices.copy(lane, size)
        before = self.data(node)
        self.behind[node] = self.found.moves(lane, name, price, info(node), before, beside)

    def data(self, node: fx.Node) -> list[int]:
        """Return the transfers that bring what a node reads."""
        found = []
        for given in node.all_input_nodes:
            launch = launch_of(given) if kind_of(given) is Kind.WAIT else given
            if launch in self.behind:
                found.append(self.behind[launch])
        return found

    def arrive(self, launch: fx.Node, size: int, ranks: int) -> None:
        """Append what this rank does with a reduced slice: sum what came, or scale it."""
        self.found.ended.add(self.behind[launch])
        price = self.found.prices.arrival(size, ranks)
        name = f"arrival b{info(launch).index}"
        self.behind[launch] = self.found.computes("arrival", name, price, info(launch))

    def label(self, node: fx.Node) -> str:
        """Name what a node moves: `b3`, a bucket, or `v3`, a value."""
        spec = spec_of(node)
        return f"{'v' if spec is not None and spec.is_copy else 'b'}{info(node).index}"
