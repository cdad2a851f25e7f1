"""Copies of shards that live off the device: in which form they travel, and which copies stay."""

from __future__ import annotations

from enum import Enum

from zerofx.layout.buckets import Bucket
from zerofx.layout.tiers import Tier

Stamp = tuple[int, int]  # number of (possible) writes, number of published updates
NEVER: Stamp = (-1, -1)
_BEFORE_STEP: Stamp = (0, 0)
_AFTER_STEP: Stamp = (1, 0)


class SentAs(Enum):
    """The form in which a shard on the host, or read into host memory, travels to the device."""

    SHARD = "the shard itself"
    CAST = "a cast of the shard, made for the way"
    COPY = "a copy of the shard that stays on the host"


def sent_as(bucket: Bucket, delayed: bool) -> SentAs:
    """Return the form in which a bucket that lives off the device travels.

    A shard that is computed with in another format travels in that format. If gathers read from the
    host, twice per step, the cast stays there, and so does the copy of a shard that lives on NVMe.
    If a copy stays on the device, the cast is made for the transfer only.

    delayed: updates run during the next step, so that gathers read the result of the one before.
    """
    is_apart = bucket.is_cast or bucket.home is Tier.NVME
    if (delayed and bucket.trainable) or (bucket.source is Tier.HOST and is_apart):
        return SentAs.COPY
    return SentAs.CAST if bucket.is_cast else SentAs.SHARD


def is_outdated(made_of: Stamp | None, now: Stamp) -> bool:
    """Return whether a copy that stays must be made again when it is next requested.

    made_of: the stamp of the shard when the copy was made; None if there is no copy yet. now: its
    current stamp.
    """
    return made_of != now


def refresh_moves(in_forward: bool, micro: int = 0) -> bool:
    """Return whether a refresh moves anything in the steady state: one optimizer step per step.

    The step outdates all copies. The first forward after it renews them for its backward and for
    later micro-batches. The runtime compares stamps and does not make this assumption, so a loop
    that never steps moves less.
    """
    made_of = _BEFORE_STEP if in_forward and micro == 0 else _AFTER_STEP
    return is_outdated(made_of, _AFTER_STEP)
