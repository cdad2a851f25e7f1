"""prefetch-gathers: launch each all-gather some buckets before its wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx.ir.meta import Phase, info
from zerofx.ir.program import Planned
from zerofx.ir.spec import Kind, is_wait_of, kind_of
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class PrefetchGathers(Pass):
    """Launch each gather just before the wait that is `distance` buckets ahead of its own.

    The compute of `distance` buckets then overlaps the transfer, and at most `distance` + 1
    all-gathers are in flight at once. A refresh among all-gathers is launched with the next of them
    and does not count, since it transfers nothing in most calls.

    In backward, a tile's gather is launched where the tile `distance` before it is released, if
    that tile's gradient is computed then and can overlap the transfer. This way one tile fewer is
    gathered at a time.
    """

    name: ClassVar[str] = "prefetch-gathers"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED, Fact.RELEASED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.PREFETCHED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED})

    distance: int = 1

    def run(self, program: Planned) -> Report:
        if self.distance == 0:
            return Report(False, "every launch stays with its wait")
        tiles = {b.index for b in program.layout.buckets if b.tile is not None}
        moved = sum(self._launch_ahead(gm.graph, tiles) for gm in program.graphs.values())
        return Report(moved > 0, f"{moved} launches moved")

    def _launch_ahead(self, graph: fx.Graph, tiles: set[int]) -> int:
        waits = [n for n in graph.nodes if is_wait_of(n, lambda launch: launch.is_gather)]
        steps = [n for n in waits if is_wait_of(n, lambda launch: not launch.stays)] or waits
        counted = set(steps)
        ahead, moved = 0, 0  # `ahead`: the number of steps before the wait
        for wait in waits:
            target = steps[max(0, min(ahead, len(steps) - 1) - self.distance)]
            # a refresh before the first step has no earlier step to be launched with
            is_behind_target = target is not wait and (wait in counted or ahead > 0)
            released = self._released_before(wait, steps, ahead, tiles) if wait in counted else None
            if released is not None:
                released.append(wait.args[0])
                moved += 1
            elif is_behind_target and wait.args[0].next is not target:
                target.prepend(wait.args[0])
                moved += 1
            ahead += wait in counted
        return moved

    def _released_before(
        self, wait: fx.Node, steps: list[fx.Node], ahead: int, tiles: set[int]
    ) -> fx.Node | None:
        """Return the release after which a tile is gathered, or None for the usual position."""
        if ahead < self.distance or info(wait).phase is not Phase.BACKWARD:
            return None
        before = steps[ahead - self.distance]
        if not {info(wait).index, info(before).index} <= tiles:
            return None
        release = next((u for u in before.users if kind_of(u) is Kind.RELEASE), None)
        if release is None or wait < release:
            return None
        node, is_covered = release, False
        while node is not wait:
            node = node.next
            is_covered |= info(node).region is not None
        return release if is_covered else None
