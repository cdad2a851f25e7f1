"""The collectives over one axis of ranks, and the Work each returns while it is in flight.

On gloo every reduction sums in rank order, ((r0 + r1) + r2) + ..., and scales once at the end,
whichever algorithm moves the bytes, so the choice of algorithm never changes a bit:

direct   one point-to-point message a pair of ranks, landing in its final place
native   one library call: all-gather, broadcast, or an all-to-all whose pieces are then summed here
         (gloo's own reductions sum in another order, so they are not used)

NCCL has its native calls only; it sums in an order fixed by the topology.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx import compat

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
_TAG_MASK = 0x3FFFFFFF  # gloo takes a message's tag from 31 bits
_BREAK_TAG = 0x7FFFFFFF

Algorithm = Callable[[str, int, int], str]
"""(kind, bytes of the full buffer, ranks of the axis) -> "direct" or "native"."""


def always_direct(kind: str, nbytes: int, ranks: int) -> str:
    """Choose the direct exchange for every collective."""
    return "direct"


@dataclass(slots=True)
class Traffic:
    """What this rank has sent in collectives of one kind."""

    calls: int = 0
    sent_bytes: int = 0


class Work:
    """A collective in flight: its output is ready, and its input free, once `wait` returns."""

    __slots__ = ()

    def wait(self) -> None:
        """Finish the collective; waiting again does nothing."""


DONE = Work()


class Watch(Protocol):
    """Numbers the launches and stands by while a rank waits (see runtime/watchdog.py)."""

    def launched(self, handles: Sequence[Any], label: str) -> int: ...
    def wait(self, handles: Sequence[Any], number: int, label: str) -> None: ...


@dataclass(slots=True)
class Lane:
    """What the axes of one world share: the watch, their counters, and what is in flight."""

    watch: Watch
    counters: dict[str, Traffic] = field(default_factory=lambda: {k: Traffic() for k in KINDS})
    in_flight: dict[Work, None] = field(default_factory=dict)

    def count(self, kind: str, sent_bytes: int) -> None:
        traffic = self.counters[kind]
        traffic.calls += 1
        traffic.sent_bytes += sent_bytes


class Axis:
    """One axis of ranks and its collectives; this class is the axis of one rank (local copies)."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "all-gather") -> Work:
        """Fill `out` [size * k] with every rank's `shard` [k], in rank order."""
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return DONE

    def reduce_scatter(
        self, out: Tensor, full: Tensor, scale: float, label: str = "reduce-scatter"
    ) -> Work:
        """Set `out` [k] to scale * the sum over ranks of this rank's slice of `full` [size * k]."""
        if scale != 1.0:
            torch.mul(full, scale, out=out)
        elif out.data_ptr() != full.data_ptr():
            out.copy_(full)
        return DONE

    def all_reduce(self, buf: Tensor, scale: float = 1.0, label: str = "all-reduce") -> Work:
        """Set `buf` [n] in place to scale * the sum over ranks."""
        if scale != 1.0:
            buf.mul_(scale)
        return DONE

    def broadcast(self, buf: Tensor, src: int = 0, label: str = "broadcast") -> Work:
        """Set `buf` on every rank to its value on rank `src` of this axis."""
        return DONE


