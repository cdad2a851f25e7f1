"""Several ranks as threads of one process, with the interface of a real World; used by tests.

A transfer snapshots its input at launch and lands only at its wait, so that a program which reads
too early sees stale values. Agreement and its errors are the real ones, on a board of plain memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from zerofx.comm.agreement import Agreement
from zerofx.comm.board import ROW_BYTES, MemoryBoard
from zerofx.comm.collectives import (
    Axis,
    GroupWork,
    Lane,
    Work,
    all_reduce_bytes,
    ordered_sum,
)
from zerofx.comm.watchdog import HostWatchdog
from zerofx.comm.world import World
from zerofx.errors import DesyncError
from zerofx.layout.buckets import AXES, Mesh

T = TypeVar("T")
_LOOK_S = 0.05  # how often a waiting rank looks for what is wrong


class Hub:
    """Where the threads leave what they send: (axis, number) -> one posting a rank."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._posted: dict[tuple, dict[int, tuple[tuple, Any]]] = {}

    def post(self, key: tuple, rank: int, signature: tuple, value: Any) -> None:
        """Leave this rank's part of a collective."""
        with self.changed:
            self._posted.setdefault(key, {})[rank] = (signature, value)
            self.changed.notify_all()

    def wait_for(self, key: tuple, size: int) -> dict[int, tuple[tuple, Any]] | None:
        """Return all parts once `size` ranks have posted, None if not all did within a moment."""
        with self.changed:
            row = self._posted[key]
            if len(row) < size:
                self.changed.wait(_LOOK_S)
            return row if len(row) == size else None


class SimulatedWatch(HostWatchdog):
    """Waits by looking: there is nothing to interrupt."""

    def wait(self, handles: Sequence[Any], number: int, label: str) -> None:
        started = time.monotonic()
        self._waiting = (number, label)
        try:
            for handle in handles:
                while not handle.arrived():
                    problem = self.look(time.monotonic() - started)
                    if problem is not None:
                        raise self.agreement.fail(problem)
        finally:
            self._waiting = None


class Arrival:
    """The parts of one collective, on their way to one rank."""

    def __init__(self, hub: Hub, key: tuple, rank: int, size: int) -> None:
        self._hub, self._key, self._rank, self._size = hub, key, rank, size
        self.parts: list[Any] = []

    def arrived(self) -> bool:
        """Wait a moment; return whether all parts are there.

        Raises:
            DesyncError: the ranks launched different collectives under one number.
        """
        row = self._hub.wait_for(self._key, self._size)
        if row is None:
            return False
        mine = row[self._rank][0]
        for other, (signature, _) in row.items():
            if signature != mine:
                raise DesyncError(f"rank {self._rank} runs {mine} while rank {other} {signature}")
        self.parts = [row[rank][1] for rank in range(self._size)]
        return True


