"""Probes of collectives on real ranks: alone, beside compute, and between two pieces of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from zerofx.comm.collectives import Work as Flight
from zerofx.comm.collectives import ordered_sum
from zerofx.comm.world import World
from zerofx.tools.calibrate.crowd import WIDTH, Block
from zerofx.tools.calibrate.probe import Probe, Work

FULL_BYTES = (4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20)
SIDE = 192  # of the products that compute beside a transfer is made of: they stay in the cache
BESIDE_TIMES = 2  # the length of a transfer alone
BETWEEN_ROWS, BETWEEN_CALLS = 64, 8  # of a piece of compute; of transfers, each behind a piece
MOST_CALLS = 50

Launch = Callable[[], Flight]


class Algorithms:
    """Which algorithm the next launch takes: gloo's axes ask at every one."""

    now = "direct"

    def __call__(self, kind: str, nbytes: int, ranks: int) -> str:
        return self.now


def launches(world: World, size: int) -> dict[str, Launch]:
    """Return each kind of collective over a bucket of so many bytes."""
    full, ranks = torch.ones(size // 4), world.size
    out, shard = torch.ones(size // 4), torch.ones(size // 4 // ranks)
    return {
        "all_gather": lambda: world.all_gather(out, shard),
        "reduce_scatter": lambda: world.reduce_scatter(shard, full, 1.0),
        "all_reduce": lambda: world.all_reduce(out, 0.5),
        "broadcast": lambda: world.broadcast(out),
        "all_to_all": lambda: world.all_to_all(list(out.chunk(ranks)), list(full.chunk(ranks))),
    }


def arrivals(ranks: int) -> list[Probe]:
    """Return the sums of reduced slices, by the bytes of one slice."""
    sizes = sorted({part for size in FULL_BYTES for part in (size // ranks, size)})
    return [Probe(f"arrival.{ranks}", s, s, partial(_arrival, s, ranks)) for s in sizes]


def _arrival(size: int, ranks: int) -> Work:
    parts, out = [torch.ones(size // 4) for _ in range(ranks)], torch.empty(size // 4)
    return lambda: ordered_sum(parts, out, 0.5)


def transfers(world: World, algorithms: Algorithms) -> list[Probe]:
    """Return every kind of collective by size and algorithm, with nothing beside it."""
    probes = []
    for name in ("direct", "native"):
        for size in FULL_BYTES:
            for kind, launch in launches(world, size).items():
                if kind in ("all_reduce", "all_to_all") and name == "native":
                    continue  # gloo's own are not used
                make = partial(_transfer, launch, name, algorithms)
                curve = f"{kind}.{name}.{world.size}"
                probes.append(Probe(curve, size, size, make, calls=_calls(size)))
    return probes


def _transfer(launch: Launch, name: str, algorithms: Algorithms) -> Work:
    def work() -> None:
        algorithms.now = name
        launch().wait()

    return work


def _calls(size: int) -> int:
    return min(MOST_CALLS, max(2, FULL_BYTES[-1] // size))


class Beside:
    """A transfer with compute between its launch and its wait, and the same compute alone."""

    def __init__(self, kind: str, launch: Launch, size: int, alone_s: float, ranks: int) -> None:
        self.curve, self.x = f"beside.{kind}.{ranks}", float(size)
        self._launch = launch
        a = torch.randn(SIDE, SIDE)
        self._product = partial(torch.mm, a, a)
        one = Probe("", 0, 0, lambda: self._product)
        one.prepare()
        self._products = max(4, int(BESIDE_TIMES * alone_s / one.run()) + 1)
        calls = _calls(size) // 4 + 1
        self._both = Probe(self.curve, self.x, 0, lambda: self._with, calls)
        self._alone = Probe(self.curve, self.x, 0, lambda: self._without, calls)
        self._both.prepare()
        self._alone.prepare()

    def _without(self) -> None:
        for _ in range(self._products):
            self._product()

    def _with(self) -> None:
        flight = self._launch()
        self._without()
        flight.wait()

    def measure(self) -> None:
        """Note both, one behind the other."""
        self._alone.measure()
        self._both.measure()

    @property
    def lost_s(self) -> float:
        """The median of what the compute lost to the transfer, and to its launch and wait."""
        pairs = zip(self._both.found_s, self._alone.found_s, strict=True)
        return statistics.median(both - alone for both, alone in pairs)


class Between:
    """Transfers that are waited for at once, each behind a piece of compute; and that alone.

    Ranks never arrive at the same moment, their threads wake late, and caches are cold after a
    transfer. A transfer costs more than one that follows another, therefore.
    """

    def __init__(self, kind: str, launch: Launch, size: int, ranks: int) -> None:
        self.curve, self.x = f"between.{kind}.{ranks}", float(size)
        self._launch = launch
        self._blocks = [Block() for _ in range(BETWEEN_CALLS)]
        self._rows = torch.randn(BETWEEN_ROWS, WIDTH)
        self._both = Probe(self.curve, self.x, 0, lambda: self._with, calls=1)
        self._alone = Probe(self.curve, self.x, 0, lambda: self._without, calls=1)
        self._both.prepare()
        self._alone.prepare()

    @torch.no_grad()
    def _without(self) -> None:
        for block in self._blocks:
            block(self._rows)

    @torch.no_grad()
    def _with(self) -> None:
        for block in self._blocks:
            block(self._rows)
            self._launch().wait()

    def measure(self) -> None:
        """Note both, one behind the other."""
        self._alone.measure()
        self._both.measure()

    @property
    def lost_s(self) -> float:
        """What one transfer adds, by the medians of both."""
        return (self._both.seconds - self._alone.seconds) / BETWEEN_CALLS


def besides(world: World, found: Sequence[Probe]) -> list[Beside]:
    """Return direct exchanges beside compute, whose times alone were found before."""
    alone = {(probe.curve, probe.x): probe.seconds for probe in found}
    return [
        Beside(kind, launch, size, alone[f"{kind}.direct.{world.size}", size], world.size)
        for size in FULL_BYTES
        for kind, launch in launches(world, size).items()
        if kind != "broadcast"
    ]


def betweens(world: World) -> list[Between]:
    """Return direct exchanges that compute waits for, by size."""
    return [
        Between(kind, launch, size, world.size)
        for size in FULL_BYTES
        for kind, launch in launches(world, size).items()
        if kind != "broadcast"
    ]


def sum_bytes(curve: str, size: int, ranks: int) -> int:
    """Return the bytes of the sum with which the wait of a transfer ends, 0 where there is none."""
    if "reduce_scatter" in curve or ("all_reduce" in curve and ranks > 2):
        return size // ranks
    return size if "all_reduce" in curve else 0