class Flight(Work):
    """A collective over process groups: its transfers, and what then remains to do on this rank."""

    __slots__ = ("_finish", "_handles", "_label", "_lane", "_number")

    def __init__(
        self,
        lane: Lane,
        label: str,
        handles: list[Any],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._lane = lane
        self._handles = handles
        self._finish = finish
        self._label = label
        self._number = lane.watch.launched(handles, label)
        lane.in_flight[self] = None

    def wait(self) -> None:
        """Wait for the transfers, then sum and scale.

        Raises:
            DesyncError: a rank left, died, went elsewhere or did not arrive in time; names it.
        """
        lane = self._lane
        if self not in lane.in_flight:
            return
        del lane.in_flight[self]
        lane.watch.wait(self._handles, self._number, self._label)
        if self._finish is not None:
            self._finish()


class Scratch:
    """Receive buffers, made once per size and lent to one collective at a time."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Lend a flat buffer of `numel` elements of the dtype and device of `like`."""
        free = self._free.get((numel, like.dtype))
        if free:
            return free.pop()
        with torch.inference_mode(False):  # it outlives the mode that first asked for it
            return torch.empty(numel, dtype=like.dtype, device=like.device)

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Take lent buffers back; nothing in flight may still use them."""
        for buffer in buffers:
            self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)


def ordered_sum(parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """Set `out` to scale * (((parts[0] + parts[1]) + parts[2]) + ...); it aliases none of them."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
    if scale != 1.0:
        out.mul_(scale)


def all_reduce_bytes(buf: Tensor, rank: int, size: int) -> int:
    """Return what `rank` sends: the slices of the others, then its own to each of them.

    On equal slices this is 2 * (size - 1) / size of the buffer, whatever the algorithm.
    """
    numel, longer = divmod(buf.numel(), size)
    own = numel + (rank < longer)
    return (buf.numel() - own + own * (size - 1)) * buf.element_size()


class GlooAxis(Axis):
    """An axis of processes joined by gloo: one group for gathers, one for reductions."""

    def __init__(
        self, rank: int, size: int, gathers: Any, reduces: Any, lane: Lane, algorithm: Algorithm
    ) -> None:
        super().__init__(rank, size)
        self._gathers, self._reduces = gathers, reduces
        # Straight to the backend: torch.distributed's wrappers cost as much as the call itself.
        self._gather_wire = compat.group_backend(gathers, torch.device("cpu"))
        self._reduce_wire = compat.group_backend(reduces, torch.device("cpu"))
        self._peers = [(rank + step) % size for step in range(1, size)]
        self._lane = lane
        self._algorithm = algorithm
        self._scratch = Scratch()

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "all-gather") -> Work:
        size, numel = self.size, shard.numel()
        assert out.numel() == numel * size, f"{label}: {out.numel()} != {size} * {numel}"
        self._lane.count("all_gather", shard.nbytes * (size - 1))
        if self._algorithm("all_gather", out.nbytes, size) == "native":
            return Flight(self._lane, label, [compat.all_gather_flat(self._gathers, out, shard)])
        slices = out.view(size, numel).unbind(0)
        handles = self._exchange(self._gather_wire, [shard] * size, slices)
        mine = slices[self.rank]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        return Flight(self._lane, label, handles)

    def reduce_scatter(
        self, out: Tensor, full: Tensor, scale: float, label: str = "reduce-scatter"
    ) -> Work:
        size, numel = self.size, out.numel()
        assert full.numel() == numel * size, f"{label}: {full.numel()} != {size} * {numel}"
        self._lane.count("reduce_scatter", out.nbytes * (size - 1))
        parts: list[Tensor]
        if self._algorithm("reduce_scatter", full.nbytes, size) == "native":
            lent = [self._scratch.take(size * numel, full)]
            parts = list(lent[0].view(size, numel).unbind(0))
            handles = [
                dist.all_to_all_single(lent[0], full, group=self._reduces, async_op=True)
            ]
        else:
            slices = full.view(size, numel).unbind(0)
            lent, parts = self._landing(slices[self.rank], numel)
            handles = self._exchange(self._reduce_wire, slices, parts)

        def finish() -> None:
            ordered_sum(parts, out, scale)
            self._scratch.give_back(lent)

        return Flight(self._lane, label, handles, finish)

    def all_reduce(self, buf: Tensor, scale: float = 1.0, label: str = "all-reduce") -> Work:
        if self.size > 2:
            return self._all_reduce_by_slices(buf, scale, label)
        # Two ranks swap whole buffers: the same bytes as by slices, and one round trip less.
        self._lane.count("all_reduce", all_reduce_bytes(buf, self.rank, self.size))
        lent, parts = self._landing(buf, buf.numel())
        handles = self._exchange(self._reduce_wire, [buf] * 2, parts)

        def finish() -> None:
            buf.add_(lent[0])  # a + b is b + a, bit for bit
            if scale != 1.0:
                buf.mul_(scale)
            self._scratch.give_back(lent)

        return Flight(self._lane, label, handles, finish)

    def _all_reduce_by_slices(self, buf: Tensor, scale: float, label: str) -> Work:
        """Each rank sums its own slice and sends it round: 2 * (size - 1) / size of the bytes."""
        slices = buf.tensor_split(self.size)
        mine = slices[self.rank]
        numel = mine.numel()
        self._lane.count("all_reduce", all_reduce_bytes(buf, self.rank, self.size))
        lent, parts = self._landing(mine, numel)
        handles = self._exchange(self._reduce_wire, slices, parts)

        def finish() -> None:
            total = self._scratch.take(numel, buf)
            ordered_sum(parts, total, scale)
            mine.copy_(total)
            round_trip = Flight(
                self._lane, label, self._exchange(self._reduce_wire, [total] * self.size, slices)
            )
            round_trip.wait()
            self._scratch.give_back([*lent, total])

        return Flight(self._lane, label, handles, finish)

    def broadcast(self, buf: Tensor, src: int = 0, label: str = "broadcast") -> Work:
        sends = buf.nbytes * (self.size - 1) if self.rank == src else 0
        self._lane.count("broadcast", sends)
        if self._algorithm("broadcast", buf.nbytes, self.size) == "native":
            handle = dist.broadcast(buf, group_src=src, group=self._reduces, async_op=True)
            return Flight(self._lane, label, [handle])
        wire, tag = self._reduce_wire, _tag(buf)
        if buf.numel() == 0:
            return DONE
        if self.rank == src:
            handles = [wire.send([buf], peer, tag) for peer in self._peers]
        else:
            handles = [wire.recv([buf], src, tag)]
        return Flight(self._lane, label, handles)

    def _landing(self, own: Tensor, numel: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return (lent buffers, one part a rank in rank order); this rank's part is `own`."""
        lent = [self._scratch.take(numel, own) for _ in self._peers]
        parts = list(lent)
        parts.insert(self.rank, own)
        return lent, parts

    def _exchange(
        self, wire: Any, sends: Sequence[Tensor], receives: Sequence[Tensor]
    ) -> list[Any]:
        """Post `receives[peer]` and `sends[peer]` for every peer, and return their handles."""
        handles = []
        for peer in self._peers:
            landing = receives[peer]
            if landing.numel():
                handles.append(wire.recv([landing], peer, _tag(landing)))
        for peer in self._peers:
            leaving = sends[peer]
            if leaving.numel():
                handles.append(wire.send([leaving], peer, _tag(leaving)))
        return handles


    def break_off(self) -> None:
        """End every wait on this axis, in this process, with an error; there is no way back.

        A receive that times out makes gloo close all connections of its group.
        """
        for wire in (self._gather_wire, self._reduce_wire):
            probe = wire.recv([torch.empty(1)], self._peers[0], _BREAK_TAG)
            with contextlib.suppress(RuntimeError):  # timing out is its purpose
                probe.wait(timedelta(milliseconds=1))


def _tag(message: Tensor) -> int:
    """Tag a message by its bytes: ranks out of step then wait, and are named, where messages of
    unequal length under one tag would make gloo abort the process."""
    return message.nbytes & _TAG_MASK


class NcclAxis(Axis):
    """An axis of CUDA devices joined by NCCL; each group runs on a stream of its own.

    `wait` makes the current stream wait for the transfer, never the host, and the groups hold
    their tensors until then, so buffers need no `record_stream`.
    """

    def __init__(self, rank: int, size: int, gathers: Any, reduces: Any, lane: Lane) -> None:
        super().__init__(rank, size)
        self._gathers, self._reduces = gathers, reduces
        self._lane = lane

    def break_off(self) -> None:
        """End what runs on this axis's streams; there is no way back."""
        for group in (self._gathers, self._reduces):
            compat.group_backend(group, torch.device("cuda")).abort()

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "all-gather") -> Work:
        self._lane.count("all_gather", shard.nbytes * (self.size - 1))
        return Flight(self._lane, label, [compat.all_gather_flat(self._gathers, out, shard)])

    def reduce_scatter(
        self, out: Tensor, full: Tensor, scale: float, label: str = "reduce-scatter"
    ) -> Work:
        self._lane.count("reduce_scatter", out.nbytes * (self.size - 1))
        handle = compat.reduce_scatter_flat(self._reduces, out, full)
        return Flight(self._lane, label, [handle], lambda: _scale(out, scale))

    def all_reduce(self, buf: Tensor, scale: float = 1.0, label: str = "all-reduce") -> Work:
        self._lane.count("all_reduce", all_reduce_bytes(buf, self.rank, self.size))
        handle = dist.all_reduce(buf, group=self._reduces, async_op=True)
        return Flight(self._lane, label, [handle], lambda: _scale(buf, scale))

    def broadcast(self, buf: Tensor, src: int = 0, label: str = "broadcast") -> Work:
        self._lane.count("broadcast", buf.nbytes if self.rank == src else 0)
        handle = dist.broadcast(buf, group_src=src, group=self._reduces, async_op=True)
        return Flight(self._lane, label, [handle])


def _scale(buf: Tensor, scale: float) -> None:
    if scale != 1.0:
        buf.mul_(scale)
