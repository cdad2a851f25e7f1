"""Shards off the device in the oracle: out of reach for all but the ops that move them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from oracle_exchange import Delivery
from oracle_memory import Memory, OracleError, garbage, poison
from torch import Tensor


@dataclass(eq=False)
class Far:
    """A shard, or a gradient, that lies off the device: a handle that no operator takes."""

    bucket: int
    content: Tensor


@dataclass(eq=False)
class Staged:
    """A shard that was read from NVMe to the host: a handle that only its reload takes."""

    bucket: int
    content: Tensor


@dataclass(eq=False)
class Move:
    """A copy under way. `land` is given what was read, and returns what the wait delivers.

    Early, it reads and writes at its launch, late at its wait.
    """

    source: Tensor
    land: Callable[[Tensor], Any]
    read: Tensor | None = None
    arrived: Any = None
    is_over: bool = False

    def send(self) -> None:
        if self.read is None:
            self.read = self.source.clone()

    def arrive(self) -> None:
        self.send()
        if self.arrived is None:
            self.arrived = self.land(self.read)  # type: ignore[arg-type]


@dataclass
class Shards:
    """One rank's slices that live off the device, and their copies and gradients on the way.

    far: bucket -> its handle, for buckets whose moves are in the program. Where they are not yet,
    a slice is read where it lies, as if it were on the device. stays: those of which a copy is to
    stay on the device: they are refreshed there, the others are reloaded. stored: those that are
    on NVMe, and read to the host before that.
    """

    memory: Memory
    delivery: Delivery
    far: Mapping[int, Far] = field(default_factory=dict)
    stays: Collection[int] = ()
    stored: Collection[int] = ()
    _near: list[tuple[Tensor, int]] = field(default_factory=list)  # delivered in this call
    _staying: dict[int, Tensor] = field(default_factory=dict)  # bucket -> its copy on the device
    _fresh: dict[int, int] = field(default_factory=dict)  # bucket -> version that this copy has
    _under_way: list[Move] = field(default_factory=list)
    _arrived: list[Far] = field(default_factory=list)  # gradients that are not stored yet

    # -- to the device ----------------------------------------------------------------------
    def read(self, bucket: int) -> Move:
        """Read a slice from NVMe to the host."""
        if bucket not in self.stored:
            raise OracleError(f"the shard of bucket {bucket} is not on NVMe")
        return self._launch(Move(self.far[bucket].content, lambda read: Staged(bucket, read)))

    def reload(self, far: Far | Staged, slot: int, numel: int, dtype: Any) -> Move:
        """Copy a slice into a place, whose last tenant is gone from the launch on."""
        bucket = far.bucket
        self._far(bucket, stays=False)
        if isinstance(far, Staged) != (bucket in self.stored):
            raise OracleError(f"a reload of bucket {bucket}, which has not been read from NVMe")
        dest = self.memory.place(slot, numel, dtype)

        def land(read: Tensor) -> Tensor:
            self.memory.own(dest)
            return self._deliver(bucket, dest.copy_(read))

        return self._launch(Move(far.content, land))

    def refresh(self, bucket: int, numel: int, dtype: Any) -> Move:
        """Copy a slice to where it stays between calls, unless it has not changed since."""
        shard = self._far(bucket, stays=True).content
        dest = self._staying.setdefault(bucket, garbage(numel, dtype))
        is_fresh = self._fresh.get(bucket) == shard._version
        self._fresh[bucket] = shard._version

        def land(read: Tensor) -> Tensor:
            return self._deliver(bucket, dest if is_fresh else dest.copy_(read))

        return self._launch(Move(shard, land))

    def _far(self, bucket: int, stays: bool | None = None) -> Far:
        if bucket not in self.far:
            raise OracleError(f"the shard of bucket {bucket} is on the device")
        if stays not in (None, bucket in self.stays):
            raise OracleError(f"the copy of bucket {bucket} stays: {bucket in self.stays}")
        return self.far[bucket]

    def _deliver(self, bucket: int, dest: Tensor) -> Tensor:
        self._near.append((dest, bucket))
        return dest

    def sent(self, bucket: int, shard: Any) -> Tensor:
        """Return what an all-gather of a bucket that lives off the device sends."""
        if not any(t is shard and b == bucket for t, b in self._near):
            raise OracleError(f"all-gather of bucket {bucket}, whose shard was not reloaded")
        return shard

    def check_release(self, full: Any) -> None:
        """Refuse to destroy a copy that stays: without an update, the next call finds it there."""
        if any(copy is full for copy in self._staying.values()):
            raise OracleError("a release of a copy that stays on the device")

    # -- back -------------------------------------------------------------------------------
    def offload(self, reduced: Tensor, bucket: int) -> Move:
        """Copy a reduced slice off the device; once that has ended, its memory is another's."""
        self._far(bucket)

        def land(read: Tensor) -> Far:
            self._arrived.append(grad := Far(bucket, read))
            return grad

        return self._launch(Move(reduced, land))

    def take(self, grad: Far, bucket: int) -> Tensor:
        """Return a gradient of this bucket that has arrived, once."""
        if not any(g is grad for g in self._arrived) or grad.bucket != bucket:
            raise OracleError(f"stored as bucket {bucket}'s: what is no gradient of it")
        self._arrived.remove(grad)
        return grad.content

    # -- the life of a copy -----------------------------------------------------------------
    def _launch(self, move: Move) -> Move:
        self._under_way.append(move)
        if self.delivery is not Delivery.LATE:
            move.send()
        if self.delivery is Delivery.EARLY:
            move.arrive()
        return move

    def finish(self, move: Move) -> Any:
        """Wait for a copy: hand out what arrived; what has left is garbage where it was."""
        if move.is_over:
            raise OracleError("a copy of a shard is waited for twice")
        move.is_over = True
        move.arrive()
        self._under_way.remove(move)
        if isinstance(move.arrived, Far):
            poison(move.source)
        return move.arrived

    def end_call(self) -> None:
        """Refuse the end of a call while a copy is under way; forget what does not outlive it."""
        if self._under_way:
            raise OracleError("a copy of a shard is never waited for")
        self._near.clear()
        self._arrived.clear()
