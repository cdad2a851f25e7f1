"""Gradients of one model on one rank: flat shards, and the views or wrappers that show them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_

import torch
from torch import Tensor, nn

from zerofx.compat.optim import foreach_add_
from zerofx.compat.tensors import keep_version, require_grad, storage_uses
from zerofx.errors import GradientError
from zerofx.layout.tiers import Tier
from zerofx.policy import resting
from zerofx.runtime.tensors.piece import Ledger, ParameterPiece
from zerofx.runtime.tiers.homes import regrow, shrink


class GradShard:
    """The reduced gradient of one bucket on one rank, and the `p.grad` tensors that show it.

    `views[i]` becomes `params[i].grad`: a wrapper of a range of the flat shard, or a plain view of
    it if nothing is sharded.

    pieces: of the parameters.
    allocate: returns memory for the flat shard.
    sleep, wake: free it between steps while keeping its address, and make it usable again; None if
        it must not be freed.
    buckets: if several, they are the tiles of one parameter, whose gradients arrive one by one in
        each backward. The first decides for all whether they are added; after the last, p.grad is
        published.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        pieces: Sequence[ParameterPiece],
        allocate: Callable[[], Tensor],
        buckets: Sequence[int] = (),
        sleep: Callable[[Tensor], None] | None = shrink,
        wake: Callable[[Tensor], None] = regrow,
    ) -> None:
        self.params, self._pieces = params, pieces
        self._allocate, self._sleep, self._wake_up = allocate, sleep, wake
        self._buckets = buckets
        self._expected: set[int] = set()  # tiles whose gradients are still to come in this backward
        self._decided: tuple[Tensor, bool]
        self._asleep = False
        self._adopt(allocate())

    def _adopt(self, flat: Tensor) -> None:
        with torch.no_grad():
            self.flat = flat
            self.views = [p.show(p.within(flat)) for p in self._pieces]
            self._locals = [p.local(v) for p, v in zip(self._pieces, self.views, strict=True)]
        self._quiet = self._references()

    def _references(self) -> list[int]:
        """Return the reference counts of the views, their local tensors and their storage."""
        counts = [sys.getrefcount(v) for v in self.views]
        counts += [sys.getrefcount(t) for t in self._locals]
        counts.append(storage_uses(self.flat))
        return counts

    def _is_held(self) -> bool:
        """Whether anyone except us and `p.grad` still refers to a gradient of an earlier step.

        Views that currently are some p.grad are expected to have higher counts.
        """
        counts = self._references()
        num = len(self.views)
        if counts[-1] != self._quiet[-1]:
            return True
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            published = param.grad is view
            if not published and (
                counts[i] > self._quiet[i] or counts[num + i] > self._quiet[num + i]
            ):
                return True
        return False

    def rest(self) -> None:
        """Free the flat tensor's memory if no gradient is set or held elsewhere; the views stay."""
        if self._sleep is None or self._asleep or any(p.grad is not None for p in self.params):
            return
        if not self._is_held():  # evaluated before the storage object below adds a reference
            self._sleep(self.flat)
            self._asleep = True

    def _wake(self) -> bool:
        """Make the flat tensor's memory usable; return whether it was freed before."""
        was_asleep = self._asleep
        if was_asleep:
            self._wake_up(self.flat)
            self._asleep = False
        return was_asleep

    def drop(self) -> None:
        """Set every p.grad to None and free the flat's memory."""
        self.clear()
        self.rest()

    def clear(self) -> None:
        """Set every p.grad to None."""
        for param in self.params:
            param.grad = None

    def target(self, bucket: int) -> tuple[Tensor, bool]:
        """Return the flat shard to reduce into, and whether to add to its contents."""
        if len(self._buckets) <= 1:
            return self._target()
        if not self._expected:
            self._decided, self._expected = self._target(), {*self._buckets}
        assert bucket in self._expected, f"bucket {bucket} is reduced twice in one backward"
        return self._decided

    def abandon(self) -> None:
        """Forget the outstanding tiles: no more of them come in this backward."""
        self._expected.clear()

    def _target(self) -> tuple[Tensor, bool]:
        """Decide where all tiles are reduced into, and whether to add.

        If some p.grad are set and others are not, the ranges of the others are zeroed, so that
        adding is correct for all of them. So are those of p.grad that are the user's own tensors,
        to which `publish` adds: one tensor may be the p.grad of several parameters. Gradients of an
        earlier step that the user still holds are left alone.
        """
        was_free = self._wake()  # then it was not held, and nothing has shown it since
        grads = [p.grad for p in self.params]
        if all(map(is_, grads, self.views)):
            return self.flat, True
        if not any(g is not None for g in grads):
            del grads
            if not was_free and self._is_held():
                self._adopt(self._allocate())
            return self.flat, False
        if self._is_held():
            self._adopt(self._allocate())
        with torch.no_grad():
            for view, local, grad in zip(self.views, self._locals, grads, strict=True):
                if grad is not view:
                    local.zero_()
        return self.flat, True

    def publish(self, bucket: int, names: Collection[str] | None, all_names: Sequence[str]) -> None:
        """Set p.grad of every parameter among `names` that requires one, once all tiles are in.

        To a p.grad that the user assigned, the gradient is added in place.
        """
        self._expected.discard(bucket)
        if self._expected:
            return
        trained = require_grad(self.params)
        rows = zip(self.params, self._pieces, trained, self.views, all_names, strict=True)
        for param, piece, is_trained, view, name in rows:
            if is_trained and (names is None or name in names):
                before = param.grad
                if before is None:
                    piece.publish(param, view)
                elif before is not view:
                    with torch.no_grad():
                        piece.local(before).add_(piece.local(view))


