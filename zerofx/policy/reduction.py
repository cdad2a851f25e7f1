"""How a bucket's gradients are reduced: over which axes, whether at once, and where the sum ends.

is_set: p.grad already holds the gradient of an earlier backward, to which this one adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch

from zerofx.layout.buckets import Bucket, Layout, Mesh
from zerofx.layout.tiers import Tier
from zerofx.plan.plan import Plan
from zerofx.policy import exchange

# -- mesh axes -----------------------------------------------------------------------------------
_AXES = {"shard": "reduce_scatter", "replicate": "all_reduce"}  # what each does, in order


@dataclass(frozen=True)
class Leg:
    """One of the collectives that reduce a bucket: its kind, and the axis over which it runs.

    size: the ranks along the axis. stride: how far their numbers are apart.
    """

    kind: str
    axis: str
    size: int
    stride: int

    @property
    def num_slices(self) -> int:
        """How many times as much it is given as it delivers."""
        return self.size if self.kind == "reduce_scatter" else 1


@lru_cache(maxsize=256)
def legs(mesh: Mesh) -> tuple[Leg, ...]:
    """Return the collectives that reduce a bucket, in order; none where there is one rank."""
    every = (Leg(kind, axis, mesh.along(axis), mesh.stride(axis)) for axis, kind in _AXES.items())
    return tuple(leg for leg in every if leg.size > 1)


def first_axis(mesh: Mesh) -> str:
    """Return the axis of the first leg, which names the op; of the last axis if there is none."""
    found = legs(mesh)
    return found[0].axis if found else [*_AXES][-1]


def kind_over(axis: str) -> str:
    """Return the kind of collective that reduces over an axis."""
    return _AXES[axis]


# -- rows of a table ------------------------------------------------------------------------------
ROW_NUMBER_BYTES = 8


def rows_sent(rows: int, width: int, itemsize: int, size: int) -> int:
    """Return the bytes that a rank sends to give `rows` rows and their numbers to all others."""
    return exchange.part_sent(rows * (width * itemsize + ROW_NUMBER_BYTES), size)


def rows_are_less(layout: Layout, bucket: Bucket, rows: int) -> bool:
    """Tell whether a table's gradient travels by rows: if all ranks then send fewer bytes.

    rows: the most that any rank has. It is compared with a reduction of the whole bucket.
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
    """Tell whether no_sync, and a pipeline before its last micro-batch, put reductions off.

    At stages 2 and 3, and with an offloaded optimizer, whole gradients are never held, so that
    every backward reduces; but a pipeline stage sums those of its own parameters, unless the plan
    says otherwise. A single data rank has nothing to put off.
    """
    has_several = layout.mesh.num_data_ranks > 1
    parallel = plan.parallel
    may_hold = plan.stage <= 1 or (parallel.pipeline > 1 and parallel.accumulate == "whole")
    return may_hold and has_several and not any(b.is_away for b in layout.buckets)


def sums_lie_apart(layout: Layout) -> bool:
    """Tell whether the sums of no_sync have memory of their own. If not, they lie in p.grad."""
    return layout.shard_size > 1


def sum_form(block: Sequence[Bucket]) -> tuple[int, torch.dtype]:
    """Return the elements and dtype of a block's sum: whole, in the format of the shards."""
    return sum(b.numel for b in block), block[0].dtype


# -- where gradients are packed, and where their sum ends -----------------------------------------
class End(Enum):
    """What a reduction writes its result into."""

    GRADIENT = "the memory of p.grad"
    PACKED = "the buffer in which the gradients were packed"
    SLICE = "a borrowed slice"
    LEAVING = "memory of its own, until the copy of it has left the device"


def packs_in_gradient(layout: Layout, bucket: Bucket, is_set: bool, reduces: bool = True) -> bool:
    """Tell whether gradients are packed into p.grad itself.

    reduces: this backward reduces, and there is no sum of no_sync to be reduced with it.
    """
    return reduces and not is_set and layout.reduces_in_place(bucket)


def end_of(layout: Layout, bucket: Bucket, is_set: bool, in_slot: bool = False) -> End:
    """Return where a reduction ends.

    in_slot: the gradients were packed in a slot, which another bucket may fill next.
    """
    if bucket.is_away:
        return End.LEAVING
    if not is_set and bucket.reduce_dtype is bucket.dtype:
        return End.GRADIENT
    if layout.reduces_in_place(bucket) and not in_slot:
        return End.PACKED
    return End.SLICE


# -- gradients that live off the device -----------------------------------------------------------
def leaves_as(bucket: Bucket, is_scaled: bool) -> torch.dtype:
    """Return the format in which a reduced slice leaves for the host.

    is_scaled: zerofx scales the loss, so that a slice is unscaled first, in the format of p.grad.
    """
    return bucket.dtype if is_scaled else bucket.reduce_dtype


def lands_in_gradient(bucket: Bucket, is_scaled: bool, is_set: bool) -> bool:
    """Tell whether a slice is copied straight into p.grad. If not, it is then added or cast."""
    return not is_set and leaves_as(bucket, is_scaled) is bucket.dtype


def is_stored_apart(layout: Layout, bucket: Bucket, is_scaled: bool, is_set: bool) -> bool:
    """Tell whether a reduced slice lies beside p.grad, so that storing it has work to do."""
    if bucket.is_away:
        return not lands_in_gradient(bucket, is_scaled, is_set)
    return end_of(layout, bucket, is_set) is not End.GRADIENT


def gradient_tier(bucket: Bucket, in_backward: bool) -> Tier:
    """Return where a reduced gradient waits for its update.

    in_backward: the update runs inside backward. Then a gradient never reaches NVMe: it passes
    through host memory.
    """
    return Tier.HOST if bucket.home is Tier.NVME and in_backward else bucket.home
