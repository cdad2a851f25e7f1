"""The tasks of one step: every region, transfer and update of a finished program, priced."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import fx

from zerofx.analysis.memory.micro import micros
from zerofx.analysis.memory.storage import sent_as
from zerofx.ir.graphs import regions
from zerofx.ir.meta import Info, Role, info
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.repeats import is_numbered
from zerofx.ir.spec import Kind, Lane, kind_of, launch_of, spec_of, verb_of
from zerofx.ir.text import without_numbers
from zerofx.layout.buckets import Bucket, Layout
from zerofx.layout.tiers import Tier
from zerofx.policy import reduction, shard_copies, staging
from zerofx.policy.shard_copies import SentAs
from zerofx.policy.staging import Move
from zerofx.runtime.tiers.homes import ADAMW_STATES

# -- Tasks: units of a step's time, each on one lane, with the tasks that must end before it -------


@dataclass(frozen=True)
class Price:
    """The cost of one task: its time with lower and upper bounds, and its bytes and operations.

    calls: number of its kernel launches.
    """

    low_us: float = 0.0
    us: float = 0.0
    high_us: float = 0.0
    nbytes: int = 0
    flops: float = 0.0
    calls: int = 1

    def repeated(self, times: int) -> Price:
        """Return the price of as many of them, one after the other."""
        if times == 1:
            return self
        return Price(*(times * each for each in dataclasses.astuple(self)))


class Prices(Protocol):
    """The costs of tasks on a machine.

    is_inline: the host computes, and copies use the same cores, so that nothing hides
        them.
    """

    @property
    def is_inline(self) -> bool: ...

    def region(self, nodes: Sequence[fx.Node]) -> Price:
        """Price the call of a region."""

    def launch(self, calls: int) -> Price:
        """Price the host's time for that many launches, in addition to the device's work."""

    def call(self, graph: str, regions: int, ranks: int) -> Price:
        """Price the fixed cost of calling a graph of that many regions, or of an optimizer step."""

    def touch(self, nbytes: int, tier: Tier = Tier.DEVICE) -> Price:
        """Price a pass that reads and writes that many bytes of a tier's memory in total."""

    def collective(self, kind: str, nbytes: int, ranks: int, stride: int) -> Price:
        """Price a collective over `ranks` ranks, `stride` apart; nbytes: the full buffer."""

    def exchange(self, kind: str, nbytes: int, ranks: int, stride: int) -> Price:
        """Price a collective of values, which compute soon waits for; arguments as before."""

    def beside(self, kind: str, nbytes: int, ranks: int) -> Price:
        """Price the slowdown of compute by a concurrent collective."""

    def arrival(self, nbytes: int, ranks: int) -> Price:
        """Price a rank's work on a reduced slice of that many bytes after its arrival."""

    def copy(self, lane: Lane, nbytes: int) -> Price:
        """Price a copy on a lane between device, host and NVMe."""

    def update(self, tier: Tier, numel: int) -> Price:
        """Price the optimizer's update of that many elements on a tier."""


@dataclass(frozen=True)
class Task:
    """One region call, transfer or update, in the order in which the schedule launches them.

    name: unique within a step, and independent of the prices: `forward region 3`, `backward RS
        b2`; with ` #1`, ... for later micro-batches.
    kind: "region", "pack", "transfer", "arrival", "store", "update", "clip", "call", "launch",
        "cast" or "beside".
    graph: "forward", "backward" or "step". bucket: for a value's copy, the value's number.
    layer: number of the layer, if several are identical.
    needs: tasks that must have ended.
    """

    index: int
    name: str
    lane: Lane
    kind: str
    graph: str
    unit: str
    bucket: int
    region: int
    nbytes: int
    flops: float
    line: str
    layer: int | None
    needs: tuple[int, ...]
    low_us: float
    us: float
    high_us: float


