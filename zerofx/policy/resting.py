"""Memory between steps: large buffers that only backward uses are freed."""

from __future__ import annotations

from collections.abc import Container

from zerofx.layout.buckets import Bucket, Layout
from zerofx.layout.tiers import Tier


def frees(layout: Layout, nbytes: int) -> bool:
    """Return whether a buffer that only backward uses is freed between steps (see `rest_bytes`)."""
    return nbytes >= layout.rest_bytes


def frees_slot(layout: Layout, slot: int, nbytes: int, forward_slots: Container[int]) -> bool:
    """Return whether a slot is freed. Slots that forward gathers into are soon needed again."""
    return slot not in forward_slots and frees(layout, nbytes)


def frees_gradient(layout: Layout, bucket: Bucket, in_backward: bool) -> bool:
    """Return whether the memory of a bucket's reduced gradient is freed until the next backward.

    On the device, an update inside backward frees it immediately, whatever its size; otherwise
    zero_grad does. A gradient that waits for its step on the host keeps its memory. A gradient that
    is written to NVMe does not.
    """
    if bucket.is_away:
        return bucket.home is Tier.NVME
    whole = layout.block_numel(layout.blocks[layout.block_of[bucket.index]])
    return in_backward or frees(layout, whole * bucket.dtype.itemsize)
