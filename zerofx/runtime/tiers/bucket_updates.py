"""Bucket updates inside backward: inline, next to it on a thread, or one step late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from zerofx.comm.together import tell
from zerofx.errors import NvmeError
from zerofx.layout.tiers import Tier
from zerofx.policy import staging
from zerofx.runtime.tiers.host_updates import HostUpdates

if TYPE_CHECKING:
    from zerofx.runtime.store.shards import ShardStore
    from zerofx.runtime.tiers.away_shards import AwayShards


class BucketUpdates:
    """Lets the optimizers update buckets whose gradients have been stored, and frees the gradients.

    Parameters on the host are updated on a thread during the rest of backward, which waits for it
    at its end. With `delayed`, they are updated during the next step, up to that bucket's next
    gradient; until then, gathers read the result of the previous update.
    """

    def __init__(self, store: ShardStore, away: AwayShards, delayed: bool) -> None:
        self._store, self._away, self._delayed = store, away, delayed
        self._pending: HostUpdates = store.ledger.pending
        self._stored: dict[int, frozenset[str]] = {}  # bucket -> parameters with gradients to apply
        self._fault: NvmeError | None = None  # from an update of this backward, reported at its end

    def begin(self) -> None:
        """Check, before anything is launched, that a backward may update."""
        self._store.grads.begin_updates()

    def prepare(self, bucket: int) -> None:
        """Prepare for a bucket's gradient, which is about to be reduced."""
        if self._store.updates is None:
            return
        with self._held():
            # Of the last step, whose gradient memory is about to be reused.
            self._pending.join(bucket)
            self._store.grads.prepare_update(bucket)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Defer a disk fault to the end of backward, which all ranks reach together."""
        try:
            yield
        except NvmeError as error:
            self._fault = self._fault or error

    def note(self, bucket: int, names: frozenset[str]) -> None:
        """Record that gradients of these parameters of a bucket have been stored."""
        self._stored[bucket] = names

    def update(self, shard: Tensor, bucket: int) -> None:
        """Let the optimizers update a bucket's shard, and free its gradients."""
        names = self._stored.pop(bucket, None)
        if names is None:  # this backward runs for inputs only
            return
        home = self._store.layout.buckets[bucket].home
        is_beside = home is not Tier.DEVICE and self._store.grads.may_update_beside(names)
        if self._delayed and home is not Tier.DEVICE:
            self._away.settle(bucket)  # and with it every copy from the bucket's memory
            self._away.publish(bucket)
        if not is_beside:
            with self._held():
                self._pending.join()
            self._away.settle(bucket)
            run = self._take(bucket, names)
            with self._held():
                run()
            return
        with self._held():
            run = partial(self._settled, bucket, self._take(bucket, names))
            at_most = staging.IN_BACKWARD if home is Tier.NVME else None  # each holds host memory
            self._pending.launch(bucket, run, at_most)

    def _take(self, bucket: int, names: frozenset[str]) -> Callable[[], None]:
        """Take a bucket's update; without room for its states, take none and keep the fault."""
        try:
            return self._store.grads.take_update(bucket, names)
        except BaseException:
            self._store.grads.drop(bucket)
            raise

    def _settled(self, bucket: int, update: Callable[[], None]) -> None:
        """Run an update whose gradient may still be in flight to the host."""
        self._away.settle(bucket)
        update()

    def finish(self, is_whole: bool) -> None:
        """End a backward. is_whole: whether all of its reductions and updates have run.

        Raises:
            NvmeError: an update failed, on this rank or another; names file, offset and bucket.
        """
        self._stored.clear()
        if is_whole and self._store.updates is not None:
            if not self._delayed:
                with self._held():
                    self._pending.join()
            self._store.homes.drop_early()
            # updates that used the result of a failed read have corrupted the parameters as well
            fault, self._fault = self._away.take_fault() or self._fault, None
            if self._store.homes.nvme is not None:
                self._tell(fault)
            self._store.updates.end()

    def _tell(self, fault: NvmeError | None) -> None:
        """Raise on all ranks if an update failed on one of them."""
        try:
            tell(self._store.world, "updates over NVMe inside backward", fault, NvmeError)
        except NvmeError as error:
            self._store.ledger.half_made = str(error)
            raise

    def abandon(self) -> None:
        """Forget updates that were waiting and will not run."""
        if self._store.updates is not None:
            self._pending.drain()
            self._store.updates.abandon()
            for bucket in self._stored:
                self._store.grads.drop(bucket)
        self._stored.clear()
        self._fault = None
