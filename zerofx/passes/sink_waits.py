"""sink-waits: wait for a reduction as late as its buffer allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx.ir import ops
from zerofx.ir.program import BACKWARD, Program
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class SinkWaits(Pass):
    """Move each reduction's wait behind later compute, with at most `in_flight` under way.

    The wait moves to just before the gradient buffer that would make one too many; the rest is
    waited for at the end of backward.
    """

    name: ClassVar[str] = "sink-waits"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADS_REDUCED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_SUNK})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED})

    in_flight: int = 1

    def run(self, program: Program) -> Report:
        if BACKWARD not in program.graphs:
            return Report(False, "inference: no reductions")
        graph = program.graph(BACKWARD)
        launches = [n for n in graph.nodes if n.target in ops.REDUCES]
        moved = 0
        for i, launch in enumerate(launches):
            wait = _only_user(launch, ops.wait)
            store = _only_user(wait, ops.store_grad)
            later = launches[i + self.in_flight] if i + self.in_flight < len(launches) else None
            anchor = later if later is not None else graph.output_node()
            anchor.prepend(wait)
            anchor.prepend(store)
            moved += 1
        return Report(moved > 0, f"{moved} waits moved, {self.in_flight} in flight")


def _only_user(node: fx.Node, target: object) -> fx.Node:
    users = [u for u in node.users if u.target is target]
    assert len(users) == 1, f"{node} has {len(users)} users of kind {target}"
    return users[0]
