"""sync-buffers: make buffers that forward updates follow rank 0, as they do under DDP."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx import ops
from zerofx.ir.graphs import call, set_results
from zerofx.ir.meta import Role, set_info
from zerofx.ir.program import FORWARD, Planned
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class SyncBuffers(Pass):
    """Broadcast rank 0's new value of every buffer that forward updates, all in one message."""

    name: ClassVar[str] = "sync-buffers"
    keeps_bits: ClassVar[bool] = False  # intended: other ranks take rank 0's statistics
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED, Fact.SPLIT})

    enabled: bool = True

    def run(self, program: Planned) -> Report:
        if not self.enabled:
            return Report(False, "one rank, or local buffers")
        results = program.results(FORWARD)
        at = [
            i
            for i, spec in enumerate(program.outputs[FORWARD])
            if spec.role is Role.BUFFER_UPDATE and isinstance(results[i], fx.Node)
        ]
        if not at:
            return Report(False, "no buffer is updated")
        graph = program.graph(FORWARD)
        with graph.inserting_before(graph.output_node()):
            synced = call(graph, ops.sync_buffers, ([results[i] for i in at],))
            for k, i in enumerate(at):
                results[i] = call(graph, operator.getitem, (synced, k))
                set_info(results[i], name=program.outputs[FORWARD][i].name)
        set_results(graph, results)
        return Report(True, f"{len(at)} buffers follow rank 0")