class StoreGrads:
    """One flat gradient per block of buckets, allocated when its first gradient arrives.

    params, pieces: of the store, by canonical name.
    flats: the flat shard of each block.
    shards: the gradients, by block.
    """

    def __init__(
        self,
        ledger: Ledger,
        params: Mapping[str, nn.Parameter],
        pieces: Mapping[str, ParameterPiece],
        flats: Sequence[Tensor],
    ) -> None:
        self._ledger, self._layout, self._homes = ledger, ledger.layout, ledger.homes
        self._params, self._pieces, self._flats = params, pieces, flats
        self.shards: dict[int, GradShard] = {}
        self._handed: dict[int, nn.Parameter] = {}  # bucket -> one of those handed over
        self._keeps_memory = False

    def target(self, bucket: int) -> tuple[Tensor, bool]:
        """Return (flat tensor to receive the reduced gradient, whether to add to it).

        Ranges of parameters for which the program has no gradient must receive zeros.
        """
        flat, accumulate = self._shard(bucket).target(bucket)
        return self._layout.part(flat, bucket), accumulate

    def views(self, bucket: int) -> list[Tensor]:
        """Return what p.grad of the bucket's parameters shows, in order; none for a tiled one."""
        return self._shard(bucket).views

    def publish(self, bucket: int, names: Collection[str] | None = None) -> None:
        """Set p.grad of the bucket's parameters (those among `names`) that require one.

        The p.grad of a tiled parameter is set once the last tile's gradient has arrived.
        """
        self._shard(bucket).publish(bucket, names, self._layout.owners[self._block(bucket)])

    def take(
        self,
        bucket: int,
        positions: Sequence[int],
        grads: Sequence[Tensor],
        copied: Collection[int],
        names: Collection[str],
    ) -> None:
        """Make gradients of the parameters at these positions p.grad, or add them to it.

        copied: the positions in `grads` of those that share memory with another value.
        names: the parameters that get a gradient.
        """
        members, is_cut = self._layout.buckets[bucket].params, self._layout.is_cut
        before: list[Tensor] = []
        added: list[Tensor] = []
        holders: list[int] = []
        for number, (position, grad) in enumerate(zip(positions, grads, strict=True)):
            name = members[position].name  # it is no tile
            param = self._params[name]
            if name not in names or not param.requires_grad:
                continue
            piece, held = self._pieces[name], param.grad
            if held is not None:
                before.append(piece.local(held))
                added.append(grad.reshape(-1) if is_cut else grad)
                holders.append(id(held))
                continue
            if number in copied:
                grad = grad.clone(memory_format=torch.contiguous_format)
            piece.publish(param, piece.show(grad.view(-1)) if is_cut else grad)
        if len(set(holders)) < len(holders):  # one tensor is p.grad of several
            for held, grad in zip(before, added, strict=True):
                held.add_(grad)
        elif before:
            foreach_add_(before, added)
        self._handed[bucket] = self._params[members[positions[0]].name]

    def abandon(self) -> None:
        """Forget which tiles' gradients have arrived: the rest will not come."""
        for shard in self.shards.values():
            shard.abandon()

    def drop(self, bucket: int) -> None:
        """Free a bucket's gradients and set its p.grad to None."""
        self._shard(bucket).drop()

    @property
    def are_shown(self) -> bool:
        """Whether an earlier backward has left gradients; checks one parameter per bucket."""
        first = *(shard.params[0] for shard in self.shards.values()), *self._handed.values()
        return any(param.grad is not None for param in first)

    def keep_memory(self) -> None:
        """Free no gradient shard from now on, whether one is shown or not."""
        self._keeps_memory = True

    def rest(self) -> None:
        """Free gradient shards that no p.grad shows, according to `policy/resting.py`."""
        if self._ledger.updates is not None or self._keeps_memory:
            return  # freed by each update, or never
        for shard in self.shards.values():
            shard.rest()

    # -- updates inside backward ----------------------------------------------------------------
    def begin_updates(self) -> None:
        """Check that a backward may update parameters, if this backward does."""
        updates = self._ledger.updates
        if updates is None:
            return
        trained = [n for n, p in self._params.items() if p.requires_grad]
        updates.begin(trained)
        for name in trained:
            if self._params[name].grad is not None:
                raise GradientError(
                    f"{name}.grad was set by hand, but Plan(update='in-backward') updates with the "
                    "gradients of one backward only. Set it to None, or use Plan(update='step')."
                )

    def prepare_update(self, bucket: int) -> None:
        """Start bringing the data of a bucket's update into host memory, if it is on NVMe."""
        b = self._layout.buckets[bucket]
        if b.home is Tier.NVME:
            assert self._homes.nvme is not None
            self._homes.nvme.prefetch(bucket, b.dtype)

    def may_update_beside(self, names: Collection[str]) -> bool:
        """Return whether the updates of these parameters need nothing from the main thread."""
        updates = self._ledger.updates
        return updates is not None and not updates.communicates(names)

    def take_update(self, bucket: int, names: Collection[str]) -> Callable[[], None]:
        """Take a bucket's gradients, those of `names`, from its parameters.

        Returns:
            A function that lets the optimizers update the bucket with them, and then frees them.
        """
        updates = self._ledger.updates
        assert updates is not None
        trained = [n for n in names if self._params[n].requires_grad]
        update = updates.take(self._ledger, bucket, trained)
        shard, flat = self._shard(bucket), self._flats[self._block(bucket)]
        shard.clear()

        def run() -> None:
            with keep_version(flat):  # it detects the writes of others
                update()
            shard.rest()

        return run

    def _rests(self, shard: GradShard) -> Callable[[], None]:
        """Return a function that frees a shard that no p.grad shows, and keeps nothing alive."""
        held, us = weakref.ref(shard), weakref.ref(self)

        def rest() -> None:
            shard, grads = held(), us()
            if shard is not None and grads is not None and not grads._keeps_memory:
                shard.rest()

        return rest

    # -- a block's shard ------------------------------------------------------------------------
    def _block(self, bucket: int) -> int:
        return self._layout.block_of[bucket]

    def _shard(self, bucket: int) -> GradShard:
        block = self._block(bucket)
        shard = self.shards.get(block)
        if shard is None:
            names, members = self._layout.owners[block], self._layout.blocks[block]
            first = members[0]
            sleep, wake = self._homes.sleep_and_wake(first)
            in_backward = self._ledger.updates is not None
            is_freed = resting.frees_gradient(self._layout, first, in_backward)
            shard = GradShard(
                [self._params[n] for n in names],
                [self._pieces[n] for n in names],
                lambda: self._homes.gradient(first, self._layout.block_numel(members)),
                [b.index for b in members],
                sleep if is_freed else None,
                wake,
            )
            self.shards[block] = shard
            if self._ledger.updates is None:  # zero_grad comes to the last parameter last
                self._ledger.when_dropped[names[-1]] = self._rests(shard)
        return shard
