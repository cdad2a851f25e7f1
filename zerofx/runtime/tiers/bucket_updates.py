"""Updates of buckets inside backward: where they stand, beside it on a thread, or one step late."""

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
    """Lets the optimizers update buckets whose gradients have been stored, and frees these.

    What lives on the host is updated on a thread beside the rest of backward, which ends with it;
    with `delayed`, beside the next step up to that bucket's next gradient: gathers read meanwhile
    what the update before it left.
    """

    def __init__(self, store: ShardStore, away: AwayShards, delayed: bool) -> None:
        self._store, self._away, self._delayed = store, away, delayed
        self._pending: HostUpdates = store.ledger.pending
        self._stored: dict[int, frozenset[str]] = {}  # bucket -> whose gradients wait for an update
        self._fault: NvmeError | None = None  # of an update of this backward, told at its end

    def begin(self) -> None:
        """Check, before anything is launched, that a backward may update."""
        self._store.grads.begin_updates()

    def prepare(self, bucket: int) -> None:
        """Make ready for a bucket's gradient, which is about to be reduced."""
        if self._store.updates is None:
            return
        with self._held():
            self._pending.join(bucket)  # of the last step, whose gradient lies where the new will
            self._store.grads.prepare_update(bucket)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Keep a fault of the disk for the end of backward, to which all ranks come together."""
        try:
            yield
        except NvmeError as error:
            self._fault = self._fault or error

    def note(self, bucket: int, names: frozenset[str]) -> None:
        """Note that gradients of these parameters of a bucket have been stored."""
        self._stored[bucket] = names

    def update(self, shard: Tensor, bucket: int) -> None:
        """Let the optimizers update a bucket's shard, and free its gradients."""
        names = self._stored.pop(bucket, None)
        if names is None:  # this backward runs for inputs alone
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
        """Take a bucket's update, for whose states there may be no room: then it has none."""
        try:
            return self._store.grads.take_update(bucket, names)
        except BaseException:
            self._store.grads.drop(bucket)
            raise

    def _settled(self, bucket: int, update: Callable[[], None]) -> None:
        """Run an update whose gradient may still be on its way to the host."""
        self._away.settle(bucket)
        update()

    def finish(self, is_whole: bool) -> None:
        """End a backward. is_whole: it has reduced and updated all that it will.

        Raises:
            NvmeError: an update failed, on this rank or another; names file, offset and bucket.
        """
        self._stored.clear()
        if is_whole and self._store.updates is not None:
            if not self._delayed:
                with self._held():
                    self._pending.join()
            self._store.homes.drop_early()
            # updates with what a failed read delivered have spoilt the parameters as well
            fault, self._fault = self._away.take_fault() or self._fault, None
            if self._store.homes.nvme is not None:
                self._tell(fault)
            self._store.updates.end()

    def _tell(self, fault: NvmeError | None) -> None:
        """Let all ranks raise what went wrong on one."""
        try:
            tell(self._store.world, "updates over NVMe inside backward", fault, NvmeError)
        except NvmeError as error:
            self._store.ledger.half_made = str(error)
            raise

    def abandon(self) -> None:
        """Forget what waited for an update that did not come."""
        if self._store.updates is not None:
            self._pending.drain()
            self._store.updates.abandon()
            for bucket in self._stored:
                self._store.grads.drop(bucket)
        self._stored.clear()
        self._fault = None
