"""The face of the engine: what an emitted `schedule.py` may call as `rt.<name>`.

A schedule only calls these. The engine answers them on a rank; `codegen.load_calls.Calls` answers
them with nodes of a graph when a schedule is read back; a recording times them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from zerofx.comm.collectives import Work
from zerofx.layout.buckets import Bucket


class InFlight(Protocol):
    """What a launch returns: `wait` ends the transfer and returns what it delivered."""

    def wait(self) -> Any: ...


class Schedule(Protocol):
    """The calls of a schedule, for one model on one rank.

    Buckets are named by their number, a slot by its number or -1 for memory of the call's own, and
    parameters by their positions in their bucket. A launch's result may be read after `wait` only.
    """

    def all_gather(self, shard: Tensor, bucket: int, slot: int = -1) -> InFlight:
        """Launch the all-gather of a bucket into a slot."""

    def refresh(self, shard: Tensor, bucket: int) -> InFlight:
        """Launch the all-gather of a bucket that stays, if its copy is stale."""

    def resident(self, shard: Tensor, bucket: int) -> Tensor:
        """Return the copy that stays, as this step's forward left it."""

    def wait(self, flight: Any) -> Any:
        """Wait for a launch and return what it delivered."""

    def unpack(self, full: Tensor, bucket: int, positions: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return views of the parameters at these positions of a gathered bucket."""

    def release(self, full: Tensor, slot: int = -1) -> None:
        """Give a gathered bucket's slot back."""

    def grad_buffer(self, bucket: int, zero: bool = False, slot: int = -1) -> Tensor:
        """Return the flat buffer into which a bucket's gradients are packed."""

    def pack(
        self, buffer: Tensor, bucket: int, params: tuple[int, ...], grads: Sequence[Tensor]
    ) -> None:
        """Copy the gradients of the parameters at these positions into their buffer."""

    def reduce_scatter(self, buffer: Tensor, bucket: int, scale: float) -> InFlight:
        """Launch the reduction of a packed bucket: this rank's slice of the scaled sum."""

    def all_reduce(self, buffer: Tensor, bucket: int, scale: float) -> InFlight:
        """Launch it where nothing is sharded: the slice is the whole bucket."""

    def reduce_scatter_rows(
        self, buffer: Tensor, bucket: int, scale: float, indices: Sequence[Tensor]
    ) -> InFlight:
        """Launch the reduction of a table of which only these rows may be other than zero."""

    def all_reduce_rows(
        self, buffer: Tensor, bucket: int, scale: float, indices: Sequence[Tensor]
    ) -> InFlight:
        """Launch it where nothing is sharded."""

    def store_grad(self, reduced: Tensor | None, bucket: int) -> None:
        """Give a reduced slice to p.grad; None for one that no_sync puts off."""

    def update(self, shard: Tensor, bucket: int) -> None:
        """Run the optimizer over a bucket's shard, in place."""

    def offload(self, x: Tensor) -> InFlight:
        """Launch a value's copy to host memory."""

    def reload(self, host: Tensor) -> InFlight:
        """Launch its copy back to the device."""

    def write_out(self, host: Tensor, name: str) -> InFlight:
        """Launch the way of a value on the host on to NVMe."""

    def read_back(self, stored: Any) -> InFlight:
        """Launch the way of a value on NVMe back to the host."""

    def reload_shard(self, shard: Tensor, bucket: int, slot: int = -1) -> InFlight:
        """Launch a shard's copy to the device, into a slot."""

    def refresh_shard(self, shard: Tensor, bucket: int) -> InFlight:
        """Launch it for a copy that stays, if that is stale."""

    def read_shard(self, shard: Tensor, bucket: int) -> InFlight:
        """Launch a shard's read from NVMe into host memory."""

    def offload_grad(self, reduced: Tensor | None, bucket: int) -> InFlight:
        """Launch a reduced slice's copy to where its shard lives."""

    def sync_buffers(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return rank 0's values of these tensors on every rank."""


# -- methods of ops that are declared outside of zerofx --------------------------------------------
_ADDED: dict[str, Callable[..., Any]] = {}


def add_method(name: str, method: Callable[..., Any]) -> None:
    """Let every engine answer `rt.<name>(...)` with `method(engine, ...)`."""
    _ADDED[name] = method


def added_method(name: str) -> Callable[..., Any] | None:
    """Return the method that was added under a name."""
    return _ADDED.get(name)


# -- A collective of one bucket, on its way -------------------------------------------------------


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
        """Return what was delivered (None for a reduction that was put off)."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        tensor, self.tensor = self.tensor, None  # the schedule's name for this outlives it
        return tensor
