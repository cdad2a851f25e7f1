"""The face of the engine: what an emitted `schedule.py` may call as `rt.<name>`.

A schedule only calls these. The engine answers them on a rank; `codegen.load_calls.Calls` answers
them with nodes of a graph when a schedule is read back; a recording times them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor


class InFlight(Protocol):
    """What a launch returns: `wait` ends the transfer and returns what it delivered."""

    def wait(self) -> Any: ...


class Schedule(Protocol):
    """The calls of a schedule, for one model on one rank.

    Buckets are named by their number, a slot by its number or -1 for memory of the call's own, and
    parameters by their positions in their bucket. A launch's result may be read after `wait` only.
    """

    @property
    def all_gather(self) -> Callable[..., InFlight]:
        """Launch the all-gather of a bucket: `(shard, bucket, slot=-1)`."""

    @property
    def refresh(self) -> Callable[..., InFlight]:
        """Launch the all-gather of a bucket that stays, if it is stale: `(shard, bucket)`."""

    @property
    def resident(self) -> Callable[..., Tensor]:
        """Return the copy that stays, as this step's forward left it: `(shard, bucket)`."""

    def wait(self, flight: Any) -> Any:
        """Wait for a launch and return what it delivered."""

    @property
    def unpack(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return views of parameters: `(full, bucket, positions)`."""

    def release(self, full: Tensor, slot: int = -1) -> None:
        """Give a gathered bucket's slot back."""

    @property
    def grad_buffer(self) -> Callable[..., Tensor]:
        """Return the flat buffer of a bucket's gradients: `(bucket, zero=False, slot=-1)`."""

    @property
    def pack(self) -> Callable[..., None]:
        """Copy gradients into their buffer: `(buffer, bucket, positions, grads)`."""

    @property
    def reduce_scatter(self) -> Callable[..., InFlight]:
        """Launch the reduction of a packed bucket: `(buffer, bucket, scale)`."""

    @property
    def all_reduce(self) -> Callable[..., InFlight]:
        """Launch it where nothing is sharded: `(buffer, bucket, scale)`."""

    @property
    def store_grad(self) -> Callable[..., None]:
        """Give a reduced slice to p.grad: `(reduced, bucket)`."""

    @property
    def update(self) -> Callable[..., None]:
        """Run the optimizer over a bucket's shard: `(shard, bucket)`."""

    @property
    def offload(self) -> Callable[..., InFlight]:
        """Launch a value's copy to the host: `(x)`."""

    @property
    def reload(self) -> Callable[..., InFlight]:
        """Launch its copy back: `(host)`."""

    @property
    def write_out(self) -> Callable[..., InFlight]:
        """Launch its way on to NVMe: `(host, name)`."""

    @property
    def read_back(self) -> Callable[..., InFlight]:
        """Launch its way back to the host: `(stored)`."""

    @property
    def reload_shard(self) -> Callable[..., InFlight]:
        """Launch a shard's copy to the device: `(shard, bucket, slot=-1)`."""

    @property
    def refresh_shard(self) -> Callable[..., InFlight]:
        """Launch it for a copy that stays, if it is stale: `(shard, bucket)`."""

    @property
    def read_shard(self) -> Callable[..., InFlight]:
        """Launch a shard's read from NVMe: `(shard, bucket)`."""

    @property
    def offload_grad(self) -> Callable[..., InFlight]:
        """Launch a reduced slice's copy to where its shard lives: `(reduced, bucket)`."""

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
