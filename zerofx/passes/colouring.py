"""Slot assignment: colour the live ranges of communication buffers; shared by several passes."""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, sub

from torch import fx

from zerofx import ops
from zerofx.analysis.memory.memory import memory
from zerofx.analysis.memory.standing import is_slot
from zerofx.ir.graphs import call, is_in_place, users_after_views
from zerofx.ir.meta import info, nbytes, set_info, value
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Kind, is_reduction, kind_of, set_slot, takes_slot, wait_for
from zerofx.policy import resting


def assign(program: Planned) -> list[int]:
    """Assign slots to gathered and gradient buffers; return the size of each slot in bytes.

    A slot holds one buffer at a time, and only within one call. A value that outlives its call (a
    kept bucket) gets memory of its own, and a gradient that is reduced in place uses the memory of
    p.grad. All graphs share one pool of slots, since calls never overlap.

    Large slots of forward are kept between steps (`resting.frees_slot`). Backward therefore uses
    them first, and frees each other slot after its last buffer if more compute follows
    (`free_slot`). Several orders in which buffers choose are tried. The one with the lowest peak of
    the whole step is used.
    """
    buffers = list(_buffers(program))
    slots = _best(program, buffers, _colourings(buffers))
    # The largest come first, so that those of several programs, which share them, match in size;
    # among equal ones, that of the first use.
    slots.sort(key=lambda s: (-s.nbytes, min(b.number for b in s.held)))
    for number, slot in enumerate(slots):
        for buffer in slot.held:
            _write(buffer, number)
    for number, slot in enumerate(slots):
        if end := slot.end(program, number):
            with end.graph.inserting_after(end):
                node = call(end.graph, ops.free_slot, (number,))
            set_info(node, phase=info(end).phase, unit=info(end).unit)
    return [slot.nbytes for slot in slots]


@dataclass(frozen=True, eq=False)
class _Buffer:
    """A buffer that needs a slot, from its allocating node to the node after which it is free.

    start, stop: the times of these nodes, counted over all graphs. number: its place in program
    order. is_kept: it is forward's, whose slots are kept between steps.
    """

    node: fx.Node
    end: fx.Node
    start: int
    stop: int
    nbytes: int
    number: int
    is_kept: bool


