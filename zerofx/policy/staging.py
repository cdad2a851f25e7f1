"""Staging: how many buckets on NVMe are in host memory at once during an update."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

READS_AHEAD = 1  # in step(): buckets that are read while one is updated
WRITES_BEHIND = 1  # in step(): buckets that are written while one is updated
IN_BACKWARD = 2  # one bucket is updated while the next one is read


def at_once_in_step() -> int:
    """Return how many buckets are in host memory at once in `step()`."""
    return READS_AHEAD + 1 + WRITES_BEHIND


class Move(Enum):
    """One event of a bucket in `step()`."""

    READ = "its reads begin: parameters and states are in host memory from here on"
    UPDATE = "its reads have ended, it is updated, and its writes begin"
    WRITTEN = "its writes have ended: its host memory is free"


def step_order(num_buckets: int) -> Iterator[tuple[Move, int]]:
    """Yield the events of buckets that live on NVMe during `step()`, in order."""
    for k in range(min(READS_AHEAD, num_buckets)):
        yield Move.READ, k
    for k in range(num_buckets):
        if k + READS_AHEAD < num_buckets:
            yield Move.READ, k + READS_AHEAD
        yield Move.UPDATE, k
        if k >= WRITES_BEHIND:
            yield Move.WRITTEN, k - WRITES_BEHIND
    for k in range(max(num_buckets - WRITES_BEHIND, 0), num_buckets):
        yield Move.WRITTEN, k
