"""What the zerofx ops do on one simulated rank of the oracle, as generators that yield to wait."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from oracle_exchange import Delivery, Exchange, Transfer, concatenation, scaled_sum
from oracle_host import Host, HostCopy
from oracle_memory import Memory, OracleError
from oracle_moves import Moves
from oracle_placed import Placed
from oracle_shards import Far, Move, Shards
from torch import Tensor, fx

from zerofx.ir.spec import spec_of

Blocking = Generator[None, None, Any]
Format = torch.dtype | None


def coded(x: Tensor) -> Tensor:
    """Return what arrives of a flat tensor that travels in blocks of 128 values and 8 bits."""
    found = torch.empty_like(x)
    for first in range(0, x.numel(), 128):
        block = x[first : first + 128].float()
        step = block.abs().max() / 127
        codes = (block * (1 / step)).round() if step > 1e-36 else torch.zeros_like(block)
        found[first : first + 128] = codes * step
    return found


class Communication(Placed, Moves):
    """One rank's side of every zerofx op, over its memory and the exchange with the others."""

    def __init__(
        self, rank: int, layout: Any, memory: Memory, shards: dict[int, Tensor],
        exchange: Exchange, team: int = 1, context: int = 1,
    ) -> None:  # fmt: skip
        self.rank, self.layout, self.memory, self.exchange = rank, layout, memory, exchange
        self.team, self.context = team, context
        self.shards = shards  # bucket -> this rank's slice
        self.away = Shards(memory, exchange.delivery)
        self.host = Host()
        self.packed: dict[int, set[str]] = {}  # bucket -> parameters whose gradient was reduced
        self._reducing: dict[int, int] = {}  # address of a reduction's result -> bucket
        self._filling: dict[int, tuple[int, set[str]]] = {}  # address of a gradient buffer
        self._stored: dict[int, Tensor | Far] = {}  # bucket -> the gradient that an update may take

    @property
    def group(self) -> range:
        """The ranks that this one shards with."""
        size, team = self.layout.shard_size, self.team
        first = self.rank // (size * team) * size * team + self.rank % team
        return range(first, first + size * team, team)

    def end_call(self) -> None:
        """Let what is under way proceed, and forget what does not outlive a call."""
        self.exchange.send_pending(self.rank)
        self.exchange.check_landed(self.rank)
        self.host.check_landed()
        self.away.end_call()
        self._reducing.clear()
        self._filling.clear()
        self._stored.clear()
        self.memory.end_call()

    def run(self, node: fx.Node, args: tuple, kwargs: dict) -> Blocking:
        """Run one zerofx op."""
        schema = node.target._schema  # type: ignore[union-attr]
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        for argument in schema.arguments:
            if argument.has_default_value():
                given.setdefault(argument.name, argument.default_value)
        spec = spec_of(node)
        if spec is not None and spec.oracle is not None:
            return (yield from spec.oracle(self, **given))
        body = getattr(self, "_" + schema.name.split("::")[1])
        return (yield from body(**given))

    def _launch(self, dest: Tensor, signature: tuple, sources: list[Tensor], land: Any) -> Blocking:
        transfer = self.exchange.post(self.rank, signature, dest, sources, land)
        if self.exchange.delivery is Delivery.EARLY:
            yield from self._until_ready(transfer)
            self.exchange.land(transfer)
        return transfer

    def _until_ready(self, transfer: Transfer) -> Blocking:
        while not self.exchange.is_ready(transfer):
            yield

    def bucket(self, bucket: int, numel: int) -> Any:
        found = self.layout.buckets[bucket]
        if found.numel != numel:
            raise OracleError(f"bucket {bucket} has {found.numel} elements, not {numel}")
        return found

    def gather_into(self, dest: Tensor, shard: Tensor, bucket: int, kind: str) -> Blocking:
        group, shard = self.group, shard.to(dest.dtype)
        signature = (kind, bucket, dest.numel(), dest.dtype)

        def land(parts: list[list[Tensor]]) -> None:
            self.memory.own(dest)
            dest.copy_(concatenation(parts, group))

        return self._launch(dest, signature, [shard], land)

    def _all_gather(
        self, shard: Any, bucket: int, numel: int, slot: int, dtype: Format,
        kind: str = "all-gather",
    ) -> Blocking:  # fmt: skip
        b = self.bucket(bucket, numel)
        is_away = bucket in self.away.far
        sent = self.away.sent(bucket, shard) if is_away else self._own(shard, bucket, "all-gather")
        dest = self.memory.place(slot, b.numel, dtype or b.dtype)
        return (yield from self.gather_into(dest, sent, bucket, kind))

    def _refresh(self, shard: Any, bucket: int, numel: int, dtype: Format) -> Blocking:
        b, mine = self.bucket(bucket, numel), self._own(shard, bucket, "refresh")
        dest = self.memory.resident_copy(bucket, b.numel, dtype or b.dtype)
        return (yield from self.gather_into(dest, mine, bucket, "refresh"))

    def _resident(self, shard: Any, bucket: int, numel: int, dtype: Format) -> Blocking:
        b = self.bucket(bucket, numel)
        yield from ()
        return self.memory.resident_copy(bucket, b.numel, dtype or b.dtype)

    def _secondary_shard(self, full: Tensor, bucket: int, numel: int) -> Blocking:
        yield from ()
        b = self.layout.buckets[bucket]
        if full.numel() != b.numel or numel * self.layout.node_size != b.numel:
            raise OracleError(f"a secondary shard of {numel} of bucket {bucket}, of {b.numel}")
        first = self.group.index(self.rank) % self.layout.node_size * numel
        return full[first : first + numel].clone()

    def _gather_secondary(self, secondary: Tensor, bucket: int, numel: int, slot: int) -> Blocking:
        b, size = self.bucket(bucket, numel), self.layout.node_size
        dest = self.memory.place(slot, b.numel, secondary.dtype)
        first = self.group.index(self.rank) // size * size
        node = self.group[first : first + size]
        signature = ("all-gather in the node", bucket, dest.numel(), dest.dtype)

        def land(parts: list[list[Tensor]]) -> None:
            self.memory.own(dest)
            dest.copy_(concatenation(parts, node))

        return self._launch(dest, signature, [secondary], land)

    def _all_gather_by_node(
        self, shard: Any, bucket: int, numel: int, slot: int, dtype: Format
    ) -> Blocking:
        if self.layout.node_size == 1:
            raise OracleError("there are no nodes to gather by")
        return self._all_gather(shard, bucket, numel, slot, dtype, "all-gather by node")

    def _reduce_scatter_by_node(self, **given: Any) -> Blocking:
        """Reduce in one step: with another order of sums, outcomes could not be compared."""
        return self._reduce("reduce-scatter by node", **given)

    def _wait(self, launched: Transfer | HostCopy | Move) -> Blocking:
        if isinstance(launched, HostCopy):
            return self.host.finish(launched)
        if isinstance(launched, Move):
            return self.away.finish(launched)
        if not isinstance(launched, Transfer):
            raise OracleError("a wait for something that was not launched")
        launched.send()
        yield from self._until_ready(launched)
        self.exchange.land(launched)
        return launched.dest

    def _param_view(self, full: Tensor, offset: int, shape: list[int]) -> Blocking:
        yield from ()
        numel = torch.Size(shape).numel()
        if offset < 0 or offset + numel > full.numel():
            raise OracleError(f"a view of {offset}+{numel} in a buffer of {full.numel()}")
        return full[offset : offset + numel].view(shape)

    def _release(self, full: Tensor, slot: int) -> Blocking:
        yield from ()
        self.away.check_release(full)
        self.memory.release(full, slot)

    def _grad_buffer(
        self, like: Any, bucket: int, numel: int, zero: bool, slot: int, dtype: Format
    ) -> Blocking:
        yield from ()
        b = self.bucket(bucket, numel)
        buffer = self.memory.place(slot, b.numel, dtype or b.dtype)
        covered = torch.zeros(b.numel, dtype=torch.bool)
        for param in b.params:
            covered[param.offset : param.offset + param.numel] = not zero
        buffer[~covered] = 0
        self._filling[buffer.data_ptr()] = (bucket, set())
        return buffer

    def _pack(self, buffer: Tensor, grads: list[Tensor], offsets: list[int]) -> Blocking:
        yield from ()
        if buffer.data_ptr() not in self._filling:
            raise OracleError("a pack into something that is no gradient buffer")
        bucket, names = self._filling[buffer.data_ptr()]
        members = {p.offset: p for p in self.layout.buckets[bucket].params}
        self.memory.own(buffer)
        for grad, offset in zip(grads, offsets, strict=True):
            if offset not in members or members[offset].shape != tuple(grad.shape):
                raise OracleError(f"bucket {bucket} has no such parameter at {offset}")
            buffer[offset : offset + grad.numel()].copy_(grad.reshape(-1))
            names.add(members[offset].name)
        return buffer

    def _reduce(
        self, kind: str, packed: Tensor, bucket: int, numel: int, scale: float,
        in_blocks: bool = False,
    ) -> Blocking:  # fmt: skip
        if self._filling.get(packed.data_ptr(), (-1, set()))[0] != bucket:
            raise OracleError(f"{kind} of bucket {bucket} is given another buffer")
        size = self.layout.shard_size
        if numel * size != packed.numel():
            raise OracleError(f"{kind} of {packed.numel()} elements into {size} x {numel}")
        dest = self.memory.place(-1, numel, packed.dtype)
        first = self.rank // self.team % size * numel
        signature = (kind, bucket, packed.numel(), packed.dtype, scale)

        def land(parts: list[list[Tensor]]) -> None:
            mine = parts[self.rank % self.team :: self.team]  # with the same part of each layer
            slices = [p[0][first : first + numel] for p in mine]
            if in_blocks:  # what the others send is coded
                own = self.rank // self.team
                slices = [x if r == own else coded(x) for r, x in enumerate(slices)]
            dest.copy_(scaled_sum(slices, scale))

        self._reducing[dest.data_ptr()] = bucket
        self.packed[bucket] = self._filling[packed.data_ptr()][1]
        return (yield from self._launch(dest, signature, [packed], land))

    def _reduce_scatter(self, **given: Any) -> Blocking:
        return self._reduce("reduce-scatter", **given)

    def _all_gather_blocks(
        self, shard: Any, bucket: int, numel: int, slot: int, dtype: Format
    ) -> Blocking:
        b = self.bucket(bucket, numel)
        is_away = bucket in self.away.far
        sent = self.away.sent(bucket, shard) if is_away else self._own(shard, bucket, "all-gather")
        dest = self.memory.place(slot, b.numel, dtype or b.dtype)
        return (yield from self.gather_into(dest, coded(sent), bucket, "all-gather of blocks"))

    def _reduce_scatter_blocks(self, **given: Any) -> Blocking:
        return self._reduce("reduce-scatter of blocks", **given, in_blocks=True)

    def _all_reduce(self, **given: Any) -> Blocking:
        return self._reduce("all-reduce", **given)

    def _store_grad(self, reduced: Any, bucket: int, dtype: Format) -> Blocking:
        yield from ()
        if isinstance(reduced, Far):
            grad: Tensor = self.away.take(reduced, bucket)
        elif bucket in self.away.far:
            raise OracleError(f"bucket {bucket} is off the device, the gradient stored is not")
        else:
            grad = self._reduced(reduced, bucket, "stored")
        grad = grad.to(dtype or grad.dtype)
        before = self.memory.grads.get(bucket)
        self.memory.grads[bucket] = grad.clone() if before is None else before + grad
        self._stored[bucket] = Far(bucket, grad) if isinstance(reduced, Far) else grad
        return self._stored[bucket]

    def _hand_over(
        self, grads: list[Tensor], offsets: list[int], numel: int, bucket: int, copied: list[int]
    ) -> Blocking:
        yield from ()
        members = {p.offset: p for p in self.bucket(bucket, numel).params}
        before = self.memory.grads.get(bucket)
        flat = grads[0].new_zeros(numel) if before is None else before.clone()
        for grad, offset in zip(grads, offsets, strict=True):
            if offset not in members or members[offset].shape != tuple(grad.shape):
                raise OracleError(f"bucket {bucket} has no such parameter at {offset}")
            flat[offset : offset + grad.numel()].add_(grad.reshape(-1))
        self.memory.grads[bucket] = flat
        self.packed[bucket] = {members[offset].name for offset in offsets}
        return flat

    def _update(self, stored: Any, shard: Any, bucket: int) -> Blocking:
        yield from ()
        mine = self._own(shard, bucket, "update")
        if stored is not self._stored.pop(bucket, None):
            raise OracleError(f"an update of bucket {bucket} with what is not its gradient")
        grad = stored.content if isinstance(stored, Far) else stored
        mine.sub_(grad.to(mine.dtype), alpha=0.5)

    def _sync_buffers(self, values: list[Tensor]) -> Blocking:
        received: list[Tensor] = []
        signature = ("sync-buffers", *(tuple(v.shape) for v in values))
        transfer = self.exchange.post(
            self.rank, signature, None, values, lambda parts: received.extend(parts[0])
        )
        transfer.send()
        yield from self._until_ready(transfer)
        self.exchange.land(transfer)
        return [r.clone() for r in received]
