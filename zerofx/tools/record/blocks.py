"""Live ranges of memory from the events of torch's allocator, and their high-water mark."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

NEVER = float("inf")


@dataclass
class Block:
    """The live range of one allocation. is_ghost: its free was not seen."""

    address: int
    nbytes: int
    made_at: float
    freed_at: float = NEVER
    is_ghost: bool = False


def replay(events: Iterable[tuple[float, int, int]]) -> list[Block]:
    """Turn (time, address, +-bytes), in order of time, into live ranges.

    The profiler sees only the calling thread, and gloo drops its last reference to a tensor in a
    thread of its own. Such a block ends, at the latest, when a new one overlaps its addresses.
    """
    live: dict[int, Block] = {}
    starts: list[int] = []
    blocks = []

    def end(address: int, at: float) -> Block:
        block = live.pop(address)
        starts.pop(bisect_left(starts, address))
        block.freed_at = at
        return block

    for at, address, nbytes in events:
        if nbytes < 0:
            if address in live:
                end(address, at)
            continue
        first = bisect_left(starts, address)
        if first and starts[first - 1] + live[starts[first - 1]].nbytes > address:
            first -= 1
        while first < len(starts) and starts[first] < address + nbytes:
            end(starts[first], at).is_ghost = True
        insort(starts, address)
        live[address] = Block(address, nbytes, at)
        blocks.append(live[address])
    return blocks


class Levels:
    """Live bytes at any time from `begin` on, when `held_bytes` were live.

    At equal times frees come first: a ghost ends as its successor begins.
    """

    def __init__(self, blocks: Iterable[Block], begin: float, held_bytes: int = 0) -> None:
        changes = [(begin, 0, held_bytes)]
        for block in blocks:
            if block.made_at >= begin:
                changes.append((block.made_at, 1, block.nbytes))
            if begin <= block.freed_at < NEVER:
                changes.append((block.freed_at, 0, -block.nbytes))
        changes.sort()
        self._times = [at for at, _, _ in changes]
        self._levels = list(accumulate(change for _, _, change in changes))

    def most(self, start: float, stop: float) -> int:
        """Return the most bytes that were live at once between two times."""
        first = max(bisect_right(self._times, start) - 1, 0)
        return max(self._levels[first : bisect_right(self._times, stop)], default=0)


def most_of(levels: Levels, spans: Sequence[tuple[str, float, float]]) -> dict[str, int]:
    """Return the most live bytes within each span, by name; the largest of several of one name."""
    found: dict[str, int] = {}
    for name, start, stop in spans:
        found[name] = max(found.get(name, 0), levels.most(start, stop))
    return found
