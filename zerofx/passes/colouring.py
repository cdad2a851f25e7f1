"""Colour communication buffers with slots; shared by the passes that ask what slots cost."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from zerofx.ir.graphs import is_in_place, users_after_views
from zerofx.ir.meta import nbytes, value
from zerofx.ir.program import Planned
from zerofx.ir.spec import Kind, is_reduction, kind_of, set_slot, takes_slot, wait_for
from zerofx.layout.buckets import Layout


def assign(program: Planned) -> list[int]:
    """Write a slot into every gather and gradient buffer that fits one; return the slots' bytes.

    A slot holds one buffer at a time and only within one call: what leaves its call (a kept
    bucket) gets memory of its own, and what is reduced in place lies in p.grad's. Slots of all
    graphs share one pool, since calls never overlap.

    The largest buffers choose first, so that none lies in a slot that a larger one needs then.
    """
    buffers = [b for gm in program.graphs.values() for b in _buffers(gm.graph, program.layout)]
    slots: list[_Slot] = []
    for number, buffer in sorted(enumerate(buffers), key=lambda b: -b[1].nbytes):
        # the smallest that is free: none is smaller than those which chose before
        slot = next((s for s in reversed(slots) if s.is_free(buffer)), None)
        if slot is None:
            slot = _Slot()
            slots.append(slot)
        slot.take(buffer, number)
    slots.sort(key=lambda s: s.first)  # numbered in the order of first use
    for number, slot in enumerate(slots):
        for buffer in slot.held:
            _write(buffer, number)
    return [max(b.nbytes for b in slot.held) for slot in slots]


@dataclass(frozen=True, eq=False)
class _Buffer:
    """What needs a slot from the node that takes it to the one behind which it is free.

    start, stop: where these nodes stand in the graph.
    """

    node: fx.Node
    end: fx.Node
    start: int
    stop: int
    nbytes: int


class _Slot:
    """The buffers that take turns in one place, by graph in the order of their turns.

    first: the number of the program's buffer that takes it first.
    """

    def __init__(self) -> None:
        self.held: list[_Buffer] = []
        self.first = sys.maxsize
        self._turns: dict[fx.Graph, list[_Buffer]] = {}

    def is_free(self, buffer: _Buffer) -> bool:
        turns = self._turns.get(buffer.node.graph, [])
        at = bisect_left(turns, buffer.start, key=_start)
        is_before = at == len(turns) or buffer.stop < turns[at].start
        return is_before and (at == 0 or turns[at - 1].stop < buffer.start)

    def take(self, buffer: _Buffer, number: int) -> None:
        insort(self._turns.setdefault(buffer.node.graph, []), buffer, key=_start)
        self.held.append(buffer)
        self.first = min(self.first, number)


def _start(buffer: _Buffer) -> int:
    return buffer.start


def _buffers(graph: fx.Graph, layout: Layout) -> Iterator[_Buffer]:
    """Yield what needs a slot, in order."""
    places = {node: at for at, node in enumerate(graph.nodes)}
    for node, at in places.items():
        if takes_slot(node):
            end = _end(node)
            if end is not None and not is_in_place(node, layout):
                yield _Buffer(node, end, at, places[end], nbytes(value(node)))


def _write(buffer: _Buffer, slot: int) -> None:
    set_slot(buffer.node, slot)
    if kind_of(buffer.end) is Kind.RELEASE:
        set_slot(buffer.end, slot)


def _end(node: fx.Node) -> fx.Node | None:
    """Return the node behind which the buffer is free, None where it leaves the call."""
    if kind_of(node) is Kind.LAUNCH:
        return next((u for u in wait_for(node).users if kind_of(u) is Kind.RELEASE), None)
    return wait_for(next(u for u in users_after_views(node) if is_reduction(u)))
