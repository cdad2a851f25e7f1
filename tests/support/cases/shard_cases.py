"""Small models cut over simulated ranks, and gradients delivered as a program would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from simulated import run_ranks
from torch import Tensor, nn

from zerofx.comm.world import World
from zerofx.layout.buckets import Layout
from zerofx.layout.build import UnitParam, unit_layout
from zerofx.runtime.store.shards import ShardStore

T = TypeVar("T")


@cache
def _small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 33), nn.Linear(33, 7), nn.Linear(7, 1, bias=False))


def small_model() -> nn.Sequential:
    """Return three layers whose parameters are cut unevenly, some of them empty on some ranks.

    Made once: simulated ranks are threads and share one generator.
    """
    return copy.deepcopy(_small_model())


def layout_of(model: nn.Module, world: World, persist_below: int = 0) -> Layout:
    """Lay a model out with one unit a top-level child."""
    params = [
        UnitParam(name, tuple(p.shape), p.dtype, name.partition(".")[0], p.requires_grad)
        for name, p in model.named_parameters()
    ]
    return unit_layout(params, world.shard_size, world.replicate_size, persist_below)


def build(model: nn.Module, world: World, **options: Any) -> ShardStore:
    return ShardStore.build(model, layout_of(model, world), world, **options)


def on_ranks(
    size: int,
    body: Callable[[nn.Module, ShardStore, World], T],
    model: nn.Module | None = None,
    shard_size: int | None = None,
) -> list[T]:
    """Run `body(model, store, world)` on `size` simulated ranks with a copy of the model each."""
    base = small_model() if model is None else model

    def rank(world: World) -> T:
        mine = copy.deepcopy(base)
        return body(mine, build(mine, world), world)

    return run_ranks(size, rank, shard_size, timeout_s=20)


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Return full gradients, the same on every rank and in every world."""
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}


def deliver(store: ShardStore, full: dict[str, Tensor], names: Any = None) -> None:
    """Hand full gradients over as a backward does: flat, reduced, bucket by bucket."""
    with torch.no_grad():
        for bucket in store.layout.buckets:
            flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
            for p in bucket.params:
                if names is None or p.name in names:
                    flat[p.offset : p.end] = full[p.name].reshape(-1)
            lo, hi = store.layout.shard_bounds(bucket, store.world.shard_rank)
            target, accumulate = store.grads.target(bucket.index)
            if accumulate:
                target.add_(flat[lo:hi])
            else:
                target.copy_(flat[lo:hi])
            store.grads.publish(bucket.index, names)


def whole(tensor: Tensor) -> Tensor:
    """Return a plain full copy of a parameter or gradient, sharded or not."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach().clone()


def wholes(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}
