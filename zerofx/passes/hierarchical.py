"""hierarchical: gather and reduce in two steps, so that each node receives each byte once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zerofx import ops
from zerofx.ir.program import Planned
from zerofx.passes.base import Fact, Pass, Report

_IN_STEPS = {
    ops.all_gather: ops.all_gather_by_node,
    ops.reduce_scatter: ops.reduce_scatter_by_node,
}


@dataclass(frozen=True)
class Hierarchical(Pass):
    """Gather over the shard axis across nodes, then within; reduce within nodes, then across.

    Across nodes, each rank then sends its part to one rank of each other node, and not to all of
    them. A sum is that of nodes, each the sum of its ranks: as exact as one step, and rounded in
    another order. Refreshes of what stays gathered, blocks and rows of tables take one step.
    """

    name: ClassVar[str] = "hierarchical"
    keeps_bits: ClassVar[bool] = False  # sums have another order
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED, Fact.GRADS_REDUCED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})

    enabled: bool = False

    def run(self, program: Planned) -> Report:
        if not self.enabled or program.layout.node_size == 1:
            return Report(False, "one step")
        found = [
            node
            for gm in program.graphs.values()
            for node in gm.graph.nodes
            if node.target in _IN_STEPS
        ]
        for node in found:
            node.target = _IN_STEPS[node.target]
        return Report(bool(found), f"{len(found)} collectives in two steps")
