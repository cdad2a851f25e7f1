"""The engine as graphs call it: the implementations of the zerofx ops, which take and give tensors.

An emitted schedule keeps a launched transfer as an object. A graph's node holds the tensor that the
transfer will fill, so the transfer is looked up by that tensor's address.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zerofx.runtime.schedule import InFlight
from zerofx.runtime.tiers.nvme_values import Stored

if TYPE_CHECKING:
    from zerofx.runtime.engine import Engine

_CURRENT = threading.local()
# the tensor that represents it in a graph -> a value on NVMe
_STORED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class _Launched(InFlight, Protocol):
    """A launch that knows the tensor it will fill, if there is one."""

    @property
    def tensor(self) -> Tensor | None: ...


def current_calls() -> GraphCalls:
    """Return the `GraphCalls` of the graph running on this thread (one per simulated rank)."""
    calls = getattr(_CURRENT, "calls", None)
    assert calls is not None, "a zerofx op ran outside `with GraphCalls(engine).active()`"
    return calls


class GraphCalls:
    """Implements the nodes of one run of a graph with the methods of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._pending: dict[int, list[_Launched]] = {}  # data_ptr -> launched flights
        self._filling: dict[int, int] = {}  # data_ptr of a gradient buffer -> bucket

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run the zerofx ops called on this thread inside the block."""
        before = getattr(_CURRENT, "calls", None)
        _CURRENT.calls = self
        try:
            yield
        finally:
            _CURRENT.calls = before

    def launch(self, flight: _Launched, key: Tensor) -> Tensor:
        """Register a launch under the tensor that it will fill, and return that tensor."""
        self._pending.setdefault(key.data_ptr(), []).append(flight)
        return key

    def all_gather(self, shard: Tensor, bucket: int, slot: int) -> Tensor:
        flight = self.engine.all_gather(shard, bucket, slot)
        assert flight.tensor is not None
        return self.launch(flight, flight.tensor)

    def refresh(self, shard: Tensor, bucket: int) -> Tensor:
        flight = self.engine.refresh(shard, bucket)
        assert flight.tensor is not None
        return self.launch(flight, flight.tensor)

    def reload_shard(self, shard: Tensor, bucket: int, slot: int) -> Tensor:
        return self.moved(self.engine.reload_shard(shard, bucket, slot))

    def refresh_shard(self, shard: Tensor, bucket: int) -> Tensor:
        return self.moved(self.engine.refresh_shard(shard, bucket))

    def read_shard(self, shard: Tensor, bucket: int) -> Tensor:
        return self.moved(self.engine.read_shard(shard, bucket))

    def offload_grad(self, reduced: Tensor, bucket: int) -> Tensor:
        gradients = self.engine.gradients
        is_kept = gradients.no_sync or gradients.discards
        flight = self.engine.offload_grad(None if is_kept else reduced, bucket)
        if flight.tensor is None:
            return torch.empty_like(reduced, device="cpu")
        return self.moved(flight)

    def moved(self, flight: _Launched) -> Tensor:
        """Register a launch that knows its own tensor."""
        assert flight.tensor is not None
        return self.launch(flight, flight.tensor)

    def resident(self, shard: Tensor, bucket: int) -> Tensor:
        return self.engine.resident(shard, bucket)

    def wait(self, launched: Tensor) -> Tensor:
        for flight in self._pending.pop(launched.data_ptr(), []):
            arrived = self.engine.wait(flight)
            if isinstance(arrived, Stored):
                _STORED[launched] = arrived
        return launched

    def release(self, full: Tensor, slot: int) -> None:
        self.engine.release(full, slot)

    def grad_buffer(self, bucket: int, zero: bool, slot: int) -> Tensor:
        buffer = self.engine.grad_buffer(bucket, zero, slot)
        self._filling[buffer.data_ptr()] = bucket
        return buffer

    def pack(self, buffer: Tensor, grads: Sequence[Tensor], offsets: Sequence[int]) -> Tensor:
        bucket = self._filling[buffer.data_ptr()]
        members = self.engine.layout.buckets[bucket].params
        places = {p.offset: i for i, p in enumerate(members)}
        self.engine.pack(buffer, bucket, tuple(places[o] for o in offsets), grads)
        return buffer

    def reduce(
        self, packed: Tensor, bucket: int, scale: float, indices: Sequence[Tensor] = ()
    ) -> Tensor:
        if indices:
            flight = self.engine.reduce_rows(packed, bucket, scale, indices)
        else:
            flight = self.engine.reduce_scatter(packed, bucket, scale)
        return self.reduced(flight, packed, bucket)

    def reduced(self, flight: _Launched, packed: Tensor, bucket: int) -> Tensor:
        """Return what stands for a launched reduction in a graph."""
        tensor = flight.tensor
        if tensor is None:  # summed locally, or discarded: there is nothing to store
            layout = self.engine.layout
            tensor = packed.new_empty(layout.shard_numel(layout.buckets[bucket]))
        return self.launch(flight, tensor)

    def store_grad(self, reduced: Tensor, bucket: int) -> Tensor:
        gradients = self.engine.gradients
        is_kept = gradients.no_sync or gradients.discards
        self.engine.store_grad(None if is_kept else reduced, bucket)
        own = self.engine.layout.buckets[bucket].dtype
        return reduced.to(own, copy=True)  # an op may not return its argument

    def update(self, stored: Tensor, shard: Tensor, bucket: int) -> None:
        self.engine.update(shard, bucket)

    def offload(self, x: Tensor) -> Tensor:
        flight = self.engine.offload(x)
        assert flight.tensor is not None
        return self.launch(flight, flight.tensor)

    def reload(self, host: Tensor) -> Tensor:
        flight = self.engine.reload(host)
        assert flight.tensor is not None
        return self.launch(flight, flight.tensor)

    def write_out(self, host: Tensor, name: str) -> Tensor:
        flight = self.engine.write_out(host, name)
        token = torch.empty(1, dtype=host.dtype).as_strided(host.shape, [0] * host.dim())
        return self.launch(flight, token)

    def read_back(self, stored: Tensor) -> Tensor:
        return self.moved(self.engine.read_back(_STORED[stored]))

    def sync_buffers(self, values: Sequence[Tensor]) -> list[Tensor]:
        return self.engine.sync_buffers(values)
