"""Full state of a store: full tensors from and into shards, and values for torch's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.comm.together import tell
from zerofx.errors import NvmeError
from zerofx.layout.buckets import Bucket, ParamSlice
from zerofx.runtime.tensors.checkpoint import FlatPiece, flat_piece
from zerofx.runtime.tensors.piece import join_parts

if TYPE_CHECKING:
    from zerofx.runtime.store.shards import ShardStore


def full_tensor(store: ShardStore, name: str) -> Tensor:
    """Return one whole parameter, on the tier of its pieces; a collective call."""
    store.settle()
    return store.pieces[name].whole(store.local_view(name))


def gather_bucket(store: ShardStore, bucket: Bucket, what: str) -> Tensor:
    """Return a whole bucket, flat; a collective call, which `what` names in errors.

    Parameters on NVMe are read directly, so that they are verified and no page stays mapped.
    """
    world, shard = store.world, store.shards[bucket.index]
    store.ledger.check_whole(what)
    world.agree(what, f"bucket {bucket.index} ({bucket.label()})")
    problem = None
    try:
        shard = store.homes.fetch(shard)
    except NvmeError as error:
        problem = error
    if store.homes.nvme is not None:
        tell(world, what, problem, NvmeError)
    stages = world.axis("pipeline")
    if store.layout.shard_size == stages.size == 1:
        return shard
    full = torch.empty(bucket.numel, dtype=bucket.dtype, device=world.device)
    if store.layout.has(bucket):
        world.all_gather(full, shard.to(world.device)).wait()
    if stages.size > 1:
        stages.broadcast(full, bucket.positions[0], f"bucket {bucket.index} of its stage").wait()
    return full


class FullReader:
    """Reads whole parameters one by one on request; each read is a collective call.

    The last gathered bucket is kept, so that reading in order gathers each bucket once.

    device: where the results are put; the host by default.
    """

    def __init__(self, store: ShardStore, device: torch.device | None = None) -> None:
        self._store, self._device = store, device
        self._last: tuple[int, Tensor] | None = None

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Return one whole parameter, in memory of its own."""
        self._store.settle()
        where, first = self._store.layout.owned[name][0]
        whole = torch.empty(first.whole_shape, dtype=where.dtype, device=self._device)
        for bucket, param in self._store.layout.owned[name]:
            part = self._gathered(bucket, name)[param.offset : param.end].view(param.shape)
            if param.part is not None:
                part = join_parts(self._store.world, part, param.part)
            _fill(whole, param, part)
            if param is bucket.params[-1]:
                self._last = None  # otherwise it would stay on the device as long as this reader
        return whole

    def _gathered(self, bucket: Bucket, name: str) -> Tensor:
        if self._last is None or self._last[0] != bucket.index:
            self._last = None  # frees its memory first
            full = gather_bucket(self._store, bucket, f"reading {name} of a state_dict{_TOGETHER}")
            self._last = bucket.index, full
        return self._last[1]


def _fill(whole: Tensor, param: ParamSlice, values: Tensor) -> None:
    """Write the values of a parameter, or of one tile of it, into the whole parameter."""
    target = whole if param.tile is None else param.tile.within(whole)
    target.copy_(values.view(target.shape))


_TOGETHER = " (all ranks must read it together from NVMe; zerofx.full_state_dict saves on one rank)"


@torch.no_grad()
def iter_full_state(store: ShardStore, rank0_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor on the host), gathering one bucket at a time; a collective call.

    With `rank0_only`, the other ranks take part and yield nothing. The order is the layout's.
    """
    world, layout = store.world, store.layout
    store.settle()
    for bucket in layout.buckets:
        full = gather_bucket(store, bucket, "state_dict (or a save)")
        is_for_us = not rank0_only or world.rank == 0
        for param in bucket.params:
            view = full[param.offset : param.end].view(param.shape)
            if param.part is not None:
                view = join_parts(world, view, param.part)
            if not is_for_us:
                continue
            if param.tile is None:
                yield param.name, view.to("cpu", copy=True)
                continue
            if param.tile.index == 0:
                whole = torch.empty(param.tile.shape, dtype=view.dtype)
            _fill(whole, param, view)
            if param.tile.index == param.tile.count - 1:
                yield param.owner, whole


def full_state(store: ShardStore, rank0_only: bool = False) -> dict[str, Tensor]:
    """Return all whole parameters, on the host, in registration order; a collective call."""
    found = dict(iter_full_state(store, rank0_only))
    return {name: found[name] for name in store.params if name in found}


def sharded_state(store: ShardStore) -> dict[str, Tensor]:
    """Return the values that torch.distributed.checkpoint saves and loads, by parameter name.

    They share memory with the parameters, so that loading fills them in place: sharded tensors, or
    plain ones if the shard axis has one rank. They are in registration order.
    """
    store.settle()
    return {name: param.detach() for name, param in store.params.items()}


def flat_state(store: ShardStore) -> dict[str, FlatPiece]:
    """Return every parameter as one flat tensor of its elements, the format of early versions."""
    return {name: flat_piece(param) for name, param in sharded_state(store).items()}
