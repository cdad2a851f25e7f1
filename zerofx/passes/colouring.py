"""Slot assignment: colour the live ranges of communication buffers; shared by several passes."""

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
    """Assign slots to gathered and gradient buffers; return the size of each slot in bytes.

    A slot holds one buffer at a time, and only within one call. A value that outlives its call (a
    kept bucket) gets memory of its own, and a gradient that is reduced in place uses the memory of
    p.grad. All graphs share one pool of slots, since calls never overlap. The largest buffers
    choose first, so that no small buffer occupies a slot that a larger one needs at that time.
    """
    buffers = [b for gm in program.graphs.values() for b in _buffers(gm.graph, program.layout)]
    slots: list[_Slot] = []
    for number, buffer in sorted(enumerate(buffers), key=lambda b: -b[1].nbytes):
        # the smallest free slot; slots are created in order of decreasing size
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
    """A buffer that needs a slot, from its allocating node to the node after which it is free.

    start, stop: the positions of these nodes in the graph.
    """

    node: fx.Node
    end: fx.Node
    start: int
    stop: int
    nbytes: int


class _Slot:
    """The buffers that share one slot in turn, per graph, in order of use.

    first: the smallest number, in program order, among its buffers.
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
    """Yield the buffers that need a slot, in graph order."""
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
    """Return the node after which the buffer is free, or None if it outlives the call."""
    if kind_of(node) is Kind.LAUNCH:
        return next((u for u in wait_for(node).users if kind_of(u) is Kind.RELEASE), None)
    return wait_for(next(u for u in users_after_views(node) if is_reduction(u)))
