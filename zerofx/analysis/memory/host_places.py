"""Places of host memory over a step: the order in which they are borrowed, and their total size.

A place is kept for the next borrower. Their size is therefore found by borrowing as the runtime
does, step after step, until no place is added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zerofx.analysis.memory.storage import Category, Lifetimes, Storage
from zerofx.ir.meta import Info
from zerofx.ir.program import Planned
from zerofx.ir.spec import Kind
from zerofx.layout.buckets import Bucket
from zerofx.layout.tiers import Tier
from zerofx.policy import staging
from zerofx.policy.borrowing import FreeBuffers
from zerofx.policy.staging import Move

ROUNDS = 4  # at most so many steps, even if the places still grow
STAGING = "update staging"

Event = tuple[int, Any]  # (bytes borrowed, or 0 for a return; the identity of the value)


@dataclass(frozen=True)
class Passing:
    """A bucket on NVMe, or the tiles of one parameter there, during its update.

    sizes: bytes of its parameters and of each state. casts: bytes of copies in other formats, which
        are borrowed one after the other while the device copies follow the update.
    """

    block: tuple[Bucket, ...]
    sizes: tuple[int, ...]
    casts: tuple[int, ...]

    @property
    def index(self) -> int:
        return self.block[0].index


def passing(program: Planned, optimizer_bytes: int) -> list[Passing]:
    """Return the buckets that pass through host memory for their update, in the order of `step()`.

    optimizer_bytes: bytes of the states per element, each state in the format of the parameter.
    """
    layout = program.layout
    if not program.is_training:
        return []
    found = []
    for block in layout.blocks:
        first = block[0]
        if first.home is not Tier.NVME or not first.trainable:
            continue
        numel, width = layout.block_numel(block), first.dtype.itemsize
        states, rest = divmod(optimizer_bytes, width)
        sizes = [numel * width] * (1 + states) + [numel * rest] * (rest > 0)
        casts = [
            layout.shard_numel(b) * b.compute_dtype.itemsize
            for b in block
            if b.is_cast and b.source is Tier.DEVICE
        ]
        found.append(Passing(block, tuple(sizes), tuple(casts)))
    return found


def update_staging(program: Planned, life: Lifetimes, optimizer_bytes: int) -> list[Storage]:
    """Return the host memory of updates on NVMe: that of the adjacent buckets that need most.

    After backward, in `step()`, one bucket is read, one updated and one written at a time. Inside
    backward one is updated and the next is read. The moment depends on the speed of the update
    thread, so both are assumed to be held from the first reduction on.
    """
    moved = passing(program, optimizer_bytes)
    if not is_beside(program):
        return [_staged(p, life.end, life.end) for p in _largest(moved, staging.at_once_in_step())]
    reduced = life.times_of(lambda spec: spec.is_reduction)
    updated = life.times_of(lambda spec: spec.kind is Kind.UPDATE)
    here = [p for p in moved if p.index in updated]
    here.sort(key=lambda p: updated[p.index])
    birth = min((reduced[p.index] for p in here), default=0)
    return [_staged(p, birth, life.end) for p in _largest(here, staging.IN_BACKWARD)]


def _largest(moved: Sequence[Passing], num: int) -> Sequence[Passing]:
    """Return the `num` adjacent entries with the largest total size."""
    starts = range(max(len(moved) - num + 1, 1))
    together = (moved[at : at + num] for at in starts)
    return max(together, key=lambda some: sum(sum(p.sizes) for p in some))


def is_beside(program: Planned) -> bool:
    """Return whether updates run inside backward."""
    return program.plan.update == "in-backward"


def _staged(p: Passing, birth: int, death: int) -> Storage:
    where = Info(unit=p.block[0].label(), index=p.index)
    return Storage(Category.HOST, sum(p.sizes), STAGING, birth, death, where, is_lent=True)


# -- borrowing ----------------------------------------------------------------------------------
def place_bytes(program: Planned, lent: Sequence[Storage], optimizer_bytes: int) -> int:
    """Return the bytes of the places that a step's values borrow, in the steady state."""
    moved = {p.index: p for p in passing(program, optimizer_bytes)}
    beside = is_beside(program)
    inside = [s for s in lent if beside or s.name != STAGING]
    events = [*_of_graphs(inside, moved), *(() if beside else _of_step(list(moved.values())))]
    places: FreeBuffers[int] = FreeBuffers()
    total = -1
    for _ in range(ROUNDS):
        before, total = total, _lend(places, events)
        if total == before:
            break
    return max(total, 0)


def _lend(places: FreeBuffers[int], events: Iterable[Event]) -> int:
    """Borrow and return places; return the most bytes that they occupied."""
    held: dict[Any, int] = {}
    most = total = places.size
    for nbytes, key in events:
        if nbytes:
            found, dropped = places.take(nbytes)
            held[key] = nbytes if found is None else found
            if found is None:
                total += nbytes - (dropped or 0)
                most = max(most, total)
        else:
            size = held.pop(key)
            places.give_back(size, size)
    return most


def _of_graphs(lent: Sequence[Storage], moved: dict[int, Passing]) -> Iterator[Event]:
    """Yield the loans of forward and backward; at each time, new loans come first."""
    births: dict[int, list[Storage]] = defaultdict(list)
    deaths: dict[int, list[Storage]] = defaultdict(list)
    for s in lent:
        if s.nbytes:
            births[s.birth].append(s)
            deaths[s.death].append(s)
    for time in sorted({*births, *deaths}):
        for s in births[time]:
            sizes = moved[s.where.index].sizes if s.name == STAGING else (s.nbytes,)
            yield from ((nbytes, (id(s), k)) for k, nbytes in enumerate(sizes))
        for s in deaths[time]:
            num = len(moved[s.where.index].sizes) if s.name == STAGING else 1
            if s.name == STAGING:
                yield from _casts(moved[s.where.index])
            yield from ((0, (id(s), k)) for k in range(num))


def _of_step(moved: Sequence[Passing]) -> Iterator[Event]:
    """Yield the loans of `step()`: a bucket's reads begin before the previous one's update."""

    for move, k in staging.step_order(len(moved)):
        if move is Move.READ:
            yield from ((nbytes, (k, part)) for part, nbytes in enumerate(moved[k].sizes))
        elif move is Move.UPDATE:
            yield from _casts(moved[k])
        else:
            yield from ((0, (k, part)) for part in range(len(moved[k].sizes)))


def _casts(p: Passing) -> Iterator[Event]:
    for part, nbytes in enumerate(p.casts):
        yield nbytes, ("cast", part)
        yield 0, ("cast", part)
