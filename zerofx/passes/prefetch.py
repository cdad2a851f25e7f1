"""prefetch-gathers: launch each all-gather some buckets before its wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zerofx.ir import ops
from zerofx.ir.program import Program
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class PrefetchGathers(Pass):
    """Launch each gather just before the wait that stands `distance` buckets ahead of its own.

    The transfer is then covered by the compute of `distance` buckets, and at most
    `distance` + 1 gathered buckets are held at once.
    """

    name: ClassVar[str] = "prefetch-gathers"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED, Fact.RELEASED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.PREFETCHED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED})

    distance: int = 1

    def run(self, program: Program) -> Report:
        moved = 0
        for gm in program.graphs.values():
            waits = [n for n in gm.graph.nodes if n.target is ops.wait]
            waits = [n for n in waits if n.args[0].target in ops.GATHERS]
            for i, node in enumerate(waits):
                launch = node.args[0]
                target = waits[max(0, i - self.distance)]
                if target is not node:
                    target.prepend(launch)
                    moved += 1
        return Report(moved > 0, f"{moved} launches moved")