class SimulatedAxis(Axis):
    """An axis of several ranks that are threads and meet in a Hub."""

    def __init__(self, rank: int, size: int, name: tuple, hub: Hub, lane: Lane) -> None:
        super().__init__(rank, size)
        self._name, self._hub, self._lane = name, hub, lane
        self._calls = 0

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "all-gather") -> Work:
        assert out.numel() == shard.numel() * self.size, f"{label}: {out.shape} from {shard.shape}"
        self._lane.count("all_gather", shard.nbytes * (self.size - 1))

        def land(parts: list[Tensor]) -> None:
            for landing, part in zip(out.view(self.size, -1).unbind(0), parts, strict=True):
                landing.copy_(part.view(-1))

        return self._launch(("all-gather",), shard, land, label)

    def reduce_scatter(
        self, out: Tensor, full: Tensor, scale: float, label: str = "reduce-scatter"
    ) -> Work:
        assert full.numel() == out.numel() * self.size, f"{label}: {out.shape} from {full.shape}"
        self._lane.count("reduce_scatter", out.nbytes * (self.size - 1))

        def land(parts: list[Tensor]) -> None:
            ordered_sum([part.view(self.size, -1)[self.rank] for part in parts], out, scale)

        return self._launch(("reduce-scatter", scale), full, land, label)

    def all_reduce(
        self,
        buf: Tensor,
        scale: float = 1.0,
        label: str = "all-reduce",
        source: Tensor | None = None,
    ) -> Work:
        self._lane.count("all_reduce", all_reduce_bytes(buf, self.rank, self.size))
        return self._launch(
            ("all-reduce", scale),
            buf if source is None else source,
            lambda parts: ordered_sum(parts, buf, scale),
            label,
        )

    def broadcast(self, buf: Tensor, src: int = 0, label: str = "broadcast") -> Work:
        self._lane.count("broadcast", buf.nbytes * (self.size - 1) if self.rank == src else 0)

        def land(parts: list[Tensor]) -> None:
            buf.copy_(parts[src])

        return self._launch(("broadcast", src), buf, land, label)

    def all_to_all(
        self, receives: Sequence[Tensor], sends: Sequence[Tensor], label: str = "all-to-all"
    ) -> Work:
        self._lane.count("all_to_all", sum(t.nbytes for t in sends) - sends[self.rank].nbytes)

        def land(parts: list[Any]) -> None:
            for landing, part in zip(receives, parts, strict=True):
                assert landing.shape == part[self.rank].shape, f"{label}: {landing.shape}"
                landing.copy_(part[self.rank])

        copies = [t.detach().clone() for t in sends]
        return self._post(("all-to-all", str(sends[0].dtype)), copies, land, label)

    def _launch(
        self, kind: tuple, sent: Tensor, land: Callable[[list[Tensor]], None], label: str
    ) -> Work:
        signature = (*kind, sent.numel(), str(sent.dtype))
        return self._post(signature, sent.detach().clone(), land, label)

    def _post(
        self, signature: tuple, sent: Any, land: Callable[[list[Any]], None], label: str
    ) -> Work:
        key = (*self._name, self._calls)
        self._calls += 1
        self._hub.post(key, self.rank, signature, sent)
        arrival = Arrival(self._hub, key, self.rank, self.size)
        return GroupWork(self._lane, label, [arrival], lambda: land(arrival.parts))


class SimulatedWorld(World):
    """A World whose ranks are threads of this process."""

    @classmethod
    def create(
        cls, size: int, shard_size: int | None = None, timeout_s: float = 60.0
    ) -> list[SimulatedWorld]:
        """Return one world a rank; use each from a thread of its own (see `run_ranks`)."""
        per_group = shard_size or size
        assert size % per_group == 0, f"shard_size {per_group} does not divide {size}"
        hub, memory = Hub(), bytearray((size + 1) * ROW_BYTES)
        worlds = []
        for rank in range(size):
            board = MemoryBoard(memory, rank, size)
            board.attach()
            agreement = Agreement(board, list(range(size)), timeout_s)
            worlds.append(cls._place(rank, size, per_group, hub, agreement))
        return worlds

    @classmethod
    def _place(
        cls, rank: int, size: int, shard_size: int, hub: Hub, agreement: Agreement
    ) -> SimulatedWorld:
        lane = Lane(SimulatedWatch(agreement))
        mesh = Mesh.of(shard=shard_size, replicate=size // shard_size)

        def axis(rank: int, size: int, *name: object) -> Axis:
            return Axis() if size == 1 else SimulatedAxis(rank, size, name, hub, lane)

        def line(name: str) -> Axis:
            position = mesh.position(name, rank)
            first = rank - position * mesh.stride(name)
            return axis(position, mesh.along(name), name, first)

        return cls(
            device=torch.device("cpu"),
            backend="simulated",
            axes={name: line(name) for name in AXES},
            whole=axis(rank, size, "whole"),
            lane=lane,
            agreement=agreement,
        )


def run_ranks(
    size: int,
    fn: Callable[[World], T],
    shard_size: int | None = None,
    timeout_s: float = 60.0,
) -> list[T]:
    """Run `fn(world)` on `size` simulated ranks; return the results in rank order.

    Raises: the first error of any rank, upon which the others stop waiting for it; DesyncError if
    a rank waits longer than `timeout_s` for another, or has not ended after ten times that.
    """
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(world: SimulatedWorld) -> None:
        try:
            results[world.rank] = fn(world)
        except BaseException as error:
            errors.append(error)
            world.leave(f"it raised {type(error).__name__}: {error}")
        else:
            world.leave("its function returned")

    threads = [
        threading.Thread(target=body, args=(world,), name=f"rank-{world.rank}", daemon=True)
        for world in SimulatedWorld.create(size, shard_size, timeout_s)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10 * timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive() and not errors:
            raise DesyncError(f"simulated {thread.name} did not end within {10 * timeout_s} s")
    if errors:
        raise errors[0]
    return results
