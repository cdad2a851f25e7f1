"""Shards off the device: copied to it for gathers, with their gradients copied back."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerofx.comm.together import tell
from zerofx.errors import NvmeError
from zerofx.layout.tiers import Tier
from zerofx.policy import shard_copies
from zerofx.policy.shard_copies import SentAs, Stamp
from zerofx.runtime.schedule import Flight
from zerofx.runtime.slots import SlotPool
from zerofx.runtime.tiers.arrival import Arrival
from zerofx.runtime.tiers.host_tier import D2H, H2D, Copy, HostTier

if TYPE_CHECKING:
    from zerofx.runtime.store.shards import ShardStore


class AwayShards:
    """Moves one model's shards and reduced gradients between tiers, on one rank.

    `policy/shard_copies.py` decides what is sent: the shard, a cast of it, or a copy that stays on
    the host. With `delayed` updates, gathers read such a copy while the shard itself is updated.

    An update of a shard on NVMe also writes its result into the resident copies while it is in host
    memory, so that nothing has to be read again.

    The host runs ahead of the device. At the end of every call, it waits for all copies that still
    read or write host memory, so that between calls anyone may write parameters and read gradients.
    A read from NVMe that fails on one of several ranks delivers NaN, and is reported to all of them
    at the end.
    """

    def __init__(
        self, store: ShardStore, slots: SlotPool, host: HostTier, delayed: bool = False
    ) -> None:
        self._store, self._slots, self._host, self._delayed = store, slots, host, delayed
        self._sent_as = [shard_copies.sent_as(b, delayed) for b in store.layout.buckets]
        self._published: dict[int, int] = {}  # bucket -> number of times
        self._updated: dict[int, int] = {}  # bucket on NVMe -> number of times
        self._near: dict[int, Tensor] = {}  # bucket -> resident copy of its shard on the device
        self._following: dict[int, Any] = {}  # bucket -> event of the last update's copy to it
        self._casts: dict[int, Tensor] = {}  # bucket -> copy of its shard in the compute dtype
        # Bucket -> version that its copy on the device was made from.
        self._fresh: dict[int, Stamp] = {}
        # Bucket -> version that its copy on the host was made from.
        self._cast: dict[int, Stamp] = {}
        self._landing: dict[int, Copy] = {}  # bucket -> copy of its gradient to the host
        self._has_read = False  # whether any shard was read in this call
        self._fault: NvmeError | None = None  # of such a read
        self._reading: dict[int, Copy] = {}  # bucket -> the last copy that reads its shard
        if (nvme := store.homes.nvme) is not None and not delayed:
            nvme.on_update = weakref.WeakMethod(self.follow)

    # -- to the device ----------------------------------------------------------------------
    def reload(self, shard: Tensor, bucket: int, slot: int = -1) -> Copy:
        """Launch the copy of a bucket's shard into `slot`, in the compute dtype."""
        b = self._store.layout.buckets[bucket]
        out = self._slots.take(slot, shard.numel(), b.compute_dtype)
        return self._send(out, shard, bucket)

    def refresh(self, shard: Tensor, bucket: int) -> Copy | Flight:
        """Launch the copy of a shard to its resident copy, if it changed since the last one."""
        b = self._store.layout.buckets[bucket]
        near = self._near.get(bucket)
        if near is None:
            with torch.inference_mode(False):  # the copy outlives the mode of its first use
                near = torch.empty(
                    shard.numel(), dtype=b.compute_dtype, device=self._store.world.device
                )
            self._near[bucket] = near
        elif not shard_copies.is_outdated(self._fresh.get(bucket), self._made_of(bucket)):
            self._await_update(bucket)
            return Flight(near, None, bucket)
        copy = self._send(near, shard, bucket)
        self._fresh[bucket] = self._made_of(bucket)
        return copy

    def fill(self, out: Tensor, shard: Tensor, bucket: int) -> Tensor:
        """Copy a shard into this rank's slice of a resident copy, before all later compute."""
        near = self._near.get(bucket)
        is_there = near is not None and near.data_ptr() == out.data_ptr()
        made_of = self._made_of(bucket)
        if is_there and not shard_copies.is_outdated(self._fresh.get(bucket), made_of):
            self._await_update(bucket)
            return out
        self._near[bucket], self._fresh[bucket] = out, made_of
        return self._send(out, shard, bucket).wait()

    def _await_update(self, bucket: int) -> None:
        """Make later compute wait for the copies launched by a bucket's last update."""
        self._host.join(H2D, self._following.pop(bucket, None))

    def _send(self, out: Tensor, shard: Tensor, bucket: int) -> Copy:
        copy = self._host.move(out, self._as_sent(shard, bucket), H2D, what=f"b{bucket}")
        self._reading[bucket] = copy
        return copy

    def read(self, shard: Tensor, bucket: int) -> Arrival:
        """Launch the read of a shard on NVMe into host memory."""
        nvme = self._store.homes.nvme
        assert nvme is not None, f"bucket {bucket} does not live on NVMe"
        self._has_read = True
        arrival = nvme.read_shard(bucket, shard.dtype)
        if self._store.world.size > 1:  # the others wait for this rank's part in a gather
            arrival.on_fault = self._note_fault
        return arrival

    def _note_fault(self, error: NvmeError) -> None:
        self._fault = self._fault or error

    def take_fault(self) -> NvmeError | None:
        """Return and clear the error of this call's reads; the caller tells the other ranks."""
        fault, self._fault, self._has_read = self._fault, None, False
        return fault

    def tell(self, what: str) -> None:
        """Raise on all ranks, at the end of a call, if a read failed on one of them.

        Raises:
            NvmeError: names rank, file, offset and bucket.
        """
        if self._has_read:
            tell(self._store.world, f"reads from NVMe of {what}", self.take_fault(), NvmeError)

    def _as_sent(self, shard: Tensor, bucket: int) -> Tensor:
        """Return the host tensor to send: the shard, or a copy in the compute dtype.

        For a shard on NVMe that is gathered from the host, this copy is all that the host holds.
        """
        b, sent_as = self._store.layout.buckets[bucket], self._sent_as[bucket]
        if sent_as is SentAs.SHARD:
            return shard
        stays = sent_as is SentAs.COPY
        cast = self._casts.get(bucket)
        if cast is not None and not self._is_cast_outdated(bucket):
            return cast
        if self._delayed:  # written by someone else: finish copies in flight first
            self._store.ledger.pending.join()
        if cast is None:
            with torch.inference_mode(False):  # as above
                cast = self._host.borrow(shard, b.compute_dtype)
            if stays:
                self._casts[bucket] = cast
        self._host.settle_place(cast)
        with torch.no_grad():
            cast.copy_(shard)
        if stays:
            self._cast[bucket] = self._cast_of(bucket)
        return cast

    def stamp(self, bucket: int) -> Stamp:
        """Return a stamp that changes whenever the values that gathers read of a bucket change."""
        return self._writes(), self._published.get(bucket, 0)

    def _made_of(self, bucket: int) -> Stamp:
        """Return a stamp that changes whenever a copy of this rank's shard becomes stale.

        For a shard on NVMe, it counts writes by others and its own updates, which the copies
        follow.
        """
        if self._delayed or self._store.layout.buckets[bucket].home is not Tier.NVME:
            return self.stamp(bucket)
        return self._store.ledger.foreign_writes, self._updated.get(bucket, 0)

    def _cast_of(self, bucket: int) -> Stamp:
        """Return the same for a copy on the host, into which delayed updates are published."""
        made_of, _ = stamp = self._made_of(bucket)
        return (made_of, 0) if self._delayed else stamp

    def _is_cast_outdated(self, bucket: int) -> bool:
        return shard_copies.is_outdated(self._cast.get(bucket), self._cast_of(bucket))

    def _writes(self) -> int:
        """Count the writes that make copies stale; delayed updates count once published."""
        return self._store.ledger.foreign_writes if self._delayed else self._store.epoch

    def publish(self, bucket: int) -> None:
        """Let gathers read the result of a bucket's last update, starting with the next gather."""
        self._published[bucket] = self._published.get(bucket, 0) + 1
        if (cast := self._casts.get(bucket)) is not None:
            self._host.settle_place(cast)
            with torch.no_grad():
                cast.copy_(self._store.shards[bucket])

    def follow(self, place: int, values: Tensor) -> None:
        """Write an update's result for a place on NVMe into the current resident copies.

        place: the first of its buckets.
        values: its elements, in host memory that will be reused.
        """
        layout = self._store.layout
        for b in layout.blocks[layout.block_of[place]]:
            mine, bucket = layout.part(values, b.index), b.index
            cast, near = self._casts.get(bucket), self._near.get(bucket)
            has_cast = cast is not None and not self._is_cast_outdated(bucket)
            has_near = near is not None and not shard_copies.is_outdated(
                self._fresh.get(bucket), self._made_of(bucket)
            )
            self._updated[bucket] = self._updated.get(bucket, 0) + 1
            if cast is not None and has_cast:
                self._host.settle_place(cast)
                cast.copy_(mine)
                self._cast[bucket] = self._cast_of(bucket)
            if near is not None and has_near:
                lent = values
                if near.dtype is not mine.dtype:
                    lent = self._host.borrow(mine, near.dtype)
                    self._host.settle_place(lent)
                    mine = lent.copy_(mine)
                copy = self._host.move(near, mine, H2D, lent, f"b{bucket}")
                self._following[bucket] = copy.event
                copy.wait()  # which releases the host memory
                self._fresh[bucket] = self._made_of(bucket)

    def forget(self) -> None:
        """Mark every resident copy as stale."""
        self._fresh.clear()
        self._cast.clear()

    # -- gradients --------------------------------------------------------------------------
    def offload_grad(self, reduced: Tensor, bucket: int, into: Tensor | None) -> Copy:
        """Launch the copy of a reduced slice to the host: into p.grad's memory, or next to it."""
        out = self._host.borrow(reduced, reduced.dtype) if into is None else into
        copy = self._landing[bucket] = self._host.move(out, reduced, D2H, what=f"b{bucket}")
        return copy

    # -- waits on the host ------------------------------------------------------------------
    def settle(self, bucket: int) -> None:
        """Wait until a bucket's gradient has arrived and its shard is read; both may be touched."""
        for under_way in (self._landing, self._reading):
            if (copy := under_way.pop(bucket, None)) is not None:
                self._host.settle(copy)

    def settle_all(self) -> None:
        """Wait for every copy, at the end of a call."""
        for bucket in {**self._landing, **self._reading}:
            self.settle(bucket)
