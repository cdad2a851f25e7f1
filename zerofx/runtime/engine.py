"""Engine: the object that a schedule calls, one per compiled model; it takes plain tensors."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerofx.comm.meeting import BoundedStore
from zerofx.comm.world import World
from zerofx.compat.groups import default_store
from zerofx.errors import DesyncError, NvmeError
from zerofx.policy import resting, shard_copies
from zerofx.policy.shard_copies import NEVER, Stamp
from zerofx.runtime.buffers import follow_rank_0
from zerofx.runtime.capacity import Drops
from zerofx.runtime.gradients import Gradients
from zerofx.runtime.loss_scale import LossScaler
from zerofx.runtime.schedule import Flight, InFlight, Schedule, added_method, label
from zerofx.runtime.slots import SlotPool
from zerofx.runtime.tensors.piece import CastCopy
from zerofx.runtime.tiers.away_shards import AwayShards
from zerofx.runtime.tiers.bucket_updates import BucketUpdates
from zerofx.runtime.tiers.nvme_values import NvmeValues
from zerofx.runtime.turns import Turns
from zerofx.runtime.views import BucketViews

if TYPE_CHECKING:
    from zerofx.runtime.store.shards import ShardStore


log = logging.getLogger("zerofx")

CALLS_WITH_A_CHECK = 8  # of rank 0's, until it no longer waits for data rank 1's first
STORE_S = 10.0  # that a request to the store may take

Tally = Callable[[Any, Any, str], None]
"""Runs an executable on a call; the flag says whether to run forward or backward."""


_OF_ACCELERATE = (
    " If accelerate divides the samples: on CPUs it needs ACCELERATE_USE_CPU=1 in the environment, "
    "or Accelerator(cpu=True)."
)


class SamplesCheck:
    """Warns once if two data ranks train on the same samples, for want of a divided loader.

    Data rank 1 leaves a digest of its first batch in the store of the job, and rank 0 compares it
    with its own during its next calls. Nothing waits for it.
    """

    def __init__(self, world: World, number: int) -> None:
        is_one_of_two = world.data_size > 1 and world.data_rank < 2 and not world.others
        is_asked = world.data_rank == 1 or world.rank == 0
        self._calls_left = CALLS_WITH_A_CHECK if is_one_of_two and is_asked else 0
        self._world, self._key, self._own = world, f"zerofx/samples/{number}", b""

    def see(self, label: str, leaves: Sequence[Any]) -> None:
        """Take the inputs of a training call."""
        if not self._calls_left or not leaves:
            return
        self._calls_left -= 1
        is_first = not self._own
        if is_first:
            self._own = str([int(input_digest(leaf)) for leaf in leaves]).encode()
        with contextlib.suppress(DesyncError, RuntimeError):  # of the store: nothing depends on it
            store = BoundedStore(default_store(), STORE_S)
            if is_first:
                if self._world.data_rank == 1:
                    self._calls_left = 0
                    store.set(self._key, self._own.decode())
            elif store.check([self._key]):
                self._calls_left = 0
                if store.get(self._key) == self._own:
                    log.warning(
                        "%s: data ranks 0 and 1 began with the same samples, so that they compute "
                        "the same gradients. Give each rank its own: DistributedSampler(dataset, "
                        "num_replicas=model.zerofx.data_world, rank=model.zerofx.data_rank), or "
                        "another seed on each rank for what is drawn at random.%s",
                        label,
                        _OF_ACCELERATE if self._may_be_accelerate() else "",
                    )

    def _may_be_accelerate(self) -> bool:
        is_told = "ACCELERATE_USE_CPU" in os.environ
        return "accelerate" in sys.modules and self._world.device.type == "cpu" and not is_told


def input_digest(leaf: Any) -> Tensor:
    """Return a number that identifies an input, int64 []: a digest of its bytes and shape."""
    if not isinstance(leaf, Tensor):
        return torch.tensor(zlib.crc32(repr(leaf).encode()))
    flat = leaf.detach().cpu().contiguous().view(-1)
    if not flat.numel():
        return torch.tensor(zlib.crc32(str(tuple(leaf.shape)).encode()))
    held = flat.view(torch.uint8).numpy().tobytes()
    return torch.tensor(zlib.crc32(held, zlib.crc32(str(tuple(leaf.shape)).encode())))


class Engine:
    """Runs the launches, waits, releases and gradient stores of one model on one rank.

    Gathered buckets and gradient buffers are in slots, which the schedule names.
    """

    def __init__(
        self,
        store: ShardStore,
        scaler: LossScaler | None = None,
        poison: bool = False,
        delayed: bool = False,
    ) -> None:
        self.store = store
        self.world = store.world
        self.layout = store.layout
        self.slots = SlotPool(store.world.device, poison)
        self.views = BucketViews(store.layout, self._is_lasting)
        self.host = store.ledger.homes.host
        self.host.poison = poison
        self.values = NvmeValues(store.folder, store.world.rank, self.host)
        self.away = AwayShards(store, self.slots, self.host, delayed)
        store.ledger.is_delayed = delayed
        self.updates = BucketUpdates(store, self.away, delayed)
        self.gradients = Gradients(store, self.slots, self.views, scaler, self.away, self.updates)
        self.turns = Turns(self)
        self.drops = Drops()
        self.samples = SamplesCheck(store.world, store.ledger.number)
        self.tally: Tally | None = None  # notified of every forward and backward
        # Returns what to do where a compiled backward cannot be differentiated, for errors.
        self.double_backward: Callable[[], str] = str
        self.keeps_memory = False  # between calls too: CUDA graph recordings need fixed addresses
        self._resident: dict[int, Tensor] = {}
        self._fresh: dict[int, Stamp] = {}  # bucket -> version that its resident copy was made from
        self._forward_slots: set[int] = set()
        self._gather_labels = [label("all-gather", b) for b in self.layout.buckets]
        # Calls of a schedule that other objects implement, bound here to save an indirection.
        self.unpack = self.views.params
        self.grad_buffer = self.gradients.buffer
        self.pack = self.gradients.pack
        self.reduce_scatter = self.gradients.reduce
        self.all_reduce = self.gradients.reduce  # not sharded: the slice is the whole bucket
        self.reduce_scatter_rows = self.all_reduce_rows = self.reduce_rows
        self.store_grad = self.gradients.store
        self.hand_over = self.gradients.hand_over
        self.update = self.updates.update
        self.offload = self.host.offload
        self.reload = self.host.reload
        self.write_out = self.values.write_out
        self.read_back = self.values.read_back
        self.reload_shard = self.away.reload
        self.refresh_shard = self.away.refresh
        self.read_shard = self.away.read
        self.offload_grad = self.gradients.offload

    def reduce_rows(
        self, buffer: Tensor, bucket: int, scale: float, indices: Sequence[Tensor]
    ) -> Flight:
        """Launch the reduction of a packed table by rows, or as a whole if ranks take turns.

        While ranks take turns, a rank may take part in a program that it did not call. It then has
        no indices.
        """
        given = () if self.turns.are_taken else indices
        return self.gradients.reduce(buffer, bucket, scale, given)

    def __getattr__(self, name: str) -> Any:
        method = added_method(name)
        if method is None:
            raise AttributeError(f"the engine has no method {name!r}.")
        bound = self.__dict__[name] = partial(method, self)
        return bound

    def reserve(self, sizes: Sequence[int], in_forward: Iterable[int] = ()) -> None:
        """Allocate a program's slots; those used `in_forward` are kept between calls."""
        self._forward_slots.update(in_forward)
        if self.slots.reserve(sizes):
            self.views.clear()

    @property
    def forward_slots(self) -> frozenset[int]:
        """The slots that are kept between calls."""
        return frozenset(self._forward_slots)

    def reserve_values(self, sizes: Mapping[str, int], whose: str) -> None:
        """Reserve space on NVMe for the values that one call of a program keeps there, by name.

        Raises:
            NvmeError: there is too little space. The message has both numbers; other ranks are
                notified.
        """
        try:
            self.values.reserve(sizes, whose)
        except NvmeError as error:
            self.world.report_failure(repr(error))
            raise

    def forget_slots(self) -> None:
        """Free the memory of all programs' slots until they are reserved again."""
        self._forward_slots.clear()
        self.slots.clear()
        self.views.clear()

    def keep_memory(self) -> None:
        """Keep working memory at fixed addresses from now on, and share none of it between uses."""
        self.keeps_memory, self.gradients.lends = True, False
        self.store.grads.keep_memory()

    def rest(self, is_last: bool = True) -> None:
        """End a backward: settle its gradients, then free the memory that only a backward needs.

        is_last: whether this is the last micro-batch of the step.
        """
        try:
            self.gradients.finish()
            self.away.tell("backward")
            self.away.settle_all()
            self.store.homes.rest()
        except BaseException as error:
            self.abandon(error)
            raise
        if is_last:
            self.store.ledger.note_backward()
        self.rest_slots()
        if not self.keeps_memory:
            self.world.rest(self._frees)
            self.gradients.rest(self._frees)

    def rest_slots(self) -> None:
        """Free the slots that are empty until the next call, except those that are costly to take.

        Call it only after a call of a program.
        """
        if not self.keeps_memory:
            self.slots.rest(self._frees_slot)

    def pause(self, grads: list[Tensor]) -> list[Tensor]:
        """Hand the gradients of inputs out of a backward that pauses, and free its slots.

        The given list is emptied, since the frame of backward keeps it.
        """
        self.rest_slots()
        handed = [*grads]
        grads.clear()
        return handed

    def _frees(self, nbytes: int) -> bool:
        return resting.frees(self.layout, nbytes)

    def _frees_slot(self, slot: int, nbytes: int) -> bool:
        return resting.frees_slot(self.layout, slot, nbytes, self._forward_slots)

    def abandon(self, error: BaseException) -> None:
        """Forget all transfers in flight after an exception, so that another step can follow."""
        self.world.report_failure(repr(error))
        self.host.drain()
        self.values.drain()
        self.away.settle_all()
        self.away.take_fault()  # the exception takes precedence over the fault
        self.world.drain()
        self.gradients.abandon()

    # -- gathered parameters ----------------------------------------------------------------
    def all_gather(self, shard: Tensor, bucket: int, slot: int = -1) -> Flight:
        """Launch the all-gather of a bucket into `slot` (or into newly allocated memory)."""
        b = self.layout.buckets[bucket]
        out = self.slots.take(slot, b.numel, b.compute_dtype)
        work = self.world.all_gather(out, self.cast(shard, out), self._gather_labels[bucket])
        return Flight(out, work, bucket)

    def cast(self, shard: Tensor, full: Tensor) -> Tensor:
        """Return the shard in the dtype of `full`, cast into its own range there if necessary."""
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
            with torch.inference_mode(False):  # the copy outlives the calling mode
                full = torch.empty(b.numel, dtype=b.compute_dtype, device=self.world.device)
            self._resident[bucket] = full
        elif not shard_copies.is_outdated(self._fresh[bucket], self.away.stamp(bucket)):
            return Flight(full, None, bucket)
        mine = self._cast_resident(shard, full, bucket)
        self._fresh[bucket] = self.away.stamp(bucket)
        work = self.world.all_gather(full, mine, self._gather_labels[bucket])
        return Flight(full, work, bucket)

    def _cast_resident(self, shard: Tensor, full: Tensor, bucket: int) -> Tensor:
        """Return this rank's part to send: cast, unless the optimizer has already written it so."""
        b = self.layout.buckets[bucket]
        if b.is_away:
            mine = full.view(self.layout.shard_size, -1)[self.world.shard_rank]
            return self.away.fill(mine, shard, bucket)
        if not b.is_cast:
            return shard
        ledger = self.store.ledger
        copy = ledger.copies.get(bucket)
        if copy is None or copy.full is not full:
            copy = ledger.copies[bucket] = CastCopy(ledger, full, b)
        # by model.refresh(), for writes that zerofx cannot detect
        is_forced = self._fresh.get(bucket) == NEVER
        if copy.is_current and not is_forced:
            return copy.part(0, shard.numel())
        mine = self.cast(shard, full)
        copy.mark()
        return mine

    def resident(self, shard: Tensor, bucket: int) -> Tensor:
        """Return the resident copy that this call's forward has refreshed."""
        return self._resident[bucket]

    def stale(self) -> list[int]:
        """Return the resident buckets that a forward would refresh if it ran now."""
        return [
            b for b, made_of in self._fresh.items()
            if shard_copies.is_outdated(made_of, self.away.stamp(b))
        ]  # fmt: skip

    def forget(self, buckets: Iterable[int]) -> None:
        """Mark these resident buckets as stale, so that the next forward gathers them again."""
        self._fresh |= {b: NEVER for b in buckets if b in self._fresh}

    def forget_resident(self) -> None:
        """Mark every resident copy as stale, so that the next forward refreshes it."""
        self._fresh = dict.fromkeys(self._fresh, NEVER)
        self.away.forget()

    def _is_lasting(self, full: Tensor, bucket: int) -> bool:
        return (
            full is self.store.shards[bucket]
            or self.slots.owns(full)
            or full is self._resident.get(bucket)
        )

    def wait(self, flight: InFlight) -> Any:
        """Wait for a launch and return its result (None for an unsynced reduction)."""
        return flight.wait()

    def release(self, full: Tensor, slot: int = -1) -> None:
        """Return a gathered bucket's slot to the pool."""
        self.slots.give(slot, full)

    def free_slot(self, slot: int) -> None:
        """Free the memory of a slot that only backward uses, until it is next taken."""
        if not self.keeps_memory:
            self.slots.rest(lambda i, nbytes: i == slot and self._frees_slot(i, nbytes))

    # -- buffers ----------------------------------------------------------------------------
    def sync_buffers(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return rank 0's values of these tensors on every rank, sent as one message."""
        return follow_rank_0(self.world, values)


def _answers(engine: Engine) -> Schedule:
    """Let the type checker verify that an engine implements every call of a schedule."""
    return engine
