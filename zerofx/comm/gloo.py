"""The collectives between processes over gloo, or between the memories of one host's processes.

direct   one point-to-point message per pair of ranks, received in its final place; the default
native   one library call: all-gather, broadcast, or an all-to-all whose parts are then summed here
         (gloo's own reductions sum in another order, so they are not used; for the same reason
         there is no native all-reduce)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.comm.collectives import (
    Axis,
    GroupWork,
    Lane,
    Work,
    all_reduce_bytes,
    ordered_sum,
    receive_buffers,
)
from zerofx.comm.mail import MemoryWire, check_memory
from zerofx.compat.groups import all_gather_flat, group_backend
from zerofx.policy import exchange
from zerofx.policy.borrowing import Loan

_TAG_MASK = 0x3FFFFFFF  # gloo uses 31 bits as a message's tag
_BREAK_TAG = 0x7FFFFFFF

Algorithm = Callable[[str, int, int], str]
"""(kind, bytes of the full buffer, ranks of the axis) -> "direct" or "native"."""


def always_direct(kind: str, nbytes: int, ranks: int) -> str:
    """Choose the direct exchange for every collective."""
    return "direct"


class GlooAxis(Axis):
    """An axis of processes connected by gloo: one group for gathers, one for reductions.

    wires: carry the messages of direct exchanges in place of the groups, if all ranks are on one
        host: one for gathers, one for reductions.
    """

    def __init__(
        self, rank: int, size: int, gathers: Any, reduces: Any, lane: Lane, algorithm: Algorithm,
        elsewhere: frozenset[int] = frozenset(), wires: tuple[MemoryWire, MemoryWire] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rank, size, elsewhere)
        self._gathers, self._reduces = gathers, reduces
        # Call the backend directly: torch.distributed's wrappers cost as much as the call itself.
        host = torch.device("cpu")
        self._backends = group_backend(gathers, host), group_backend(reduces, host)
        found: tuple[Any, Any] = wires or self._backends
        self._gather_wire, self._reduce_wire = found
        self._peers = [(rank + step) % size for step in range(1, size)]
        self._lane = lane
        self._algorithm = algorithm
        self._scratch = receive_buffers(torch.device("cpu"))

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "all-gather") -> Work:
        size, numel = self.size, shard.numel()
        assert out.numel() == numel * size, f"{label}: {out.numel()} != {size} * {numel}"
        self._count_parts("all_gather", shard.nbytes)
        if self._algorithm("all_gather", out.nbytes, size) == "native":
            return GroupWork(self._lane, label, [all_gather_flat(self._gathers, out, shard)])
        slices = out.view(size, numel).unbind(0)
        handles = self._exchange(self._gather_wire, [shard] * size, slices, label)
        mine = slices[self.rank]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        return GroupWork(self._lane, label, handles)

    def reduce_scatter(
        self, out: Tensor, full: Tensor, scale: float, label: str = "reduce-scatter"
    ) -> Work:
        size, numel = self.size, out.numel()
        assert full.numel() == numel * size, f"{label}: {full.numel()} != {size} * {numel}"
        self._count_parts("reduce_scatter", out.nbytes)
        is_native = self._algorithm("reduce_scatter", full.nbytes, size) == "native"
        receives = exchange.reduce_scatter_receives(numel, size, is_native)
        loans = self._borrow(receives.at_launch, full.dtype)
        if is_native:
            landing = loans[0].buffer[: size * numel]
            parts = list(landing.view(size, numel).unbind(0))
            handles = [dist.all_to_all_single(landing, full, group=self._reduces, async_op=True)]
        else:
            slices = full.view(size, numel).unbind(0)
            parts = self._parts(loans, slices[self.rank], out)
            handles = self._exchange(self._reduce_wire, slices, parts, label)

        def finish() -> None:
            ordered_sum(parts, out, scale)
            self._scratch.give_back(loans)

        return GroupWork(self._lane, label, handles, finish)

    def all_reduce(
        self,
        buf: Tensor,
        scale: float = 1.0,
        label: str = "all-reduce",
        source: Tensor | None = None,
    ) -> Work:
        full = buf if source is None else source
        if self.size > 2:
            return self._all_reduce_by_slices(buf, full, scale, label)
        # Two ranks swap whole buffers: as many bytes as with slices, and one round trip less.
        sent = all_reduce_bytes(buf, self.rank, self.size)
        self._lane.count("all_reduce", sent, sent if self.elsewhere else 0)
        receives = exchange.all_reduce_receives(buf.numel(), self.rank, self.size)
        loans = self._borrow(receives.at_launch, buf.dtype)
        landing = loans[0].buffer[: buf.numel()]
        handles = self._exchange(self._reduce_wire, [full] * 2, [landing] * 2, label)

        def finish() -> None:
            ordered_sum([full, landing], buf, scale)  # a + b equals b + a, bit for bit
            self._scratch.give_back(loans)

        return GroupWork(self._lane, label, handles, finish)

    def _all_reduce_by_slices(self, buf: Tensor, full: Tensor, scale: float, label: str) -> Work:
        """Sum one slice per rank and send it to all: 2 * (size - 1) / size of the bytes."""
        given, slices = full.tensor_split(self.size), buf.tensor_split(self.size)
        mine = slices[self.rank]
        numel = mine.numel()
        across = sum(given[peer].nbytes + mine.nbytes for peer in self.elsewhere)
        self._lane.count("all_reduce", all_reduce_bytes(buf, self.rank, self.size), across)
        receives = exchange.all_reduce_receives(buf.numel(), self.rank, self.size)
        loans = self._borrow(receives.at_launch, buf.dtype)
        parts = self._parts(loans, given[self.rank])
        handles = self._exchange(self._reduce_wire, given, parts, label)

        def finish() -> None:
            more = self._borrow(receives.at_end, buf.dtype)
            total = more[0].buffer[:numel]
            ordered_sum(parts, total, scale)
            mine.copy_(total)
            totals = [total] * self.size
            handles = self._exchange(self._reduce_wire, totals, slices, label)
            GroupWork(self._lane, label, handles).wait()
            self._scratch.give_back([*loans, *more])

        return GroupWork(self._lane, label, handles, finish)

    def rest(self, frees: Callable[[int], bool]) -> None:
        self._scratch.rest(frees)

    def broadcast(self, buf: Tensor, src: int = 0, label: str = "broadcast") -> Work:
        is_source = self.rank == src
        self._count_parts("broadcast", buf.nbytes if is_source else 0)
        if self._algorithm("broadcast", buf.nbytes, self.size) == "native":
            handle = dist.broadcast(buf, group_src=src, group=self._reduces, async_op=True)
            return GroupWork(self._lane, label, [handle])
        nothing = buf.new_empty(0)
        sends = [buf if is_source else nothing] * self.size
        receives = [nothing] * self.size
        if not is_source:
            receives[src] = buf
        handles = self._exchange(self._reduce_wire, sends, receives, label)
        return GroupWork(self._lane, label, handles)

    def all_to_all(
        self, receives: Sequence[Tensor], sends: Sequence[Tensor], label: str = "all-to-all"
    ) -> Work:
        sent, across = (sum(sends[p].nbytes for p in to) for to in (self._peers, self.elsewhere))
        self._lane.count("all_to_all", sent, across)
        handles = self._exchange(self._reduce_wire, sends, receives, label)
        receives[self.rank].copy_(sends[self.rank])
        return GroupWork(self._lane, label, handles)

    def send(self, buf: Tensor, to: int, label: str = "send") -> Work:
        check_memory(buf)
        self._lane.count("send", buf.nbytes, buf.nbytes if to in self.elsewhere else 0)
        try:
            handle = self._gather_wire.send([buf], to, _tag(buf))
        except RuntimeError as error:  # the connection is closed already
            raise self._lane.watch.explain(0, label, error) from error
        return GroupWork(self._lane, label, [handle])

    def receive(self, buf: Tensor, source: int, label: str = "receive") -> Work:
        check_memory(buf)
        try:
            handle = self._gather_wire.recv([buf], source, _tag(buf))
        except RuntimeError as error:
            raise self._lane.watch.explain(0, label, error) from error
        return GroupWork(self._lane, label, [handle])

    def shift(self, landing: Tensor, leaving: Tensor, label: str = "shift") -> Work:
        check_memory(landing, leaving)
        is_across = (self.rank + 1) % self.size in self.elsewhere
        self._lane.count("send", leaving.nbytes, leaving.nbytes if is_across else 0)
        wire, tag = self._gather_wire, _tag(leaving)
        try:
            arrives = wire.recv([landing], (self.rank - 1) % self.size, tag)
            leaves = wire.send([leaving], (self.rank + 1) % self.size, tag)
        except RuntimeError as error:
            raise self._lane.watch.explain(0, label, error) from error
        return GroupWork(self._lane, label, [arrives, leaves])

    def _count_parts(self, kind: str, nbytes: int) -> None:
        """Count a collective in which this rank sends so many bytes to each other rank."""
        self._lane.count(kind, exchange.part_sent(nbytes, self.size), nbytes * len(self.elsewhere))

    def _borrow(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Loan[Tensor]]:
        return [self._scratch.borrow(numel, dtype) for numel in sizes]

    def _parts(
        self, loans: Sequence[Loan[Tensor]], own: Tensor, out: Tensor | None = None
    ) -> list[Tensor]:
        """Return each rank's part, in rank order; those of other ranks are receive buffers.

        out: the result of their sum, in which the first of these is received.
        """
        parts = [loan.buffer[: own.numel()] for loan in loans]
        if out is not None:
            parts.insert(0, out)
        parts.insert(self.rank, own)
        return parts

    def _exchange(
        self, wire: Any, sends: Sequence[Tensor], receives: Sequence[Tensor], label: str
    ) -> list[Any]:
        """Post `receives[peer]` and `sends[peer]` for every peer, and return their handles."""
        handles = []
        check_memory(*(buffers[peer] for peer in self._peers for buffers in (receives, sends)))
        try:
            for peer in self._peers:
                landing = receives[peer]
                if landing.numel():
                    handles.append(wire.recv([landing], peer, _tag(landing)))
            for peer in self._peers:
                leaving = sends[peer]
                if leaving.numel():
                    handles.append(wire.send([leaving], peer, _tag(leaving)))
        except RuntimeError as error:  # the connection is already closed
            raise self._lane.watch.explain(0, label, error) from error
        except BaseException as error:  # Ctrl-C: a part of it has been launched, which is not known
            if isinstance(wire, MemoryWire):
                wire.cut(error)
            raise
        return handles

    def break_off(self) -> None:
        """End every wait on this axis, in this process, with an error; this is final.

        A receive that times out makes gloo close all connections of its group.
        """
        for wire in self._backends:
            with contextlib.suppress(RuntimeError):  # it must time out, or is closed already
                probe = wire.recv([torch.empty(1)], self._peers[0], _BREAK_TAG)
                probe.wait(timedelta(milliseconds=1))


def _tag(message: Tensor) -> int:
    """Return the tag of a message: its number of bytes.

    Ranks that are out of step then wait and are named. With equal tags, messages of unequal length
    would make gloo abort the process.
    """
    return message.nbytes & _TAG_MASK
