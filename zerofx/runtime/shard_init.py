"""Where shard values come from: rank 0's materialised model, or initialisation from meta."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerofx.runtime.buffers import share_buffers
from zerofx.runtime.shard_meta import initialise_from_meta
from zerofx.runtime.shard_tree import ParameterTree

if TYPE_CHECKING:
    from zerofx.runtime.shards import ShardStore


def fill_shards(
    store: ShardStore,
    model: nn.Module,
    tree: ParameterTree,
    seed: int | None,
    given: Collection[str] = (),
) -> None:
    """Fill every shard with rank 0's values and swap the parameters, block by block.

    What is on meta on rank 0 is initialised instead, but for `given` names. Only one bucket (or one
    module, from meta) is whole at a time; the old parameters are dropped as their bucket is done.
    """
    order = list(tree.params)
    on_meta = _meta_on_rank_0(store, model, tree)
    for block, owners in zip(store.layout.blocks, store.layout.owners, strict=True):
        present = [n for n in owners if n not in on_meta]
        if present:
            for bucket in block:
                _take_bucket(store, tree, bucket.index, present)
            for name in present:
                store.adopt(tree, name, tree.params[name])
            store.homes.rest()
    if on_meta:
        initialise_from_meta(store, model, tree, on_meta, seed, given)
    share_buffers(store.world, model)
    store.params = {name: store.params[name] for name in order}


def _meta_on_rank_0(store: ShardStore, model: nn.Module, tree: ParameterTree) -> set[str]:
    """Return the parameters and buffers that rank 0 has no values for, the same set everywhere."""
    tensors = {**dict(model.named_buffers()), **tree.params}
    names = list(tensors)
    flags = torch.tensor([t.is_meta for t in tensors.values()], dtype=torch.uint8)
    flags = flags.to(store.world.device)
    store.world.broadcast(flags, 0).wait()
    return {name for name, is_meta in zip(names, flags.tolist(), strict=True) if is_meta}


@torch.no_grad()
def _take_bucket(store: ShardStore, tree: ParameterTree, index: int, names: list[str]) -> None:
    """Send rank 0's values of what a bucket has of `names`, flat, and keep this rank's slice."""
    layout, world = store.layout, store.world
    bucket = layout.buckets[index]
    full = store.shards[index]
    is_apart = store.is_sharded or bucket.is_away
    if is_apart:
        full = torch.zeros(bucket.numel, dtype=bucket.dtype, device=world.device)
    if world.rank == 0:
        for param in (p for p in bucket.params if p.owner in names):
            values = tree.params[param.owner].detach()
            if param.tile is not None:
                first, end = param.tile.rows
                values = values[first:end]
            full[param.offset : param.end].view(param.shape).copy_(values)
    world.broadcast(full, 0).wait()
    lo, hi = layout.shard_bounds(bucket, world.shard_rank)
    if is_apart:
        store.shards[index].copy_(full[lo:hi])
