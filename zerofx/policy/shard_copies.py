"""Copies of shards that live off the device: what travels to it, and which copies stay."""

from __future__ import annotations

from enum import Enum

from zerofx.layout.buckets import Bucket
from zerofx.layout.tiers import Tier

Stamp = tuple[int, int]  # writes that were or may have been made, updates that were published
NEVER: Stamp = (-1, -1)
_BEFORE_STEP: Stamp = (0, 0)
_AFTER_STEP: Stamp = (1, 0)


class SentAs(Enum):
    """What of a shard on the host, or read into host memory, travels to the device."""

    SHARD = "the shard itself"
    CAST = "a cast of the shard, made for the way"
    COPY = "a copy of the shard that stays on the host"


def sent_as(bucket: Bucket, delayed: bool) -> SentAs:
    """Return what travels of a bucket that lives off the device.

    A shard that is computed with in another format travels in that format. If gathers read from
    the host, twice per step, its cast stays there; and so does the copy of a shard that lives on
    NVMe. If a copy stays on the device, the cast is made for the way only.

    delayed: updates run beside the next step, so that gathers read what the update before left.
    """
    is_apart = bucket.is_cast or bucket.home is Tier.NVME
    if (delayed and bucket.trainable) or (bucket.source is Tier.HOST and is_apart):
        return SentAs.COPY
    return SentAs.CAST if bucket.is_cast else SentAs.SHARD


def is_outdated(made_of: Stamp | None, now: Stamp) -> bool:
    """Tell whether a copy that stays is made again when it is next asked for.

    made_of: the stamp of the shard when the copy was made, None before that. now: its stamp now.
    """
    return made_of != now


def refresh_moves(in_forward: bool, micro: int = 0) -> bool:
    """Tell whether a refresh moves anything in the steady state: an optimizer steps once per step.

    The step outdates all copies. The first forward after it makes them current for its backward
    and for later micro-batches. The runtime has stamps in place of this assumption, so that a loop
    that never steps moves less.
    """
    made_of = _BEFORE_STEP if in_forward and micro == 0 else _AFTER_STEP
    return is_outdated(made_of, _AFTER_STEP)
