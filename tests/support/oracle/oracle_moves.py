"""What the zerofx ops do that move data between device, host and NVMe, on one simulated rank.

Nobody else takes part in these, so that they never block.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from oracle_exchange import Exchange
from oracle_host import Host, HostCopy, Parked
from oracle_memory import OracleError
from oracle_shards import Far, Shards, Staged
from torch import Tensor

Blocking = Generator[None, None, Any]


class Moves:
    """One rank's shards, at hand or as handles, and every op that moves them or saved values."""

    exchange: Exchange
    host: Host
    away: Shards
    shards: dict[int, Tensor]  # bucket -> this rank's slice
    _reducing: dict[int, int]  # address of a reduction's result -> bucket

    def shard(self, bucket: int) -> Tensor | Far:
        """Return what stands for this rank's slice in a graph: itself, or a handle."""
        return self.away.far.get(bucket, self.shards[bucket])

    def _own(self, shard: Any, bucket: int, kind: str) -> Tensor:
        """Return this rank's slice of a bucket, which is what an op must have been given."""
        if shard is not self.shard(bucket):
            raise OracleError(f"{kind} of bucket {bucket} is given something else than its shard")
        return self.shards[bucket]

    def _reduced(self, reduced: Tensor, bucket: int, verb: str) -> Tensor:
        if self._reducing.pop(reduced.data_ptr(), None) != bucket:
            raise OracleError(f"a gradient {verb} as bucket {bucket}'s was not reduced as its")
        return reduced

    # -- shards off the device --------------------------------------------------------------
    def _reload_shard(
        self, shard: Any, bucket: int, numel: int, slot: int, dtype: torch.dtype | None
    ) -> Blocking:
        yield from ()
        if isinstance(shard, Staged) and shard.bucket == bucket:
            mine = self._slice(self.shard(bucket), bucket, numel, "reload")
            return self.away.reload(shard, slot, numel, dtype or mine.dtype)
        mine = self._slice(shard, bucket, numel, "reload")
        if not isinstance(shard, Far):
            raise OracleError(f"a reload of bucket {bucket}, whose shard is on the device")
        return self.away.reload(shard, slot, numel, dtype or mine.dtype)

    def _read_shard(self, shard: Any, bucket: int, numel: int) -> Blocking:
        yield from ()
        self._slice(shard, bucket, numel, "read")
        return self.away.read(bucket)

    def _refresh_shard(
        self, shard: Any, bucket: int, numel: int, dtype: torch.dtype | None
    ) -> Blocking:
        yield from ()
        mine = self._slice(shard, bucket, numel, "refresh")
        return self.away.refresh(bucket, numel, dtype or mine.dtype)

    def _slice(self, shard: Any, bucket: int, numel: int, kind: str) -> Tensor:
        mine = self._own(shard, bucket, kind)
        if numel != mine.numel():
            raise OracleError(f"a shard of bucket {bucket} has {mine.numel()}, not {numel}")
        return mine

    def _offload_grad(self, reduced: Tensor, bucket: int) -> Blocking:
        yield from ()
        return self.away.offload(self._reduced(reduced, bucket, "offloaded"), bucket)

    # -- saved values -----------------------------------------------------------------------
    def _offload(self, x: Tensor) -> Blocking:
        yield from ()
        if not isinstance(x, Tensor):
            raise OracleError("an offload of what is not on the device")
        return self.host.launch(HostCopy(Parked(), x), self.exchange.delivery)

    def _reload(self, host: Any, device: Any) -> Blocking:
        yield from ()
        if not isinstance(host, Parked) or host.is_file:
            raise OracleError("a reload of what is not on the host")
        return self.host.launch(HostCopy(host, None), self.exchange.delivery)

    def _write_out(self, host: Any, name: str) -> Blocking:
        yield from ()
        if not isinstance(host, Parked) or host.is_file:
            raise OracleError("a write of what is not on the host")
        return self.host.launch(HostCopy(Parked(is_file=True), None, host), self.exchange.delivery)

    def _read_back(self, stored: Any) -> Blocking:
        yield from ()
        if not isinstance(stored, Parked) or not stored.is_file:
            raise OracleError("a read of what is not on NVMe")
        return self.host.launch(HostCopy(Parked(), None, stored), self.exchange.delivery)
