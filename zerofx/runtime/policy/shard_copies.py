"""Copies of shards that live off the device: what travels to it, and which copies stay."""

from __future__ import annotations

from enum import Enum

from zerofx.runtime.layout import Bucket
from zerofx.runtime.tiers import Tier


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


def refresh_moves(in_forward: bool, micro: int = 0) -> bool:
    """Tell whether a refresh moves anything in the steady state: an optimizer steps once per step.

    A copy that stays is outdated by a step. The first forward after it makes the copy current, and
    so it is for backward and for later micro-batches. The runtime sees this by counting writes
    (`AwayShards`, `Engine.refresh`), so that a loop that never steps moves less.
    """
    return in_forward and micro == 0
