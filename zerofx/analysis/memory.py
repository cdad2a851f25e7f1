"""How many bytes a rank holds, step by step."""

from __future__ import annotations

from torch import fx

from zerofx.analysis.liveness import live_ranges
from zerofx.ir.program import Program


def resident_curve(graph: fx.Graph) -> list[int]:
    """Return the live bytes at each node of a graph, ranges inclusive at both ends."""
    change = [0] * (len(graph.nodes) + 1)
    for r in live_ranges(graph):
        change[r.birth] += r.nbytes
        change[r.death + 1] -= r.nbytes
    curve, now = [], 0
    for delta in change[:-1]:
        now += delta
        curve.append(now)
    return curve


def peak_bytes(program: Program) -> int:
    """Return the high-water mark over the program's graphs."""
    return max(max(resident_curve(gm.graph), default=0) for gm in program.graphs.values())
