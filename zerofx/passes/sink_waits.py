"""sink-waits: wait for a reduction as late as its buffer allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx.ir.meta import info
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Kind, is_reduction, kind_of
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class SinkWaits(Pass):
    """Move each reduction's wait after later compute, with at most `in_flight` reductions pending.

    A wait moves to just before the reduction that would exceed the limit. If that reduction is a
    tile's, the wait moves before its gradient buffer, which then reuses the memory of the completed
    one. All remaining waits are at the end of backward.
    """

    name: ClassVar[str] = "sink-waits"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADS_REDUCED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_SUNK})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED})

    in_flight: int = 1

    def run(self, program: Planned) -> Report:
        if BACKWARD not in program.graphs:
            return Report(False, "inference: no reductions")
        graph = program.graph(BACKWARD)
        launches = [n for n in graph.nodes if is_reduction(n)]
        moved = 0
        for i, launch in enumerate(launches):
            wait = _only_user(launch, Kind.WAIT)
            store = _only_user(wait, Kind.STORE)
            later = launches[i + self.in_flight] if i + self.in_flight < len(launches) else None
            anchor = later if later is not None else graph.output_node()
            if later is not None and _is_tile(program, later):
                anchor = _buffer_of(later)
            anchor.prepend(wait)
            anchor.prepend(store)
            moved += 1
        return Report(moved > 0, f"{moved} waits moved, {self.in_flight} in flight")


def _is_tile(program: Planned, launch: fx.Node) -> bool:
    return program.layout.buckets[info(launch).index].tile is not None


def _buffer_of(launch: fx.Node) -> fx.Node:
    """Return the gradient buffer that a reduction sends."""
    node = launch
    while kind_of(node) is not Kind.MAKE:
        node = node.all_input_nodes[0]
    return node


def _only_user(node: fx.Node, kind: Kind) -> fx.Node:
    users = [u for u in node.users if kind_of(u) is kind]
    assert len(users) == 1, f"{node} has {len(users)} users of kind {kind.value}"
    return users[0]
