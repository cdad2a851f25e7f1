"""Shards that live off the device: copied to it for gathers, gradients copied back."""

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
    """The moves of one model's shards and reduced gradients between tiers, on one rank.

    `policy/shard_copies.py` decides what travels: the shard, a cast of it, or a copy that stays on
    the host. With `delayed` updates gathers read such a copy while the shard itself is updated.

    What an update leaves of a shard on NVMe goes into the copies that stay while it is in host
    memory anyway: nothing of it is read again.

    The host, which runs ahead of the device, waits at the end of every call for what still reads
    its memory or writes to it: behind a call everyone may write parameters and read gradients.
    A read from NVMe that fails on one of several ranks delivers NaN, and is told to all at the end.
    """

    def __init__(
        self, store: ShardStore, slots: SlotPool, host: HostTier, delayed: bool = False
    ) -> None:
        self._store, self._slots, self._host, self._delayed = store, slots, host, delayed
        self._sent_as = [shard_copies.sent_as(b, delayed) for b in store.layout.buckets]
        self._published: dict[int, int] = {}  # bucket -> how often
        self._updated: dict[int, int] = {}  # bucket on NVMe -> how often
        self._near: dict[int, Tensor] = {}  # bucket -> its shard's copy that stays on the device
        self._following: dict[int, Any] = {}  # bucket -> event of its last update's copy to there
        self._casts: dict[int, Tensor] = {}  # bucket -> its shard's copy in the compute format
        self._fresh: dict[int, Stamp] = {}  # bucket -> what its copy on the device was made of
        self._cast: dict[int, Stamp] = {}  # bucket -> what its copy on the host was made of
        self._landing: dict[int, Copy] = {}  # bucket -> its gradient's way to the host
        self._has_read = False  # any shard, in this call
        self._fault: NvmeError | None = None  # of such a read
        self._reading: dict[int, Copy] = {}  # bucket -> the last copy out of its shard
        if (nvme := store.homes.nvme) is not None and not delayed:
            nvme.on_update = weakref.WeakMethod(self.follow)

    # -- to the device ----------------------------------------------------------------------
    def reload(self, shard: Tensor, bucket: int, slot: int = -1) -> Copy:
        """Launch the copy of a bucket's shard into `slot`, in the compute format."""
        b = self._store.layout.buckets[bucket]
        out = self._slots.take(slot, shard.numel(), b.compute_dtype)
        return self._send(out, shard, bucket)

    def refresh(self, shard: Tensor, bucket: int) -> Copy | Flight:
        """Launch the copy of a shard to where it stays, if it changed since the last."""
        b = self._store.layout.buckets[bucket]
        near = self._near.get(bucket)
        if near is None:
            with torch.inference_mode(False):  # it outlives the mode that first asked for it
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
        """Copy a shard into this rank's slice of a resident copy, ahead of all later compute."""
        near = self._near.get(bucket)
        is_there = near is not None and near.data_ptr() == out.data_ptr()
        made_of = self._made_of(bucket)
        if is_there and not shard_copies.is_outdated(self._fresh.get(bucket), made_of):
            self._await_update(bucket)
            return out
        self._near[bucket], self._fresh[bucket] = out, made_of
        return self._send(out, shard, bucket).wait()

    def _await_update(self, bucket: int) -> None:
        """Let the compute launched from now on wait for what a bucket's last update sent."""
        self._host.join(H2D, self._following.pop(bucket, None))

    def _send(self, out: Tensor, shard: Tensor, bucket: int) -> Copy:
        copy = self._host.move(out, self._as_sent(shard, bucket), H2D, what=f"b{bucket}")
        self._reading[bucket] = copy
        return copy

    def read(self, shard: Tensor, bucket: int) -> Arrival:
        """Launch the read of a shard that lives on NVMe, into memory of the host."""
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
        """Return what went wrong in reads of this call; who asks tells the other ranks."""
        fault, self._fault, self._has_read = self._fault, None, False
        return fault

    def tell(self, what: str) -> None:
        """Let all ranks raise, at the end of a call, what went wrong in its reads on one.

        Raises:
            NvmeError: names rank, file, offset and bucket.
        """
        if self._has_read:
            tell(self._store.world, f"reads from NVMe of {what}", self.take_fault(), NvmeError)

    def _as_sent(self, shard: Tensor, bucket: int) -> Tensor:
        """Return the host's tensor that travels: the shard, or a copy in the compute format.

        Of what lives on NVMe and is gathered from the host, that copy is all that lies there.
        """
        b, sent_as = self._store.layout.buckets[bucket], self._sent_as[bucket]
        if sent_as is SentAs.SHARD:
            return shard
        stays = sent_as is SentAs.COPY
        cast = self._casts.get(bucket)
        if cast is not None and not self._is_cast_outdated(bucket):
            return cast
        if self._delayed:  # somebody else wrote: what is under way comes first
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
        """Return what changes whenever what gathers read of a bucket does."""
        return self._writes(), self._published.get(bucket, 0)

    def _made_of(self, bucket: int) -> Stamp:
        """Return what changes whenever a copy of this rank's shard is outdated.

        Of a shard on NVMe that is what others write and its own updates, which copies follow.
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
        """Count the writes after which copies are outdated: delayed updates are published."""
        return self._store.ledger.foreign_writes if self._delayed else self._store.epoch

    def publish(self, bucket: int) -> None:
        """Let gathers read, from the next one on, what a bucket's last update left."""
        self._published[bucket] = self._published.get(bucket, 0) + 1
        if (cast := self._casts.get(bucket)) is not None:
            self._host.settle_place(cast)
            with torch.no_grad():
                cast.copy_(self._store.shards[bucket])

    def follow(self, place: int, values: Tensor) -> None:
        """Put what an update leaves of a place on NVMe into the copies that stay and are current.

        place: the first of its buckets. values: its elements, in host memory that is lent out next.
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
                copy.wait()  # which lets go of the host's memory
                self._fresh[bucket] = self._made_of(bucket)

    def forget(self) -> None:
        """Take every copy that stays for outdated."""
        self._fresh.clear()
        self._cast.clear()

    # -- gradients --------------------------------------------------------------------------
    def offload_grad(self, reduced: Tensor, bucket: int, into: Tensor | None) -> Copy:
        """Launch the copy of a reduced slice to the host: into p.grad's memory, or beside it."""
        out = self._host.borrow(reduced, reduced.dtype) if into is None else into
        copy = self._landing[bucket] = self._host.move(out, reduced, D2H, what=f"b{bucket}")
        return copy

    # -- what the host waits for ------------------------------------------------------------
    def settle(self, bucket: int) -> None:
        """Wait until a bucket's gradient has arrived and its shard is read; both may be touched."""
        for under_way in (self._landing, self._reading):
            if (copy := under_way.pop(bucket, None)) is not None:
                self._host.settle(copy)

    def settle_all(self) -> None:
        """Wait for every copy: at the end of a call."""
        for bucket in {**self._landing, **self._reading}:
            self.settle(bucket)
