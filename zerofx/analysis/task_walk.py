"""Go through a program's graphs as a rank does, and note what each node takes its time for.

What a task needs is what the runtime orders: its data; the compute that was launched before a
transfer, and with it the release of the slot it fills; for compute, every transfer whose wait
stands before it; for the host, reads from NVMe and copies whose memory it touches itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from zerofx.analysis.steps import LANES_OF, VERBS, Lane
from zerofx.analysis.storage import is_scaled, landing_dtype, sent_as
from zerofx.analysis.task import Price, TaskList
from zerofx.analysis.task_steps import update_beside
from zerofx.ir import ops
from zerofx.ir.graphs import regions
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.program import BACKWARD, FORWARD, Program
from zerofx.runtime.homes import staged_bytes
from zerofx.runtime.host_tier import dense_bytes
from zerofx.runtime.layout import Bucket, Layout
from zerofx.runtime.policy import reduction, shard_copies
from zerofx.runtime.policy.shard_copies import SentAs
from zerofx.runtime.tiers import Tier

_WAYS = {Lane.D2H: "D2H", Lane.H2D: "H2D", Lane.NVME: "RD", Lane.TO_NVME: "WR"}


@dataclass
class Walk:
    """Goes through graphs node by node, as a rank does.

    behind: launch, or value saved by one -> the task that must have ended when it is used.
    stored: bucket -> the task after which its gradient can be used.
    """

    program: Program
    found: TaskList
    behind: dict[fx.Node, int] = field(default_factory=dict)
    stored: dict[int, int | None] = field(default_factory=dict)
    cast: set[int] = field(default_factory=set)  # buckets whose host copy is current
    updates: list[int] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        assert self.program.layout is not None
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
            elif (handle := _HANDLERS.get(node.target)) is not None:
                handle(self, node)
        self._end(gm)

    def _end(self, graph: fx.Graph) -> None:
        """The host waits for copies of shards and gradients, and for updates, where a call ends."""
        copies = [t for n, t in self.behind.items() if n.target in ops.MOVES and n.graph is graph]
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
            if node.target is ops.wait and node.all_input_nodes[0] in self.behind:
                self.behind[place] = self.behind[node.all_input_nodes[0]]

    def _region(self, nodes: list[fx.Node]) -> None:
        named = next((n for n in nodes if info(n).unit), nodes[0])
        where = replace(info(named), index=-1)
        number = info(nodes[0]).region
        assert number is not None
        price = self.found.prices.region(nodes)
        self.found.computes("region", f"region {number}", price, where, number)

    def bucket(self, node: fx.Node) -> Bucket:
        return self.layout.buckets[info(node).index]

    # -- launches ---------------------------------------------------------------------------
    def gather(self, node: fx.Node) -> None:
        if node.target is ops.refresh:
            if not self._refresh_moves(node):
                return
            bucket = self.bucket(node)
            if bucket.is_away:
                self._reload(node, nbytes(value(node)) // self.layout.shard_size)
                self.found.ended.add(self.behind[node])
        self._collective(node, "all_gather", nbytes(value(node)))

    def _collective(self, node: fx.Node, kind: str, size: int, replicas: bool = False) -> None:
        """Append a collective over one axis; one rank's is a copy, made at once."""
        shards, copies = self.layout.shard_size, self.layout.replicate_size
        ranks, stride = (copies, shards) if replicas else (shards, 1)
        name = f"{'AR' if kind == 'all_reduce' else VERBS[node.target]} {_label(node)}"
        if ranks == 1:
            if kind == "all_gather":
                price = self.found.prices.touch(2 * size)
                self.behind[node] = self.found.computes("store", f"copy {_label(node)}", price)
            return
        price = self.found.prices.collective(kind, size, ranks, stride)
        lane, before = LANES_OF[node.target], self._data(node)
        beside = self.found.prices.beside(kind, size, ranks)
        self.behind[node] = self.found.sends(
            lane, name, price, beside, info(node), before, replicas
        )

    def reduce(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        if not self._reduces(bucket):
            size = 3 * nbytes(value(node.all_input_nodes[0]))
            price = self.found.prices.touch(size)
            self.found.computes("store", f"sum b{bucket.index}", price, info(node))
            return
        shard = nbytes(value(node))
        if self.layout.shard_size > 1:
            self._collective(node, "reduce_scatter", shard * self.layout.shard_size)
        if self.layout.replicate_size > 1:
            if node in self.behind:  # of what the other axis delivered
                self._arrive(node, shard, self.layout.shard_size)
            self._collective(node, "all_reduce", shard, replicas=True)

    def _reduces(self, bucket: Bucket) -> bool:
        loop = self.program.loop
        is_last = self.found.micro == loop.accumulation - 1
        can_wait = loop.no_sync and reduction.is_put_off(self.layout, self.program.plan.stage)
        return is_last or not can_wait

    def sync(self, node: fx.Node) -> None:
        size = sum(map(nbytes, value(node)))
        price = self.found.prices.collective("broadcast", size, self.program.world_size, 1)
        self.found.ended.add(self.found.sends(Lane.REDUCE, "BC buffers", price, Price()))

    def reload_shard(self, node: fx.Node) -> None:
        if node.target is ops.reload_shard or self._refresh_moves(node):
            self._reload(node, nbytes(value(node)))

    def _refresh_moves(self, node: fx.Node) -> bool:
        in_forward = self.found.graph == FORWARD and info(node).phase.value != BACKWARD
        return shard_copies.refresh_moves(in_forward, self.found.micro)

    def _reload(self, node: fx.Node, size: int) -> None:
        """Append a shard's way to the device, cast before it leaves where it must be."""
        bucket = self.bucket(node)
        what = sent_as(self.program, bucket)
        if what is not SentAs.SHARD and bucket.index not in self.cast:
            passed = self.layout.shard_numel(bucket) * bucket.dtype.itemsize + size
            price = self.found.prices.touch(passed, Tier.HOST)
            self.found.hosts("cast", f"cast b{bucket.index}", price, info(node), self._data(node))
            if what is SentAs.COPY:
                self.cast.add(bucket.index)
        self._copy(node, Lane.H2D, size)

    def read_shard(self, node: fx.Node) -> None:
        size = staged_bytes(self.layout, info(node).index)
        self._copy(node, Lane.NVME, size, beside=True)

    def offload_grad(self, node: fx.Node) -> None:
        size = value(node).numel() * landing_dtype(self.program, self.bucket(node)).itemsize
        if self._reduces(self.bucket(node)):
            self._copy(node, Lane.D2H, size)

    def copy(self, node: fx.Node) -> None:
        lane = LANES_OF[node.target]
        self._copy(node, lane, dense_bytes(value(node)), node.target in ops.SPILLS)

    def _copy(self, node: fx.Node, lane: Lane, size: int, beside: bool = False) -> None:
        name = f"{_WAYS[lane]} {_label(node)}"
        price = self.found.prices.copy(lane, size)
        before = self._data(node)
        self.behind[node] = self.found.moves(lane, name, price, info(node), before, beside)

    def _data(self, node: fx.Node) -> list[int]:
        """Return the transfers that bring what a launch reads."""
        found = []
        for given in node.all_input_nodes:
            launch = given.all_input_nodes[0] if given.target is ops.wait else given
            if launch in self.behind:
                found.append(self.behind[launch])
        return found

    # -- waits, and what is done with what arrived ------------------------------------------
    def wait(self, node: fx.Node) -> None:
        launch = node.all_input_nodes[0]
        task = self.behind.get(launch)
        if task is None:
            return
        if LANES_OF[launch.target] in (Lane.NVME, Lane.TO_NVME):
            none = self.found.prices.launch(0)
            self.found.hosts("call", f"await {_label(launch)}", none, info(launch), [task])
            return
        self.found.ended.add(task)
        if launch.target in ops.REDUCES:
            layout = self.layout
            axis = layout.replicate_size if layout.replicate_size > 1 else layout.shard_size
            self._arrive(launch, nbytes(value(launch)), axis)

    def _arrive(self, launch: fx.Node, size: int, ranks: int) -> None:
        """Append what this rank does with a reduced slice: sum what came, or scale it."""
        self.found.ended.add(self.behind[launch])
        price = self.found.prices.arrival(size, ranks)
        name = f"arrival b{info(launch).index}"
        self.behind[launch] = self.found.computes("arrival", name, price, info(launch))

    def pack(self, node: fx.Node) -> None:
        size = sum(nbytes(value(g)) for g in node.all_input_nodes[1:])
        price = self.found.prices.touch(2 * size)
        self.found.computes("pack", f"pack b{info(node).index}", price, info(node))

    def zero(self, node: fx.Node) -> None:
        if node.args[3]:
            price = self.found.prices.touch(nbytes(value(node)))
            self.found.computes("pack", f"zero b{info(node).index}", price, info(node))

    def store(self, node: fx.Node) -> None:
        """Append what brings a reduced slice to p.grad: nothing where it was reduced there."""
        bucket = self.bucket(node)
        if not self._reduces(bucket):
            return
        adds, scaled = self.found.micro > 0, is_scaled(self.program)
        landed = landing_dtype(self.program, bucket) if bucket.is_away else bucket.reduce_dtype
        arrived = self._data(node)
        if reduction.is_stored_apart(self.layout, bucket, scaled, adds):
            numel = self.layout.shard_numel(bucket)
            size = numel * (landed.itemsize + (1 + adds) * bucket.dtype.itemsize)
            name = f"store b{bucket.index}"
            if bucket.is_away:
                price = self.found.prices.touch(size, Tier.HOST)
                self.found.hosts("store", name, price, info(node), arrived)
            else:
                price = self.found.prices.touch(size)
                self.found.computes("store", name, price, info(node))
        self.stored[bucket.index] = arrived[0] if arrived else self.found.compute

    def update(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        if bucket.is_away:
            needs = [t for t in [self.stored.get(bucket.index)] if t is not None]
            self.updates.append(update_beside(self.found, self.layout, bucket, needs))
            return
        numel = self.layout.shard_numel(bucket)
        price = self.found.prices.update(Tier.DEVICE, numel)
        self.found.computes("update", f"update b{bucket.index}", price, info(node))


def _label(node: fx.Node) -> str:
    return f"{'v' if node.target in ops.COPIES else 'b'}{info(node).index}"


_HANDLERS: dict[Any, Callable[[Walk, fx.Node], None]] = {
    **dict.fromkeys(ops.GATHERS, Walk.gather), **dict.fromkeys(ops.REDUCES, Walk.reduce),
    **dict.fromkeys(ops.COPIES, Walk.copy), **dict.fromkeys(ops.RELOADS, Walk.reload_shard),
    ops.read_shard: Walk.read_shard, ops.offload_grad: Walk.offload_grad,
    ops.wait: Walk.wait, ops.pack: Walk.pack, ops.grad_buffer: Walk.zero,
    ops.store_grad: Walk.store, ops.update: Walk.update, ops.sync_buffers: Walk.sync,
}  # fmt: skip
