"""The engine: what a schedule calls. One per compiled model; every call of it is plain tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.compat.tensors import foreach_copy_, foreach_zero_
from zerofx.runtime.buffers import follow_rank_0
from zerofx.runtime.layout import Bucket
from zerofx.runtime.shard_unsynced import LocalSums
from zerofx.runtime.slots import SlotPool

if TYPE_CHECKING:
    from zerofx.runtime.shards import ShardStore


def _label(verb: str, bucket: Bucket) -> str:
    """Name a collective for the watchdog: its bucket's units and its first parameters."""
    names = ", ".join(bucket.names[:3]) + (", ..." if len(bucket.names) > 3 else "")
    return f"{verb} of bucket {bucket.index} ({bucket.label()}: {names})"


class Flight:
    """A launched transfer: `tensor` may be read only after `wait`."""

    __slots__ = ("bucket", "tensor", "work")

    def __init__(self, tensor: Tensor | None, work: object, bucket: int) -> None:
        self.tensor = tensor
        self.work = work
        self.bucket = bucket


class Engine:
    """Runs launches, waits, releases and gradient stores for one model on one rank.

    Gathered buckets and gradient buffers lie in slots that the schedule names; the views that take
    a buffer apart are made once for each (bucket, place) and reused every step.
    """

    def __init__(self, store: ShardStore, poison: bool = False) -> None:
        self.store = store
        self.world = store.world
        self.layout = store.layout
        self.slots = SlotPool(store.world.device, poison)
        self.no_sync = False
        self.discards = False  # backward runs for inputs only: no parameter gets a gradient
        self._resident: dict[int, Tensor] = {}
        self._fresh: dict[int, int] = {}  # bucket -> weight epoch of its resident copy
        self._views: dict[tuple, tuple[Tensor, ...]] = {}
        self._sums = LocalSums(store)
        self._packed: dict[int, tuple[tuple[int, ...], ...]] = {}  # bucket -> positions packed
        self._names: dict[tuple, frozenset[str]] = {}
        # bucket in flight -> (gradient shard, whether to add, names that no_sync summed)
        self._targets: dict[int, tuple[Tensor, bool, frozenset[str]]] = {}
        self._scratch: dict[int, Tensor] = {}
        self._forward_slots: set[int] = set()
        self._gather_labels = [_label("all-gather", b) for b in self.layout.buckets]
        self._reduce_labels = [_label("reduction", b) for b in self.layout.buckets]

    def reserve(self, sizes: Sequence[int], in_forward: Iterable[int] = ()) -> None:
        """Make room for a program's slots; those used `in_forward` stay between calls."""
        self._forward_slots.update(in_forward)
        if self.slots.reserve(sizes):
            self._views.clear()

    def rest(self) -> None:
        """End a backward: reduce what no_sync left, then free what only a backward needs."""
        if not (self.no_sync or self.discards):
            self._reduce_left()
        self.store.ledger.note_backward()
        self.slots.rest(self._forward_slots, self.layout.rest_bytes)
        self.world.rest(self.layout.rest_bytes)

    def drop_unsynced(self) -> None:
        """Forget gradients that were summed under no_sync and not yet reduced."""
        self._sums.drop()

    @torch.no_grad()
    def _reduce_left(self) -> None:
        """Reduce sums of no_sync whose buckets this backward's program has no gradient for."""
        left = self._sums.left()
        if not left:
            return
        try:
            self.world.agree("reduction of what no_sync summed", f"buckets={list(left)}")
            for bucket, scale in left.items():
                b = self.layout.buckets[bucket]
                buffer = torch.zeros(b.numel, dtype=b.reduce_dtype, device=self.world.device)
                self._packed[bucket] = ()
                self.store_grad(self.wait(self.reduce_scatter(buffer, bucket, scale)), bucket)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Forget everything in flight after an exception, so that another step can follow."""
        self.world.report_failure(repr(sys.exc_info()[1]))
        self.world.drain()
        self._packed.clear()
        self._targets.clear()

    # -- gathered parameters ----------------------------------------------------------------
    def all_gather(self, shard: Tensor, bucket: int, slot: int = -1) -> Flight:
        """Launch the all-gather of a bucket into `slot` (or memory of its own)."""
        b = self.layout.buckets[bucket]
        out = self.slots.take(slot, b.numel, b.compute_dtype)
        work = self.world.all_gather(out, self._cast(shard, out), self._gather_labels[bucket])
        return Flight(out, work, bucket)

    def _cast(self, shard: Tensor, full: Tensor) -> Tensor:
        """Return the shard in the format of `full`: cast into its own place there, if need be."""
        if shard.dtype is full.dtype:
            return shard
        mine = full.view(self.layout.shard_size, -1)[self.world.shard_rank]
        with torch.no_grad():
            return mine.copy_(shard)

    def refresh(self, shard: Tensor, bucket: int) -> Flight:
        """Launch the all-gather of a resident bucket if its parameters changed since the last."""
        b = self.layout.buckets[bucket]
        full = self._resident.get(bucket)
        if full is None:
            with torch.inference_mode(False):  # it outlives the mode that first asked for it
                full = torch.empty(b.numel, dtype=b.compute_dtype, device=self.world.device)
            self._resident[bucket] = full
        elif self._fresh[bucket] == self.store.epoch:
            return Flight(full, None, bucket)
        self._fresh[bucket] = self.store.epoch
        work = self.world.all_gather(full, self._cast(shard, full), self._gather_labels[bucket])
        return Flight(full, work, bucket)

    def resident(self, shard: Tensor, bucket: int) -> Tensor:
        """Return the resident copy that this call's forward refreshed."""
        return self._resident[bucket]

    def stale(self) -> list[int]:
        """Return the resident buckets that a forward would refresh now."""
        epoch = self.store.epoch
        return [b for b, fresh in self._fresh.items() if fresh != epoch]

    def forget_resident(self) -> None:
        """Force a refresh of every resident bucket at the next forward."""
        self._fresh = dict.fromkeys(self._fresh, -1)

    def wait(self, flight: Flight) -> Tensor | None:
        """Wait for a launch and return what it delivered (None for an unsynced reduction)."""
        if flight.work is not None:
            flight.work.wait()  # type: ignore[attr-defined]
            flight.work = None
        return flight.tensor

    def unpack(self, full: Tensor, bucket: int, params: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return views of a gathered bucket for the parameters at these positions in it."""
        key = (id(full), bucket, params)
        views = self._views.get(key)
        if views is None:
            members = [self.layout.buckets[bucket].params[i] for i in params]
            views = tuple(full[p.offset : p.end].view(p.shape) for p in members)
            if self.slots.owns(full) or full is self._resident.get(bucket):
                self._views[key] = views
        return views

    def release(self, full: Tensor, slot: int = -1) -> None:
        """Give a gathered bucket's slot back."""
        self.slots.give(slot, full)

    # -- gradients --------------------------------------------------------------------------
    def grad_buffer(self, bucket: int, zero: bool = False, slot: int = -1) -> Tensor:
        """Return the flat buffer into which a bucket's gradients are packed."""
        b = self.layout.buckets[bucket]
        buffer = self.slots.take(slot, b.numel, b.reduce_dtype)
        if zero:
            buffer.zero_()
        else:
            gaps = self._gaps(buffer, b)
            if gaps:
                foreach_zero_(gaps)
        self._packed[bucket] = ()
        return buffer

    def _gaps(self, buffer: Tensor, b: Bucket) -> tuple[Tensor, ...]:
        key = (id(buffer), b.index, "gaps")
        gaps = self._views.get(key)
        if gaps is None:
            ends = [0, *(p.end for p in b.params)]
            starts = [*(p.offset for p in b.params), b.numel]
            pairs = zip(ends, starts, strict=True)
            gaps = tuple(buffer[lo:hi] for lo, hi in pairs if hi > lo)
            if self.slots.owns(buffer):
                self._views[key] = gaps
        return gaps

    def pack(
        self, buffer: Tensor, bucket: int, params: tuple[int, ...], grads: Sequence[Tensor]
    ) -> None:
        """Copy gradients of the parameters at these positions into their bucket's buffer."""
        foreach_copy_(self.unpack(buffer, bucket, params), grads)
        self._packed[bucket] += (params,)

    def reduce_scatter(self, buffer: Tensor, bucket: int, scale: float) -> Flight:
        """Launch the reduction of a packed bucket: this rank's slice of the scaled sum."""
        if self.discards:
            return Flight(None, None, bucket)
        if self.no_sync:
            self._sums.add(bucket, buffer, self._packed_names(bucket), scale)
            return Flight(None, None, bucket)
        self._targets[bucket] = self._sums.settle(bucket, buffer)
        target, accumulate, _ = self._targets[bucket]
        is_target = not accumulate and target.dtype is buffer.dtype
        out = target if is_target else self._scratch_like(bucket, target, buffer.dtype)
        work = self.world.reduce_scatter(out, buffer, scale, self._reduce_labels[bucket])
        return Flight(out, work, bucket)

    def _scratch_like(self, bucket: int, target: Tensor, dtype: torch.dtype) -> Tensor:
        scratch = self._scratch.get(bucket)
        if scratch is None:
            with torch.inference_mode(False):
                scratch = self._scratch[bucket] = torch.empty_like(target, dtype=dtype)
        return scratch

    all_reduce = reduce_scatter  # one rank a shard axis: the slice is the whole bucket

    def store_grad(self, reduced: Tensor | None, bucket: int) -> None:
        """Assign or accumulate a reduced slice into the gradients that the user sees."""
        if reduced is None:
            return
        target, accumulate, summed = self._targets.pop(bucket)
        if accumulate:
            target.add_(reduced)
        elif reduced is not target:
            target.copy_(reduced)
        names = self._packed_names(bucket)
        self.store.publish_grads(bucket, names | summed if summed else names)

    def _packed_names(self, bucket: int) -> frozenset[str]:
        """Return the parameters whose gradients this backward has packed into the bucket."""
        key = (bucket, self._packed[bucket])
        names = self._names.get(key)
        if names is None:
            members = self.layout.buckets[bucket].params
            names = frozenset(members[i].name for some in key[1] for i in some)
            self._names[key] = names
        return names

    # -- buffers ----------------------------------------------------------------------------
    def sync_buffers(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return rank 0's values of these tensors on every rank; all travel in one message."""
        return follow_rank_0(self.world, values)
