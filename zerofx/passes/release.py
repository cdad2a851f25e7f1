"""release: drop each gathered copy after its last reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx import ops
from zerofx.ir.graphs import call, users_after_views
from zerofx.ir.meta import info, set_info
from zerofx.ir.program import Planned
from zerofx.ir.spec import Kind, is_wait_of, kind_of, wait_for
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.placement import Span, spans


@dataclass(frozen=True)
class Release(Pass):
    """Insert `release` after the last region that reads a gathered bucket."""

    name: ClassVar[str] = "release"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED})

    def run(self, program: Planned) -> Report:
        released = 0
        for gm in program.graphs.values():
            where, nodes = spans(gm.graph), list(gm.graph.nodes)
            place = {n: i for i, n in enumerate(nodes)}
            for node in nodes:
                if is_wait_of(node, lambda launch: launch.is_gather and not launch.stays):
                    _release(gm.graph, node, where, place)
                    released += 1
        return Report(released > 0, f"{released} releases")


def _release(
    graph: fx.Graph, full: fx.Node, where: dict[int, Span], place: dict[fx.Node, int]
) -> None:
    readers = list(users_after_views(full))
    if any(r.op == "output" for r in readers):
        return  # kept for backward: the call's context holds it
    last = max([full, *(_end(reader, where) for reader in readers)], key=place.__getitem__)
    with graph.inserting_after(last):
        node = call(graph, ops.release, (full,))
    set_info(node, phase=info(full).phase, unit=info(full).unit, index=info(full).index)


def _end(reader: fx.Node, where: dict[int, Span]) -> fx.Node:
    """Return the node after which a reader is done: its region's last, or the wait of a launch."""
    region = info(reader).region
    if region is not None:
        return where[region].last
    return wait_for(reader) if kind_of(reader) is Kind.LAUNCH else reader
