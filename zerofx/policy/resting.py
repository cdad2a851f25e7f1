"""Memory between steps: buffers that a step needs are freed, unless taking them again is costly."""

from __future__ import annotations

from collections.abc import Container

from zerofx.layout.buckets import Bucket, Layout
from zerofx.layout.tiers import Tier
from zerofx.process import IN_HEAP_BYTES


def frees(layout: Layout, nbytes: int) -> bool:
    """Return whether a buffer that only backward uses is freed between steps (see `rest_bytes`)."""
    return nbytes >= layout.rest_bytes


def frees_slot(layout: Layout, slot: int, nbytes: int, forward_slots: Container[int]) -> bool:
    """Return whether a slot is freed.

    Slots that forward gathers into are soon needed again. They are freed only if their memory comes
    from a heap that is kept: mapping pages again takes about 0.5 ms per MiB on a CPU.
    """
    is_cheap = nbytes <= IN_HEAP_BYTES or slot not in forward_slots
    return is_cheap and frees(layout, nbytes)


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