class _Slot:
    """The buffers that share one slot in turn, in order of use.

    nbytes: the size of its first buffer, which is the largest.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_kept = False
        self.held: list[_Buffer] = []

    def is_free(self, buffer: _Buffer) -> bool:
        at = bisect_left(self.held, buffer.start, key=_start)
        is_before = at == len(self.held) or buffer.stop < self.held[at].start
        is_after = at == 0 or self.held[at - 1].stop < buffer.start
        return buffer.nbytes <= self.nbytes and is_before and is_after

    def take(self, buffer: _Buffer) -> None:
        insort(self.held, buffer, key=_start)
        self.is_kept |= buffer.is_kept

    def is_freed(self, program: Planned, number: int) -> bool:
        """Return whether the slot has no memory between steps."""
        kept = program.pool.stay | ({number} if self.is_kept else set())
        return resting.frees_slot(program.layout, number, self.nbytes, kept)

    def end(self, program: Planned, number: int) -> fx.Node | None:
        """Return the node after which backward frees the slot, None if it is kept to the end."""
        end = self.held[-1].end
        is_in_backward = BACKWARD in program.graphs and end.graph is program.graph(BACKWARD)
        if not (is_in_backward and self.is_freed(program, number)):
            return None
        return end if any(info(n).region is not None for n in _nodes_after(end)) else None


def _start(buffer: _Buffer) -> int:
    return buffer.start


def _nodes_after(node: fx.Node) -> Iterator[fx.Node]:
    while node.op != "output":
        node = node.next
        yield node


# -- the choice of slots --------------------------------------------------------------------------
def _colourings(buffers: Sequence[_Buffer]) -> Iterator[list[_Slot]]:
    """Yield the slots for several orders of choice.

    The largest choose first, so that none occupies a slot that a larger one needs at that time; in
    two orders those of forward come before those of backward. Among equal ones, the earliest or
    (there) the latest of backward chooses first, and gets a slot that is kept. Under each, every
    further layer adds the same bytes to the peak, as a search supposes. The fourth order, in which
    sizes come first and then the latest of backward, does not keep to that, and is left out.
    """
    for is_of_size, sign in ((True, 1), (False, 1), (False, -1)):
        yield _coloured(
            sorted(
                buffers,
                key=lambda b: (
                    not (is_of_size or b.is_kept),
                    -b.nbytes,
                    not b.is_kept,
                    b.number if b.is_kept else sign * b.number,
                ),
            )
        )


def _coloured(buffers: Iterable[_Buffer]) -> list[_Slot]:
    """Return the slots of buffers that choose one after the other.

    Each takes the smallest slot that is free and large enough, if possible one that is kept.
    """
    slots: list[_Slot] = []
    for buffer in buffers:
        free = (s for s in slots if s.is_free(buffer))
        slot = min(free, key=lambda s: (not s.is_kept, s.nbytes), default=None)
        if slot is None:
            slot = _Slot(buffer.nbytes)
            slots.append(slot)
        slot.take(buffer)
    return slots


def _best(
    program: Planned, buffers: Sequence[_Buffer], colourings: Iterable[list[_Slot]]
) -> list[_Slot]:
    """Return the slots with the lowest peak of the step, and then the fewest bytes."""
    found = {_profile(program, slots): slots for slots in reversed(list(colourings))}
    if len(found) == 1:
        return next(iter(found.values()))
    others = _others(program, buffers)

    def cost(profile: tuple[tuple[int, int, int], ...]) -> tuple[int, int]:
        change = [0] * (len(others) + 1)
        for size, birth, death in profile:
            change[birth] += size
            change[min(death, len(others) - 1) + 1] -= size
        held = accumulate(change[:-1])
        return max(map(add, others, held)), sum(size for size, _, _ in profile)

    return found[min(reversed(found), key=cost)]


def _profile(program: Planned, slots: Sequence[_Slot]) -> tuple[tuple[int, int, int], ...]:
    """Return (bytes, first time, last time) of the memory of each slot, in a fixed order."""
    found = []
    for number, slot in enumerate(slots):
        is_kept = not slot.is_freed(program, number)
        stop = slot.held[-1].stop if slot.end(program, number) else sys.maxsize
        found.append((slot.nbytes, 0 if is_kept else slot.held[0].start, stop))
    return tuple(sorted(found))


def _others(program: Planned, buffers: Sequence[_Buffer]) -> list[int]:
    """Return the bytes at each time besides those of slots."""
    for number, buffer in enumerate(buffers):
        _write(buffer, number)
    program.slot_bytes = tuple(buffer.nbytes for buffer in buffers)
    found = memory(program, accumulation=1, no_sync=False)
    change = [0] * (len(found.curve) + 1)
    for storage in filter(is_slot, found.storages):
        change[storage.birth] += storage.nbytes
        change[storage.death + 1] -= storage.nbytes
    return list(map(sub, found.curve, accumulate(change[:-1])))


def _buffers(program: Planned) -> Iterator[_Buffer]:
    """Yield the buffers that need a slot, in program order."""
    numbers, first = itertools.count(), 0
    for name in sorted(program.graphs, key=lambda name: name == BACKWARD):
        nodes = list(program.graph(name).nodes)
        times = {node: time for time, node in enumerate(nodes, first)}
        first += len(nodes)
        for node, time in times.items():
            end = _end(node) if takes_slot(node) else None
            if end is not None and not is_in_place(node, program.layout):
                size, is_kept = nbytes(value(node)), name != BACKWARD
                yield _Buffer(node, end, time, times[end], size, next(numbers), is_kept)


def _write(buffer: _Buffer, slot: int) -> None:
    set_slot(buffer.node, slot)
    if kind_of(buffer.end) is Kind.RELEASE:
        set_slot(buffer.end, slot)


def _end(node: fx.Node) -> fx.Node | None:
    """Return the node after which the buffer is free, or None if it outlives the call."""
    if kind_of(node) is Kind.LAUNCH:
        return next((u for u in wait_for(node).users if kind_of(u) is Kind.RELEASE), None)
    return wait_for(next(u for u in users_after_views(node) if is_reduction(u)))
