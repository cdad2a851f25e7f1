"""Collectives of 8-bit blocks: a bucket's parameters or gradients, coded while they travel.

A gather sends each rank's shard as codes and scales and decodes all of them at the wait, the rank's
own too, so that every rank computes with the same bits. A reduction sends every other rank the
codes of that rank's slice, in one all-to-all; the receiver decodes, sums in fp32 in rank order and
scales once. Its own contribution is added as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.comm.collectives import Axis, Work
from zerofx.kernels.blocks import add_decoded, decode, encode, message_bytes
from zerofx.runtime.schedule import Flight, label

if TYPE_CHECKING:
    from zerofx.runtime.engine import Engine


@dataclass(slots=True)
class CodedGather(Work):
    """Coded shards on their way: `messages` [ranks, bytes] become `out` [ranks * k] at the wait."""

    work: Work
    messages: Tensor | None
    out: Tensor

    def wait(self) -> None:
        messages, self.messages = self.messages, None
        if messages is None:
            return
        self.work.wait()
        for message, part in zip(messages, self.out.view(len(messages), -1), strict=True):
            decode(message, part)


def all_gather_blocks(engine: Engine, shard: Tensor, bucket: int, slot: int = -1) -> Flight:
    """Launch the all-gather of a bucket into `slot`, its shards coded as 8-bit blocks.

    Ranks that only take part in the collectives of an island send and receive whole shards. While
    ranks take turns, so does every rank.
    """
    if engine.turns.are_taken:
        return engine.all_gather(shard, bucket, slot)
    b, world = engine.layout.buckets[bucket], engine.world
    messages = _messages(engine.layout.shard_size, shard.numel(), shard.device)
    mine = messages[world.shard_rank]
    encode(shard.detach(), mine)
    work = world.all_gather(messages.view(-1), mine, label("all-gather of blocks", b))
    out = engine.slots.take(slot, b.numel, b.compute_dtype)
    return Flight(out, CodedGather(work, messages, out), bucket)


@dataclass(slots=True)
class CodedReduction(Work):
    """Coded slices on their way, summed into `out` [k] at the wait.

    messages [ranks, bytes]: what arrives. own [k]: this rank's contribution. sent: kept until all
    of it has left.
    """

    work: Work
    messages: Tensor | None
    sent: Tensor | None
    own: Tensor
    out: Tensor
    rank: int
    scale: float

    def wait(self) -> None:
        messages, self.messages = self.messages, None
        if messages is None:
            return
        self.work.wait()
        self.sent = None
        total = self.out if self.out.dtype is torch.float32 else self.out.float()
        with torch.no_grad():
            total.zero_()
            for rank, message in enumerate(messages):
                if rank == self.rank:
                    total.add_(self.own)
                else:
                    add_decoded(message, total)
            if self.scale != 1.0:
                total.mul_(self.scale)
            if total is not self.out:
                self.out.copy_(total)


def reduce_scatter_blocks(axis: Axis, out: Tensor, full: Tensor, scale: float, label: str) -> Work:
    """Launch the reduction of this rank's slice of `full` into `out`, in 8-bit blocks.

    Shapes: full [ranks * k], out [k]; `out` is no part of `full`.
    """
    sent, messages = (_messages(axis.size, out.numel(), out.device) for _ in range(2))
    slices = full.view(axis.size, -1)
    for rank in range(axis.size):
        if rank != axis.rank:
            encode(slices[rank], sent[rank])
    receives, sends = list(messages), list(sent)
    receives[axis.rank], sends[axis.rank] = messages[0, :0], sent[0, :0]  # nothing to itself
    work = axis.all_to_all(receives, sends, label)
    own = slices[axis.rank]
    return CodedReduction(work, messages, sent, own, out, axis.rank, scale)


def _messages(ranks: int, numel: int, device: torch.device) -> Tensor:
    return torch.empty(ranks, message_bytes(numel), dtype=torch.int8, device=device)
