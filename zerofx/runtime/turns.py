"""Turns: ranks whose code calls different programs launch each program's collectives together.

If a forward runs eagerly, it may call a program on one rank and not on another (layer drop, an
expert without tokens). So each rank announces the program it is about to run before it launches
anything. If the announcements are equal on all ranks, they run it. Otherwise the smallest text
takes its turn, and ranks that announced something else take part: they send their shards,
contribute zero gradients, and keep nothing. A rank at the end of its forward, or of its backward,
takes part until all ranks have arrived there.

An announcement contains everything that taking part needs: the collectives of the program, in
order. Before a backward, ranks also exchange which parameters they have gradients for. Those
parameters get a gradient on every rank, since each rank holds a part of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.compat.autograd import at_end_of_backward, backward_number
from zerofx.errors import DesyncError
from zerofx.layout.tiers import Tier
from zerofx.runtime.gradients import Asked

if TYPE_CHECKING:
    from zerofx.runtime.engine import Engine

GATHER, REFRESH, REDUCE, SYNC = "gather", "refresh", "reduce", "sync"
ADDED, RETURNED, DISCARDED = "added to p.grad", "returned", "of inputs only"
_MOST = 3000  # characters per announcement (the board's entries hold no more)
_LAST = "~end"  # sorts after every other text
_READY = f"{_LAST} ready"  # the same for a rank whose programs all have compiled regions


@dataclass(frozen=True)
class Share:
    """One collective of a program: its kind, its bucket, and the data needed to take part in it.

    positions: of the parameters whose gradients are reduced.
    scale: of the reduction.
    names: the buffers that follow rank 0.
    """

    kind: str
    bucket: int = -1
    positions: tuple[int, ...] = ()
    scale: float = 1.0
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        rest = {
            REDUCE: f":{self.scale!r}:{','.join(map(str, self.positions))}",
            SYNC: f":{','.join(self.names)}",
        }
        return f"{self.kind}:{self.bucket}{rest.get(self.kind, '')}"

    @classmethod
    def read(cls, text: str) -> Share:
        kind, bucket, *rest = text.split(":")
        if kind == REDUCE:
            positions = tuple(map(int, rest[1].split(",")))
            return cls(kind, int(bucket), positions, float(rest[0]))
        return cls(kind, int(bucket), names=tuple(rest[0].split(",")) if rest else ())


def _read(shares: str) -> list[Share]:
    return [Share.read(each) for each in shares.split(" ") if each]


class Turns:
    """The turns of one model on one rank.

    buffers: returns the model's buffers by name.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.buffers: Callable[[], dict[str, Tensor]] = dict
        self._depth = 0  # nesting depth of forwards that run eagerly
        self._count = 0  # programs run so far by any rank
        self._backward = -1  # the backward whose end ranks wait for
        # Under Plan(kernels="auto"): whether all programs can swap their regions, and the swap.
        self.is_ready: Callable[[], bool] = lambda: False
        self.swap: Callable[[], None] = lambda: None

    @property
    def are_taken(self) -> bool:
        """Whether programs called now may differ between ranks."""
        if self._engine.world.size == 1:
            return False
        return self._depth > 0 or (self._backward != -1 and self._backward == backward_number())

    @property
    def is_forward(self) -> bool:
        """Whether a forward that runs eagerly is in progress."""
        return self._depth > 0

    @property
    def is_outermost(self) -> bool:
        """Whether no other eager forward encloses this one."""
        return self._depth == 1

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Let ranks call different programs inside the block; all ranks reach its end together."""
        self._depth += 1
        try:
            yield
        except BaseException:
            self._depth -= 1
            raise
        self._depth -= 1
        if not self.are_taken and self._engine.world.size > 1:
            found = self._wait(_READY if self.is_ready() else _LAST)
            if found == {f"next={_READY}"}:
                self.swap()

    def forward(self, label: str, shares: str) -> int:
        """Wait for this program's turn, and return the number that its backward refers to."""
        self._wait(f"forward of {label}/{shares}")
        self._count += 1
        return self._count

    def share_buffers(self, label: str, names: tuple[str, ...]) -> None:
        """Copy rank 0's values of these buffers, which user code has updated, to every rank."""
        share = Share(SYNC, names=names)
        self.forward(f"buffers of {label}", str(share))
        self._sync(share)

    def begin_backward(self) -> None:
        """Let ranks run different programs until the end of the running backward."""
        task = backward_number()
        if self._engine.world.size > 1 and task not in (-1, self._backward):
            self._backward = task
            at_end_of_backward(self._end)

    def backward(
        self, number: int, label: str, shares: str, wish: str, given: frozenset[str] | None
    ) -> frozenset[str]:
        """Wait for this program's turn; return the parameters that get a gradient on any rank.

        wish: the purpose of the backward (`ADDED`, ...).
        given: the parameters that this rank has gradients for; None means all that the program
            reduces.
        """
        self.begin_backward()
        self._wait(f"{10**9 - number} backward of {label}/{shares}")
        return self._agree_on_wish(shares, wish, given)[1]

    def _agree_on_wish(
        self, shares: str, wish: str, given: frozenset[str] | None
    ) -> tuple[str, frozenset[str]]:
        """Return the purpose of a backward and its parameters, as agreed by the ranks that run it.

        wish: "" on a rank that only takes part.
        """
        names = self._reduced(shares)
        bits = sum(1 << i for i, n in enumerate(names) if given is None or n in given)
        said = self._engine.world.agree_but_for(
            "purpose of a backward", "", f"wish={wish}:{bits:x}"
        )
        found = [each.partition("=")[2].partition(":") for each in sorted(said)]
        wishes = {wish for wish, _, _ in found if wish}
        if len(wishes) > 1:
            raise DesyncError(
                f"ranks request different results of one backward: {sorted(wishes)}. Call backward "
                "alike on all ranks."
            )
        received = 0
        for _, _, each in found:
            received |= int(each, 16)
        return wishes.pop(), frozenset(n for i, n in enumerate(names) if received >> i & 1)

    def _reduced(self, shares: str) -> list[str]:
        """Return the parameters whose gradients a program reduces, in the order of its shares."""
        buckets = self._engine.layout.buckets
        return [
            buckets[share.bucket].params[i].owner
            for share in _read(shares)
            for i in share.positions
        ]

    def _end(self) -> None:
        """Take part until the backward of every rank has ended."""
        self._backward = -1
        self._wait(_LAST)

    def _wait(self, mine: str) -> set[str]:
        """Take part in other programs until all ranks announce this one, or it has its turn.

        At an end, return what all ranks announced.
        """
        if len(mine) > _MOST:
            raise DesyncError(
                f"{mine[:80]}...: it takes part in more collectives than ranks can announce to "
                "each other, so ranks cannot run different parts of this model. Raise "
                "Plan.bucket_bytes, so that there are fewer."
            )
        world = self._engine.world
        while True:
            found = world.agree_but_for("choice of the next program", "", f"next={mine}")
            turn = min(each.partition("=")[2] for each in found)
            if turn == mine or turn.startswith(_LAST):
                return found
            self._take_part(turn)

    # -- taking part ----------------------------------------------------------------------------
    @torch.no_grad()
    def _take_part(self, turn: str) -> None:
        """Launch the collectives of a program that other ranks run."""
        what, _, listed = turn.partition("/")
        is_backward = " backward of " in f" {what}"
        engine, gradients = self._engine, self._engine.gradients
        apart: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        before = gradients.discards, gradients.asked  # of a backward of this rank that is waiting
        if not is_backward:
            self._count += 1
        else:
            wish, received = self._agree_on_wish(listed, "", frozenset())
            if gradients.scaler is not None:
                gradients.scaler.begin({})
            gradients.discards = wish == DISCARDED
            gradients.asked = Asked(frozenset(), received)
            if wish == RETURNED:
                apart = gradients.apart(())
        try:
            parts = {
                GATHER: self._gather,
                REFRESH: self._refresh,
                REDUCE: self._reduce,
                SYNC: self._sync,
            }
            with apart:
                for share in _read(listed):
                    parts[share.kind](share)
                if is_backward:
                    engine.rest()
            if not is_backward:
                engine.away.settle_all()
                engine.away.tell(what)
        except BaseException as error:
            engine.abandon(error)
            raise
        finally:
            gradients.discards, gradients.asked = before

    def shard(self, bucket: int) -> Tensor:
        """Return this rank's shard of a bucket, on the device."""
        engine, shard = self._engine, self._engine.store.shards[bucket]
        place = engine.layout.buckets[bucket]
        if place.home is Tier.NVME:
            shard = engine.wait(engine.read_shard(shard, bucket))
        return engine.wait(engine.reload_shard(shard, bucket)) if place.is_away else shard

    def _gather(self, share: Share) -> None:
        engine = self._engine
        full = engine.wait(engine.all_gather(self.shard(share.bucket), share.bucket))
        engine.release(full)

    def _refresh(self, share: Share) -> None:
        engine, bucket = self._engine, share.bucket
        shard = engine.store.shards[bucket]
        if engine.layout.buckets[bucket].is_away:
            shard = engine.wait(engine.refresh_shard(shard, bucket))
        engine.wait(engine.refresh(shard, bucket))

    def _reduce(self, share: Share) -> None:
        engine, bucket = self._engine, share.bucket
        buffer = engine.grad_buffer(bucket, zero=True)
        engine.gradients.pack_nothing(bucket, share.positions)
        reduced = engine.wait(engine.reduce_scatter(buffer, bucket, share.scale))
        if engine.layout.buckets[bucket].is_away:
            reduced = engine.wait(engine.offload_grad(reduced, bucket))
        engine.store_grad(reduced, bucket)

    def _sync(self, share: Share) -> None:
        held = self.buffers()
        mine: Sequence[Tensor] = [held[name] for name in share.names]
        for buffer, value in zip(mine, self._engine.sync_buffers(mine), strict=True):
            buffer.copy_(value)
