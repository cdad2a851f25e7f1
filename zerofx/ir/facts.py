"""Facts: what holds of a program so far, named so that passes can ask for it."""

from __future__ import annotations

from enum import Enum, auto


class Fact(Enum):
    """What a pass may require of a program, establish, or destroy."""

    CAPTURED = auto()
    TIED_MERGED = auto()
    PLACED = auto()
    SPLIT = auto()
    REGIONS_CUT = auto()
    BUCKETS_ASSIGNED = auto()
    PARAMS_SHARDED = auto()
    GRADS_REDUCED = auto()
    KEPT_GATHERED = auto()
    RELEASED = auto()
    PREFETCHED = auto()
    WAITS_SUNK = auto()
    SHARDS_OFFLOADED = auto()
    UPDATES_PLACED = auto()
    SLOTS_ASSIGNED = auto()
