"""Several ranks as threads of one process, with the interface of a real World; used by tests.

A transfer snapshots its input at launch and lands only at its wait, so that a program which reads
too early sees stale values. Ranks that launch different collectives are named, not deadlocked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from zerofx.errors import DesyncError
from zerofx.runtime.collectives import (
    KINDS,
    Axis,
    Lane,
    Traffic,
    Work,
    all_reduce_bytes,
    ordered_sum,
)
from zerofx.runtime.watchdog import Watchdog
from zerofx.runtime.world import World

T = TypeVar("T")


class Hub:
    """Where the threads leave what they send: (axis, call) -> one posting a rank."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self._posted: dict[tuple, dict[int, tuple[tuple, Tensor]]] = {}

    def post(self, key: tuple, rank: int, signature: tuple, value: Tensor) -> None:
        with self.changed:
            self._posted.setdefault(key, {})[rank] = (signature, value)
            self.changed.notify_all()

    def collect(self, key: tuple, rank: int, size: int, label: str) -> list[Tensor]:
        """Return the tensors of all `size` ranks, in rank order, once all have arrived."""
        deadline = time.monotonic() + self.timeout_s
        with self.changed:
            row = self._posted[key]
            while len(row) < size:
                if self.failure is not None:
                    raise DesyncError(f"{label}: another rank failed: {self.failure!r}")
                if not self.changed.wait(deadline - time.monotonic()):
                    absent = sorted(set(range(size)) - set(row))
                    raise DesyncError(f"{label}: no sign of rank {absent} in {self.timeout_s} s")
        mine = row[rank][0]
        for other, (signature, _) in row.items():
            if signature != mine:
                raise DesyncError(f"{label}: rank {rank} runs {mine}, rank {other} {signature}")
        return [row[r][1] for r in range(size)]

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()


class SimulatedFlight(Work):
    """A simulated collective: nothing lands before `wait`."""

    __slots__ = ("_land", "_lane")

    def __init__(self, lane: Lane, land: Callable[[], None]) -> None:
        self._lane, self._land = lane, land
        lane.in_flight[self] = None

    def wait(self) -> None:
        if self in self._lane.in_flight:
            del self._lane.in_flight[self]
            self._land()


class SimulatedAxis(Axis):
    """An axis whose ranks are threads that meet in a Hub."""

    def __init__(self, rank: int, size: int, name: tuple, hub: Hub, lane: Lane) -> None:
        super().__init__(rank, size)
        self._name, self._hub, self._lane = name, hub, lane
        self._calls = 0

    def _launch(
        self, kind: str, sent: Tensor, detail: tuple, land: Callable[[list[Tensor]], None], label: str
    ) -> Work:
        key = (*self._name, self._calls)
        self._calls += 1
        signature = (kind, sent.numel(), str(sent.dtype), *detail)
        self._hub.post(key, self.rank, signature, sent.detach().clone())
        return SimulatedFlight(
            self._lane, lambda: land(self._hub.collect(key, self.rank, self.size, label))
        )

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "all-gather") -> Work:
        if self.size == 1:
            return super().all_gather(out, shard, label)
        assert out.numel() == shard.numel() * self.size, f"{label}: {out.shape} from {shard.shape}"
        self._lane.count("all_gather", shard.nbytes * (self.size - 1))
        return self._launch(
            "all-gather", shard, (), lambda parts: torch.cat(parts, out=out), label
        )

    def reduce_scatter(
        self, out: Tensor, full: Tensor, scale: float, label: str = "reduce-scatter"
    ) -> Work:
        if self.size == 1:
            return super().reduce_scatter(out, full, scale, label)
        assert full.numel() == out.numel() * self.size, f"{label}: {out.shape} from {full.shape}"
        self._lane.count("reduce_scatter", out.nbytes * (self.size - 1))

        def land(parts: list[Tensor]) -> None:
            mine = [part.view(self.size, -1)[self.rank] for part in parts]
            ordered_sum(mine, out, scale)

        return self._launch("reduce-scatter", full, (scale,), land, label)

    def all_reduce(self, buf: Tensor, scale: float = 1.0, label: str = "all-reduce") -> Work:
        if self.size == 1:
            return super().all_reduce(buf, scale, label)
        self._lane.count("all_reduce", all_reduce_bytes(buf, self.rank, self.size))
        return self._launch(
            "all-reduce", buf, (scale,), lambda parts: ordered_sum(parts, buf, scale), label
        )

    def broadcast(self, buf: Tensor, src: int = 0, label: str = "broadcast") -> Work:
        if self.size == 1:
            return super().broadcast(buf, src, label)
        self._lane.count("broadcast", buf.nbytes * (self.size - 1) if self.rank == src else 0)
        return self._launch(
            "broadcast", buf, (src,), lambda parts: buf.copy_(parts[src]), label
        )


class SimulatedWorld(World):
    """A World whose ranks are threads of this process."""

    hub: Hub

    @classmethod
    def create(
        cls, size: int, shard_size: int | None = None, timeout_s: float = 60.0
    ) -> list[SimulatedWorld]:
        """Return one world a rank; use each from a thread of its own (see `run_ranks`)."""
        hub = Hub(timeout_s)
        per_group = shard_size or size
        assert size % per_group == 0, f"shard_size {per_group} does not divide {size}"
        return [cls._place(rank, size, per_group, hub) for rank in range(size)]

    @classmethod
    def _place(cls, rank: int, size: int, shard_size: int, hub: Hub) -> SimulatedWorld:
        lane = Lane({kind: Traffic() for kind in KINDS}, {}, Watchdog())
        row, column = divmod(rank, shard_size)
        world = cls(
            device=torch.device("cpu"),
            backend="simulated",
            shard=SimulatedAxis(column, shard_size, ("shard", row), hub, lane),
            replicate=SimulatedAxis(row, size // shard_size, ("replicate", column), hub, lane),
            whole=SimulatedAxis(rank, size, ("whole",), hub, lane),
            lane=lane,
        )
        world.hub = hub
        return world


def run_ranks(
    size: int,
    fn: Callable[[World], T],
    shard_size: int | None = None,
    timeout_s: float = 60.0,
) -> list[T]:
    """Run `fn(world)` on `size` simulated ranks; return the results in rank order.

    Raises: the first error of any rank; the ranks that wait for it are stopped.
    """
    worlds = SimulatedWorld.create(size, shard_size, timeout_s)
    return run_on(worlds, fn)


def run_on(worlds: Sequence[SimulatedWorld], fn: Callable[[World], T]) -> list[T]:
    """Run `fn(world)` in one thread a world; return the results in rank order."""
    results: list[T | None] = [None] * len(worlds)
    first: list[BaseException] = []
    hub = worlds[0].hub

    def body(world: SimulatedWorld) -> None:
        try:
            results[world.rank] = fn(world)
        except BaseException as error:
            first.append(error)
            hub.fail(error)

    threads = [threading.Thread(target=body, args=(w,), name=f"rank-{w.rank}") for w in worlds]
    for thread in threads:
        thread.daemon = True  # a rank that never ends must not keep the process alive
        thread.start()
    deadline = time.monotonic() + 2 * hub.timeout_s
    for rank, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive() and not first:
            raise DesyncError(f"simulated rank {rank} did not end within {2 * hub.timeout_s} s")
    if first:
        raise first[0]
    return results  # type: ignore[return-value]
