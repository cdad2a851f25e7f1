"""The collectives between CUDA devices over NCCL: native calls, each group on its own stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.comm.collectives import Axis, GroupWork, Lane, Work, all_reduce_bytes
from zerofx.compat.groups import all_gather_flat, group_backend, reduce_scatter_flat
from zerofx.policy import exchange


class NcclAxis(Axis):
    """An axis of CUDA devices connected by NCCL; each group runs on its own stream.

    `wait` makes the current stream, but never the host, wait for the transfer. The groups hold
    their tensors until then, so buffers need no `record_stream`.
    """

    def __init__(
        self, rank: int, size: int, gathers: Any, reduces: Any, lane: Lane,
        elsewhere: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        super().__init__(rank, size, elsewhere)
        self._gathers, self._reduces = gathers, reduces
        self._lane = lane

    def _count(self, kind: str, nbytes: int) -> None:
        """Count a collective as in a ring in rank order, where all goes to the next rank."""
        is_across = (self.rank + 1) % self.size in self.elsewhere
        self._lane.count(kind, nbytes, nbytes if is_across else 0)

    def break_off(self) -> None:
        """Abort what runs on this axis's streams; this is final."""
        for group in (self._gathers, self._reduces):
            group_backend(group, torch.device("cuda")).abort()

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "all-gather") -> Work:
        self._count("all_gather", exchange.part_sent(shard.nbytes, self.size))
        return GroupWork(self._lane, label, [all_gather_flat(self._gathers, out, shard)])

    def reduce_scatter(
        self, out: Tensor, full: Tensor, scale: float, label: str = "reduce-scatter"
    ) -> Work:
        self._count("reduce_scatter", exchange.part_sent(out.nbytes, self.size))
        handle = reduce_scatter_flat(self._reduces, out, full)
        return GroupWork(self._lane, label, [handle], lambda: _scale(out, scale))

    def all_reduce(
        self,
        buf: Tensor,
        scale: float = 1.0,
        label: str = "all-reduce",
        source: Tensor | None = None,
    ) -> Work:
        if source is not None:
            buf.copy_(source)
        self._count("all_reduce", all_reduce_bytes(buf, self.rank, self.size))
        handle = dist.all_reduce(buf, group=self._reduces, async_op=True)
        return GroupWork(self._lane, label, [handle], lambda: _scale(buf, scale))

    def broadcast(self, buf: Tensor, src: int = 0, label: str = "broadcast") -> Work:
        self._count("broadcast", buf.nbytes if self.rank == src else 0)
        handle = dist.broadcast(buf, group_src=src, group=self._reduces, async_op=True)
        return GroupWork(self._lane, label, [handle])

    def all_to_all(
        self, receives: Sequence[Tensor], sends: Sequence[Tensor], label: str = "all-to-all"
    ) -> Work:
        sent = sum(t.nbytes for r, t in enumerate(sends) if r != self.rank)
        self._lane.count("all_to_all", sent, sum(sends[r].nbytes for r in self.elsewhere))
        handle = dist.all_to_all(list(receives), list(sends), group=self._reduces, async_op=True)
        return GroupWork(self._lane, label, [handle])

    def send(self, buf: Tensor, to: int, label: str = "send") -> Work:
        self._lane.count("send", buf.nbytes, buf.nbytes if to in self.elsewhere else 0)
        handle = dist.isend(buf, group=self._towards(to), group_dst=to)
        return GroupWork(self._lane, label, [handle])

    def receive(self, buf: Tensor, source: int, label: str = "receive") -> Work:
        group = self._reduces if source > self.rank else self._gathers
        handle = dist.irecv(buf, group=group, group_src=source)
        return GroupWork(self._lane, label, [handle])

    def shift(self, landing: Tensor, leaving: Tensor, label: str = "shift") -> Work:
        self._count("send", leaving.nbytes)
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        group = self._gathers
        moves = [
            dist.P2POp(dist.irecv, landing, group=group, group_peer=previous),
            dist.P2POp(dist.isend, leaving, group=group, group_peer=following),
        ]
        return GroupWork(self._lane, label, dist.batch_isend_irecv(moves))

    def _towards(self, rank: int) -> dist.ProcessGroup:
        """Return the group that what goes up the axis takes, or down: each way has its own stream.

        NCCL runs all transfers of two ranks in one group one after the other, and a receive that
        stands before a send would wait for what the other rank has queued behind its own.
        """
        return self._gathers if rank > self.rank else self._reduces


def _scale(buf: Tensor, scale: float) -> None:
    if scale != 1.0:
        buf.mul_(scale)
