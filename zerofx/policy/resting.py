"""What a model frees between steps: large buffers that only backward uses."""

from __future__ import annotations

from collections.abc import Container

from zerofx.layout.buckets import Bucket, Layout
from zerofx.layout.tiers import Tier


def frees(layout: Layout, nbytes: int) -> bool:
    """Tell whether a buffer of backward alone is freed between steps; `rest_bytes` says why."""
    return nbytes >= layout.rest_bytes


def frees_slot(layout: Layout, slot: int, nbytes: int, forward_slots: Container[int]) -> bool:
    """Tell whether a slot is freed. Those that forward gathers into are needed again at once."""
    return slot not in forward_slots and frees(layout, nbytes)


def frees_gradient(layout: Layout, bucket: Bucket, in_backward: bool) -> bool:
    """Tell whether the memory of a bucket's reduced gradient is freed until the next backward.

    On the device an update inside backward frees it at once, whatever its size, and else zero_grad
    does. A gradient that waits for its step on the host keeps its memory. One on its way to NVMe
    does not.
    """
    if bucket.is_away:
        return bucket.home is Tier.NVME
    whole = layout.block_numel(layout.blocks[layout.block_of[bucket.index]])
    return in_backward or frees(layout, whole * bucket.dtype.itemsize)
