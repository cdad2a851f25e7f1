"""Tasks: what a step spends time on, each on one lane, with what must have ended before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import fx

from zerofx.analysis.time.steps import Lane
from zerofx.ir.meta import Info
from zerofx.layout.tiers import Tier


@dataclass(frozen=True)
class Price:
    """What one task takes: its time from the least to the most, and what it works on.

    calls: launches of kernels that it is made of.
    """

    low_us: float = 0.0
    us: float = 0.0
    high_us: float = 0.0
    nbytes: int = 0
    flops: float = 0.0
    calls: int = 1


class Prices(Protocol):
    """What tasks cost on a machine.

    is_inline: the host computes, and copies are made by the cores that do, so that nothing hides
        them.
    """

    @property
    def is_inline(self) -> bool: ...

    def region(self, nodes: Sequence[fx.Node]) -> Price:
        """Price the call of a region."""

    def launch(self, calls: int) -> Price:
        """Price the host's time for that many launches beside the device's work."""

    def call(self, graph: str, regions: int, ranks: int) -> Price:
        """Price what a call of a graph of so many regions, or a step of the optimizer, takes by
        itself.
        """

    def touch(self, nbytes: int, tier: Tier = Tier.DEVICE) -> Price:
        """Price a pass that reads and writes so many bytes of a tier's memory in all."""

    def collective(self, kind: str, nbytes: int, ranks: int, stride: int) -> Price:
        """Price a collective over `ranks` ranks that are `stride` apart; bytes of the full
        buffer.
        """

    def beside(self, kind: str, nbytes: int, ranks: int) -> Price:
        """Price what a collective takes from the compute beside it."""

    def arrival(self, nbytes: int, ranks: int) -> Price:
        """Price what a rank does with a reduced slice of so many bytes that has arrived."""

    def copy(self, lane: Lane, nbytes: int) -> Price:
        """Price a copy on a lane between device, host and NVMe."""

    def update(self, tier: Tier, numel: int) -> Price:
        """Price the optimizer's update of so many elements that live on a tier."""


@dataclass(frozen=True)
class Task:
    """One region call, transfer or update, in the order in which the schedule launches them.

    name: unique within a step, and the same whatever the prices: `forward region 3`, `backward RS
        b2`; of later micro-batches with ` #1`, ...
    kind: "region", "pack", "transfer", "arrival", "store", "update", "clip", "call", "launch",
        "cast" or "beside".
    graph: "forward", "backward" or "step". bucket: of a value's copy, the value's number.
    layer: number of the layer, where several are identical.
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
    """Tasks as they are found, with where the compute lane and the host stand.

    compute, host: the last task of either. ended: what has ended before the next task of the
        compute lane, beside the last one there. wires: the last collective over each mesh axis.
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
        """Append a task of the compute lane, behind all that was waited for."""
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
        """Append what the host itself does or waits for; in line, that is the compute lane."""
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
        """Append a transfer that is launched where the schedule now stands.

        beside: something else than the cores moves it, even where copies are made in line.
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
        """Append a collective over a mesh axis, launched here, and what it takes from compute.

        Gathers and reductions over the same ranks are on lanes of their own, but pass the same
        wires: one begins when the one before has ended, which takes as long as sharing them.
        """
        before = [*needs, *([self.wires[axis]] if axis in self.wires else [])]
        index = self.wires[axis] = self.moves(lane, name, price, where, before, beside=True)
        if beside.us > 0.0:
            self.computes("beside", f"beside {name}", beside, where)
        return index