@dataclass
class TaskList:
    """The list of tasks under construction, with the ends of the compute lane and of the host.

    compute, host: the last task of either. ended: tasks that must end before the next task of the
        compute lane, in addition to its previous one. wires: the last collective over each mesh
        axis.
    """

    prices: Prices
    graph: str = ""
    micro: int = 0
    found: list[Task] = field(default_factory=list)
    compute: int | None = None
    host: int | None = None
    ended: set[int] = field(default_factory=set)
    wires: dict[str, int] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)

    def add(
        self, lane: Lane, kind: str, name: str, price: Price, needs: Iterable[int | None],
        where: Info | None = None, region: int = -1,
    ) -> int:  # fmt: skip
        """Append a task; return its index."""
        where = where or Info()
        index = len(self.found)
        task = Task(
            index, self._name(name), lane, kind, self.graph, where.unit, where.index, region,
            price.nbytes, price.flops, where.line, None,
            tuple(sorted({n for n in needs if n is not None})),
            price.low_us, price.us, price.high_us,
        )  # fmt: skip
        self.found.append(task)
        return index

    def _name(self, name: str) -> str:
        full = f"{self.graph} {name}" + (f" #{self.micro}" if self.micro else "")
        self.names[full] += 1
        times = self.names[full]
        return full if times == 1 else f"{full} ({times})"

    def computes(
        self, kind: str, name: str, price: Price, where: Info | None = None, region: int = -1,
        needs: Iterable[int] = (),
    ) -> int:  # fmt: skip
        """Append a task of the compute lane, after everything that was waited for."""
        if not self.prices.is_inline:
            self.hosts("launch", f"launch {name}", self.prices.launch(price.calls), where)
        before = [self.compute, self.host, *self.ended, *needs]
        self.compute = self.add(Lane.COMPUTE, kind, name, price, before, where, region)
        self.ended.clear()
        return self.compute

    def hosts(
        self, kind: str, name: str, price: Price, where: Info | None = None,
        needs: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """Append work or a wait of the host; if copies are inline, this is the compute lane."""
        if self.prices.is_inline:
            self.ended.update(needs)
            if price.us > 0.0:
                self.computes(kind, name, price, where)
            return
        self.host = self.add(Lane.HOST, kind, name, price, [self.host, *needs], where)

    def moves(
        self, lane: Lane, name: str, price: Price, where: Info | None = None,
        needs: Iterable[int] = (), beside: bool = False,
    ) -> int:  # fmt: skip
        """Append a transfer that is launched at the present position of the schedule.

        beside: it does not use the compute cores, even if copies are inline.
        """
        before = [self.compute, self.host, *self.ended, *needs]
        index = self.add(lane, "transfer", name, price, before, where)
        if self.prices.is_inline and not beside:
            self.ended.add(index)
        return index

    def sends(
        self, lane: Lane, name: str, price: Price, beside: Price, where: Info | None = None,
        needs: Iterable[int] = (), axis: str = "shard",
    ) -> int:  # fmt: skip
        """Append a collective over a mesh axis, launched here, and its slowdown of compute.

        Gathers and reductions over the same ranks are on separate lanes but share the same wires.
        Each begins when the previous one has ended, which takes the same time as sharing the wires.
        """
        before = [*needs, *([self.wires[axis]] if axis in self.wires else [])]
        index = self.wires[axis] = self.moves(lane, name, price, where, before, beside=True)
        if beside.us > 0.0:
            self.computes("beside", f"beside {name}", beside, where)
        return index


# -- The optimizer's tasks: in `step()` after all backward passes, or per bucket inside one --------
# The compute lane updates states on the device, and the host updates those on the host.
# States on NVMe pass through host memory, as `policy/staging.py` defines.


STEP = "step"


def step_tasks(
    program: Planned, found: TaskList, stored: Mapping[int, int | None], clips: bool
) -> None:
    """Append the optimizer's step over every bucket that backward has not updated.

    stored: bucket -> the task after which its gradient can be used.
    """
    layout = program.layout
    if not program.is_laid_out:
        return
    found.graph = STEP
    updated = {info(n).index for n in program.graph(BACKWARD).nodes if kind_of(n) is Kind.UPDATE}
    left = [b for b in layout.buckets if b.index in stored and b.index not in updated]
    trained = sum(len(b.params) for b in left)
    found.hosts("call", "call", found.prices.call(STEP, trained, program.world_size))
    if not left:
        return
    if clips:
        _clip(program, found, layout, left, stored)
    _on_device(found, layout, [b for b in left if b.home is Tier.DEVICE])
    for bucket in (b for b in left if b.home is Tier.HOST):
        price = found.prices.update(Tier.HOST, layout.shard_numel(bucket))
        needs = [stored[bucket.index], found.host, found.compute if clips else None]
        task = found.add(Lane.UPDATE, "update", _name(bucket), price, needs, _where(bucket))
        found.ended.add(task)
    _staged(found, layout, [b for b in left if b.home is Tier.NVME], stored, clips)


def _name(bucket: Bucket) -> str:
    return f"update b{bucket.index}"


def _where(bucket: Bucket) -> Info:
    return Info(unit=bucket.label(), index=bucket.index)


def _on_device(found: TaskList, layout: Layout, buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        price = found.prices.update(Tier.DEVICE, layout.shard_numel(bucket))
        found.computes("update", _name(bucket), price, _where(bucket))


def _clip(
    program: Planned, found: TaskList, layout: Layout, buckets: Sequence[Bucket],
    stored: Mapping[int, int | None],
) -> None:  # fmt: skip
    """Append the global norm: one pass over the gradients, and a sum over the ranks."""
    near, away = (
        sum(layout.shard_numel(b) * b.dtype.itemsize for b in buckets if b.is_away is is_away)
        for is_away in (False, True)
    )
    if near:
        found.computes("clip", "norm", found.prices.touch(near))
    if away:
        needs = [t for b in buckets if b.is_away and (t := stored[b.index]) is not None]
        found.hosts("clip", "norm", found.prices.touch(away, Tier.HOST), needs=needs)
    if program.world_size > 1:
        price = found.prices.collective("all_reduce", 8, program.world_size, 1)
        norm = found.moves(Lane.REDUCE, "AR norm", price, beside=True)
        found.ended.add(norm)
        found.computes("clip", "factor", found.prices.touch(8))


def _staged(
    found: TaskList, layout: Layout, buckets: Sequence[Bucket], stored: Mapping[int, int | None],
    clips: bool,
) -> None:  # fmt: skip
    """Append updates of states on NVMe, in the order that `policy/staging.py` defines.

    `step()` runs updates itself and waits for writes: later launches come after both.
    """
    begin = [found.host, found.compute]
    updated: int | None = None  # the last update
    waited: int | None = None  # the last write that `step()` has waited for
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for move, k in staging.step_order(len(buckets)):
        bucket, where = buckets[k], _where(buckets[k])
        numel = layout.shard_numel(bucket)
        size = numel * bucket.dtype.itemsize * (1 + ADAMW_STATES)
        if move is Move.READ:
            price, needs = found.prices.copy(Lane.NVME, size), [*begin, updated, waited]
            reads[k] = found.add(Lane.NVME, "transfer", f"RD b{bucket.index}", price, needs, where)
        elif move is Move.UPDATE:
            price = found.prices.update(Tier.HOST, numel)
            needs = [reads[k], stored[bucket.index], found.host, waited]
            updated = found.add(Lane.UPDATE, "update", _name(bucket), price, needs, where)
            price = found.prices.copy(Lane.TO_NVME, size)
            writes[k] = found.add(
                Lane.TO_NVME, "transfer", f"WR b{bucket.index}", price, [updated], where
            )
        else:
            waited = writes[k]
    found.ended.update(writes.values())


def update_beside(found: TaskList, layout: Layout, bucket: Bucket, needs: Sequence[int]) -> int:
    """Append an update inside backward of a bucket off the device; return its last task."""
    before = [*needs, found.host, found.compute]
    size = layout.shard_numel(bucket) * bucket.dtype.itemsize * (1 + ADAMW_STATES)
    where = _where(bucket)
    if bucket.home is Tier.NVME:
        price = found.prices.copy(Lane.NVME, size)
        read = found.add(Lane.NVME, "transfer", f"RD b{bucket.index} states", price, before, where)
        before.append(read)
    price = found.prices.update(Tier.HOST, layout.shard_numel(bucket))
    task = found.add(Lane.UPDATE, "update", _name(bucket), price, before, where)
    if found.prices.is_inline:
        found.ended.add(task)
    if bucket.home is Tier.NVME:
        price = found.prices.copy(Lane.TO_NVME, size)
        task = found.add(Lane.TO_NVME, "transfer", f"WR b{bucket.index}", price, [task], where)
    return task


# -- Walk through a program's graphs as a rank does, and record the time of each node --------------
# A task's needs are what the runtime orders: its data; the compute launched before a
# transfer, including the release of the slot that it fills; for compute, every transfer whose wait
# precedes it; for the host, reads from NVMe and copies whose memory it accesses itself.


@dataclass
class Walk:
    """The walk through graphs, node by node, as a rank executes them.

    behind: launch, or value saved by one -> the task that must have ended when it is used.
    stored: bucket -> the task after which its gradient can be used.
    regions: graph -> the nodes of each region, by the first one. priced: the prices of regions, by
        that node: each micro-batch runs the same ones.
    """

    program: Planned
    found: TaskList
    behind: dict[fx.Node, int] = field(default_factory=dict)
    stored: dict[int, int | None] = field(default_factory=dict)
    cast: set[int] = field(default_factory=set)  # buckets whose host copy is current
    updates: list[int] = field(default_factory=list)
    regions: dict[str, dict[fx.Node, list[fx.Node]]] = field(default_factory=dict)
    priced: dict[fx.Node, Price] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return self.program.layout

    def run(self, graph: str) -> None:
        """Append the tasks of one graph."""
        self.found.graph = graph
        gm = self.program.graph(graph)
        if graph not in self.regions:
            self.regions[graph] = {nodes[0]: nodes for nodes in regions(gm).values()}
        first, ranks = self.regions[graph], self.program.world_size
        self.found.hosts("call", "call", self.found.prices.call(graph, len(first), ranks))
        for node in gm.nodes:
            if node in first:
                self._region(first[node])
            elif (spec := spec_of(node)) is not None:
                spec.task(self, node)
        self._end(gm)

    def _end(self, graph: fx.Graph) -> None:
        """Make the host wait for copies of shards and gradients, and for updates, after a call."""
        mine = [(spec_of(n), t) for n, t in self.behind.items() if n.graph is graph]
        copies = [t for spec, t in mine if spec is not None and spec.is_move]
        if copies or self.updates:
            self.found.hosts("call", "settle", Price(calls=0), needs=[*copies, *self.updates])
        self.updates.clear()
        if self.found.graph == FORWARD and BACKWARD in self.program.graphs:
            self._hand_over()

    def _hand_over(self) -> None:
        """Make backward's saved values depend on the transfers that delivered or offloaded them."""
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
        if nodes[0] not in self.priced:
            self.priced[nodes[0]] = self.found.prices.region(nodes)
        price = self.priced[nodes[0]]
        self.found.computes("region", f"region {number}", price, where, number)

    def bucket(self, node: fx.Node) -> Bucket:
        return self.layout.buckets[info(node).index]

    # -- queries of the ops' own tasks ------------------------------------------------------
    def collective(
        self, node: fx.Node, kind: str, size: int, axis: str = "shard", times: int = 1
    ) -> None:
        """Append a collective over a mesh axis; among one rank it is an immediate copy.

        kind: the collective whose price it has. size: bytes of the full buffer. times: as many
            collectives follow each other, each of an equal part of the buffer.
        """
        spec = spec_of(node)
        assert spec is not None and spec.lane is not None, f"{node} has no lane"
        ranks, stride = self.layout.mesh.along(axis), self.layout.mesh.stride(axis)
        is_sum = kind == "all_reduce" and not spec.is_value
        name = f"{'AR' if is_sum else spec.verb} {self.label(node)}"
        if ranks == 1:
            if kind == "all_gather":
                price = self.found.prices.touch(2 * size)
                self.behind[node] = self.found.computes("store", f"copy {self.label(node)}", price)
            return
        prices = self.found.prices
        priced = prices.exchange if spec.is_value else prices.collective
        price = priced(kind, size // times, ranks, stride).repeated(times)
        beside = prices.beside(kind, size // times, ranks).repeated(times)
        self.behind[node] = self.found.sends(
            spec.lane, name, price, beside, info(node), self.data(node), axis
        )

    def reduces(self, bucket: Bucket) -> bool:
        """Return whether this micro-batch reduces a bucket rather than only summing locally."""
        loop = self.program.loop
        is_last = self.found.micro == loop.accumulation - 1
        can_wait = loop.no_sync and reduction.is_put_off(self.layout, self.program.plan)
        return is_last or not can_wait

    def refresh_moves(self, node: fx.Node) -> bool:
        """Return whether a refresh moves anything: the first one after an update does."""
        in_forward = self.found.graph == FORWARD and info(node).phase.value != BACKWARD
        return shard_copies.refresh_moves(in_forward, self.found.micro)

    def reload(self, node: fx.Node, size: int) -> None:
        """Append a shard's copy to the device, with a cast before it if necessary."""
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
        """Append a copy between tiers. beside: it does not use the compute cores."""
        name = f"{verb_of(lane)} {self.label(node)}"
        price = self.found.prices.copy(lane, size)
        before = self.data(node)
        self.behind[node] = self.found.moves(lane, name, price, info(node), before, beside)

    def data(self, node: fx.Node) -> list[int]:
        """Return the transfers that deliver a node's inputs."""
        found = []
        for given in node.all_input_nodes:
            launch = launch_of(given) if kind_of(given) is Kind.WAIT else given
            if launch in self.behind:
                found.append(self.behind[launch])
        return found

    def arrive(self, launch: fx.Node, size: int, ranks: int) -> None:
        """Append this rank's work on a reduced slice: summing received parts, or scaling."""
        self.found.ended.add(self.behind[launch])
        price = self.found.prices.arrival(size, ranks)
        name = f"arrival {self.label(launch)}"
        self.behind[launch] = self.found.computes("arrival", name, price, info(launch))

    def label(self, node: fx.Node) -> str:
        """Return the label of what a node moves: `b3`, a bucket, or `v3`, a value."""
        spec = spec_of(node)
        return f"{'v' if spec is not None and spec.is_value else 'b'}{info(node).index}"


# -- The tasks of one step: every region, transfer and update of a finished program, priced --------


def tasks(program: Planned, prices: Prices, clips: bool = False) -> tuple[Task, ...]:
    """Return the tasks of a rank in one step of a program: all micro-batches, then the optimizer.

    clips: the loop clips the global norm before the step.

    Raises:
        PlanError: the program's loop is invalid, see `micros`.
    """
    loop = program.loop
    micros(program, loop.accumulation, loop.no_sync)
    found = TaskList(prices)
    walk = Walk(program, found)
    for micro in range(loop.accumulation if BACKWARD in program.graphs else 1):
        found.micro = micro
        for graph in (FORWARD, BACKWARD):
            if graph in program.graphs:
                walk.run(graph)
    found.micro = 0
    if program.is_training and BACKWARD in program.graphs:
        step_tasks(program, found, walk.stored, clips)
    return _with_layers(found.found)


def _with_layers(found: list[Task]) -> tuple[Task, ...]:
    """Number the tasks of units that have identical siblings."""
    units = {t.unit for t in found if is_numbered(t.unit)}
    alike = Counter(map(without_numbers, units))
    number = {
        unit: int("".join(c if c.isdigit() else " " for c in unit).split()[0])
        for unit in units
        if alike[without_numbers(unit)] > 1
    }
    return tuple(replace(t, layer=number[t.unit]) if t.unit in number else t for t in found)
