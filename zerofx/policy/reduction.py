"""Gradient reduction of a bucket: over which axes, in which backward, and into which memory.

is_set: p.grad already holds the gradient of an earlier backward, to which this one is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch

from zerofx.layout.buckets import ACROSS, NODE, Bucket, Layout, Mesh
from zerofx.layout.tiers import Tier
from zerofx.plan.plan import Plan
from zerofx.policy import exchange

# -- mesh axes -----------------------------------------------------------------------------------
_AXES = {"shard": "reduce_scatter", "replicate": "all_reduce"}  # the collective of each, in order


@dataclass(frozen=True)
class Leg:
    """One of the collectives that reduce a bucket: its kind and its axis.

    size: the number of ranks along the axis. stride: the distance between their numbers.
    times: the number of collectives, launched together, each with an equal part of the input.
    """

    kind: str
    axis: str
    size: int
    stride: int
    times: int = 1

    @property
    def num_slices(self) -> int:
        """The ratio of input elements to output elements."""
        return self.size if self.kind == "reduce_scatter" else 1


@lru_cache(maxsize=256)
def legs(mesh: Mesh) -> tuple[Leg, ...]:
    """Return the collectives that reduce a bucket, in order; none if there is only one rank."""
    every = (Leg(kind, axis, mesh.along(axis), mesh.stride(axis)) for axis, kind in _AXES.items())
    return tuple(leg for leg in every if leg.size > 1)


@lru_cache(maxsize=256)
def legs_by_node(mesh: Mesh) -> tuple[Leg, ...]:
    """Return the collectives of a reduction that runs within each node first, then across nodes.

    Within a node, the slices of each node's ranks are one collective: as many as there are nodes.
    """
    first, *later = legs(mesh)
    assert first.axis == "shard" and mesh.node > 1, f"{mesh} has no nodes to reduce by"
    nodes = mesh.along(ACROSS)
    within = Leg(first.kind, NODE, mesh.node, mesh.stride(NODE), nodes)
    return within, Leg(first.kind, ACROSS, nodes, mesh.stride(ACROSS)), *later


def first_axis(mesh: Mesh) -> str:
    """Return the axis of the first leg, which names the op, or the last axis if there is no leg."""
    found = legs(mesh)
    return found[0].axis if found else [*_AXES][-1]


def kind_over(axis: str) -> str:
    """Return the kind of collective that reduces over an axis."""
    return _AXES[axis]


# -- rows of a table ------------------------------------------------------------------------------
ROW_NUMBER_BYTES = 8


def rows_sent(rows: int, width: int, itemsize: int, size: int) -> int:
    """Return the bytes that a rank sends to give all others `rows` rows with their numbers."""
    return exchange.part_sent(rows * (width * itemsize + ROW_NUMBER_BYTES), size)


def rows_are_less(layout: Layout, bucket: Bucket, rows: int) -> bool:
    """Return whether a table's gradient is sent as rows: if all ranks then send fewer bytes.

    rows: the largest number of rows on any rank. It is compared with reducing the whole bucket.
    """
    (leg,) = legs(layout.mesh)
    numel, itemsize = layout.shard_numel(bucket), bucket.reduce_dtype.itemsize
    if leg.kind == "reduce_scatter":
        dense = exchange.part_sent(numel, leg.size)
    else:
        dense = exchange.all_reduce_sent(numel, leg.size - 1, leg.size)
    _, width = bucket.params[0].shape
    return rows_sent(rows, width, itemsize, leg.size) < dense * itemsize


# -- no_sync ------------------------------------------------------------------------------------
def is_put_off(layout: Layout, plan: Plan) -> bool:
    """Return whether no_sync, and a pipeline before its last micro-batch, defer reductions.

    At stages 2 and 3, and with an offloaded optimizer, full gradients are never held, so every
    backward reduces. A pipeline stage, however, sums those of its own parameters, unless the plan
    says otherwise. A single rank has nothing to defer.
    """
    has_several = layout.mesh.num_reducing > 1
    parallel = plan.parallel
    may_hold = plan.stage <= 1 or (parallel.pipeline > 1 and parallel.accumulate == "whole")
    return may_hold and has_several and not any(b.is_away for b in layout.buckets)


def sums_lie_apart(layout: Layout) -> bool:
    """Return whether the sums of no_sync have memory of their own. If not, they are in p.grad."""
    return layout.shard_size > 1


def sum_form(block: Sequence[Bucket]) -> tuple[int, torch.dtype]:
    """Return the elements and dtype of a block's no_sync sum: full size, in the shards' format."""
    return sum(b.numel for b in block), block[0].dtype


# -- where gradients are packed, and where their sum is written ------------------------------------
class End(Enum):
    """The memory into which a reduction writes its result."""

    GRADIENT = "the memory of p.grad"
    PACKED = "the buffer in which the gradients were packed"
    SLICE = "a borrowed slice"
    LEAVING = "memory of its own, until the copy of it has left the device"


def packs_in_gradient(layout: Layout, bucket: Bucket, is_set: bool, reduces: bool = True) -> bool:
    """Return whether gradients are packed into p.grad itself.

    reduces: this backward reduces, and no sum of no_sync has to be reduced with it.
    """
    return reduces and not is_set and layout.reduces_in_place(bucket)


def end_of(layout: Layout, bucket: Bucket, is_set: bool, in_slot: bool = False) -> End:
    """Return the memory into which a reduction writes.

    in_slot: the gradients were packed in a slot, which the next bucket may overwrite.
    """
    if bucket.is_away:
        return End.LEAVING
    if not is_set and bucket.reduce_dtype is bucket.dtype:
        return End.GRADIENT
    if layout.reduces_in_place(bucket) and not in_slot:
        return End.PACKED
    return End.SLICE


def hands_over(layout: Layout, plan: Plan, bucket: Bucket) -> bool:
    """Return whether gradients become p.grad in the memory in which backward has computed them.

    Without other data ranks nothing is reduced, so a bucket would only be a copy. Another format
    than that of p.grad, a loss scale, tiles, updates inside backward and CUDA graphs need it.
    """
    formats = {bucket.dtype, bucket.compute_dtype, bucket.reduce_dtype}
    is_plain = len(formats) == 1 and bucket.tile is None and not bucket.is_away
    has_other_use = plan.update == "in-backward" or plan.cuda_graph or plan.precision.is_scaled
    return layout.mesh.num_reducing == 1 and is_plain and not has_other_use


# -- gradients that live off the device -----------------------------------------------------------
def leaves_as(bucket: Bucket, is_scaled: bool) -> torch.dtype:
    """Return the format in which a reduced slice is copied to the host.

    is_scaled: zerofx scales the loss, so a slice is unscaled first, in the format of p.grad.
    """
    return bucket.dtype if is_scaled else bucket.reduce_dtype


def lands_in_gradient(bucket: Bucket, is_scaled: bool, is_set: bool) -> bool:
    """Return whether a slice is copied directly into p.grad, with no add or cast afterwards."""
    return not is_set and leaves_as(bucket, is_scaled) is bucket.dtype


def is_stored_apart(layout: Layout, bucket: Bucket, is_scaled: bool, is_set: bool) -> bool:
    """Return whether a reduced slice is outside p.grad, so that storing it requires work."""
    if bucket.is_away:
        return not lands_in_gradient(bucket, is_scaled, is_set)
    return end_of(layout, bucket, is_set) is not End.GRADIENT


def gradient_tier(bucket: Bucket, in_backward: bool) -> Tier:
    """Return the tier in which a reduced gradient waits for its update.

    in_backward: the update runs inside backward. A gradient then never reaches NVMe: it passes
    through host memory.
    """
    return Tier.HOST if bucket.home is Tier.NVME and in_backward else bucket.home
