"""Schedule protocol: the calls that an emitted `schedule.py` may make as `rt.<name>`.

A schedule calls nothing else. The engine implements the calls on a rank. `codegen.load_calls.Calls`
turns them into graph nodes when a schedule is read back, and a recording times them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from zerofx.comm.collectives import Work
from zerofx.layout.buckets import Bucket


class InFlight(Protocol):
    """The result of a launch; `wait` ends the transfer and returns its result."""

    def wait(self) -> Any: ...


class Schedule(Protocol):
    """The calls of a schedule, for one model on one rank.

    A bucket is given by its number, a slot by its number (-1 allocates new memory), and parameters
    by their positions in their bucket. The result of a launch may be read only after `wait`.
    """

    def all_gather(self, shard: Tensor, bucket: int, slot: int = -1) -> InFlight:
        """Launch the all-gather of a bucket into a slot."""

    def refresh(self, shard: Tensor, bucket: int) -> InFlight:
        """Launch the all-gather of a resident bucket if its copy is stale."""

    def resident(self, shard: Tensor, bucket: int) -> Tensor:
        """Return the resident copy, as this step's forward left it."""

    def wait(self, flight: Any) -> Any:
        """Wait for a launch and return its result."""

    def unpack(self, full: Tensor, bucket: int, positions: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return views of the parameters at these positions of a gathered bucket."""

    def release(self, full: Tensor, slot: int = -1) -> None:
        """Return a gathered bucket's slot to the pool."""

    def free_slot(self, slot: int) -> None:
        """Free the memory of a slot that only backward uses, until it is next taken."""

    def grad_buffer(self, bucket: int, zero: bool = False, slot: int = -1) -> Tensor:
        """Return the flat buffer into which a bucket's gradients are packed."""

    def pack(
        self, buffer: Tensor, bucket: int, params: tuple[int, ...], grads: Sequence[Tensor]
    ) -> None:
        """Copy the gradients of the parameters at these positions into their buffer."""

    def reduce_scatter(self, buffer: Tensor, bucket: int, scale: float) -> InFlight:
        """Launch the reduction of a packed bucket: this rank's slice of the scaled sum."""

    def all_reduce(self, buffer: Tensor, bucket: int, scale: float) -> InFlight:
        """Launch the reduction of an unsharded bucket: the slice is the whole bucket."""

    def reduce_scatter_rows(
        self, buffer: Tensor, bucket: int, scale: float, indices: Sequence[Tensor]
    ) -> InFlight:
        """Launch the reduction of a table of which only these rows may be nonzero."""

    def all_reduce_rows(
        self, buffer: Tensor, bucket: int, scale: float, indices: Sequence[Tensor]
    ) -> InFlight:
        """Launch the reduction by rows of an unsharded table."""

    def store_grad(self, reduced: Tensor | None, bucket: int) -> None:
        """Store a reduced slice in p.grad; None for a reduction that no_sync postpones."""

    def hand_over(
        self,
        bucket: int,
        params: tuple[int, ...],
        grads: Sequence[Tensor],
        copied: tuple[int, ...] = (),
    ) -> None:
        """Make gradients that nothing reduces p.grad as they are; copy those that share memory."""

    def update(self, shard: Tensor, bucket: int) -> None:
        """Run the optimizer over a bucket's shard, in place."""

    def offload(self, x: Tensor) -> InFlight:
        """Launch the copy of a value to host memory."""

    def reload(self, host: Tensor) -> InFlight:
        """Launch the copy of an offloaded value back to the device."""

    def write_out(self, host: Tensor, name: str) -> InFlight:
        """Launch the write of a value in host memory to NVMe."""

    def read_back(self, stored: Any) -> InFlight:
        """Launch the read of a value on NVMe back into host memory."""

    def reload_shard(self, shard: Tensor, bucket: int, slot: int = -1) -> InFlight:
        """Launch the copy of a shard to the device, into a slot."""

    def refresh_shard(self, shard: Tensor, bucket: int) -> InFlight:
        """Launch the copy of a resident shard to the device, if its copy is stale."""

    def read_shard(self, shard: Tensor, bucket: int) -> InFlight:
        """Launch the read of a shard from NVMe into host memory."""

    def offload_grad(self, reduced: Tensor | None, bucket: int) -> InFlight:
        """Launch the copy of a reduced slice to the tier where its shard lives."""

    def sync_buffers(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return rank 0's values of these tensors on every rank."""


# -- methods of ops declared outside of zerofx --------------------------------------------
_ADDED: dict[str, Callable[..., Any]] = {}


def add_method(name: str, method: Callable[..., Any]) -> None:
    """Make every engine implement `rt.<name>(...)` as `method(engine, ...)`."""
    _ADDED[name] = method


def added_method(name: str) -> Callable[..., Any] | None:
    """Return the method that was added under this name, if any."""
    return _ADDED.get(name)


# -- A collective of one bucket, in flight - -------------------------------------------------------


def full_name(bucket: Bucket) -> str:
    """Name a bucket for errors: its units and its first parameters."""
    names = ", ".join(bucket.names[:3]) + (", ..." if len(bucket.names) > 3 else "")
    return f"bucket {bucket.index} ({bucket.label()}: {names})"


def label(verb: str, bucket: Bucket) -> str:
    """Name a collective for the watchdog."""
    return f"{verb} of {full_name(bucket)}"


class Flight:
    """A launched transfer: `tensor` may be read only after `wait`."""

    __slots__ = ("bucket", "tensor", "work")

    def __init__(self, tensor: Tensor | None, work: Work | None, bucket: int) -> None:
        self.tensor = tensor
        self.work = work
        self.bucket = bucket

    def wait(self) -> Tensor | None:
        """Wait, and return the result (None for a postponed reduction)."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        tensor, self.tensor = self.tensor, None  # the schedule's name for this outlives it
        return tensor
