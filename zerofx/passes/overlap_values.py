"""overlap-values: wait for collectives of values, and overlap each with independent compute.

Between two collectives of values a graph has a stretch of compute. The nodes that a launch depends
on stay before it; the other nodes of the same unit move between the launch and its wait. In
backward these are the products that compute weight gradients, while the gradient of the input is
summed over the ranks. Nodes after a wait that do not depend on it move before it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx import ops
from zerofx.ir.graphs import call, is_alias
from zerofx.ir.meta import Role, info, set_info
from zerofx.ir.program import Planned
from zerofx.ir.spec import Kind, is_exchange, kind_of, spec_of, wait_for
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class OverlapValues(Pass):
    """Insert each collective's wait, and move independent compute between launch and wait.

    moves: False places each wait directly after its launch.
    """

    name: ClassVar[str] = "overlap-values"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLACED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.VALUES_AWAITED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_CUT})

    moves: bool = True

    def run(self, program: Planned) -> Report:
        launches = moved = 0
        for gm in program.graphs.values():
            found = [n for n in gm.graph.nodes if is_exchange(n)]
            for number, launch in enumerate(found):
                _await(gm.graph, launch, number)
            rings = [n for n in gm.graph.nodes if _is_whole_exchange(n)]
            for number, node in enumerate(rings, len(found)):
                set_info(node, index=number)
            launches += len(found)
            if self.moves:
                moved += sum(_overlap(launch) for launch in found)
                moved += sum(_sink(wait_for(launch)) for launch in found)
        if not launches:
            return Report(False, "no collectives of values")
        return Report(True, f"{launches} waits, {moved} nodes between launches and waits")


def _await(graph: fx.Graph, launch: fx.Node, number: int) -> None:
    with graph.inserting_after(launch):
        wait = call(graph, ops.wait, (launch,), like=launch)
    launch.replace_all_uses_with(wait, lambda user: user is not wait)
    set_info(launch, index=number)
    set_info(wait, index=number, placed=None)


def _overlap(launch: fx.Node) -> int:
    """Move earlier compute that a launch does not need after it; return the number of nodes."""
    if _is_of_parameter(launch):
        return 0
    stretch = _before(launch)
    needed, stays = set(launch.all_input_nodes), set()
    moved: list[fx.Node] = []
    for node in stretch:  # from the last to the first
        is_free = node not in needed and not any(user in stays for user in node.users)
        if is_free and _may_move(node, launch):
            moved.append(node)
        else:
            stays.add(node)
            needed.update(node.all_input_nodes)
    wait = wait_for(launch)
    for node in reversed(moved):
        wait.prepend(node)
    return len(moved)


def _sink(wait: fx.Node) -> int:
    """Move later compute that does not need a wait before it; return the number of nodes."""
    if _is_of_parameter(wait.all_input_nodes[0]):
        return 0
    behind, moved = {wait}, 0
    node = wait.next
    while node.op == "call_function" and not _is_boundary(node):
        following = node.next
        if _may_move(node, wait) and not behind & set(node.all_input_nodes):
            wait.prepend(node)
            moved += 1
        else:
            behind.add(node)
        node = following
    return moved


def _before(launch: fx.Node) -> list[fx.Node]:
    """Return the compute between a launch and the previous collective of values, last first."""
    found: list[fx.Node] = []
    node = launch.prev
    while node.op == "call_function" and not _is_boundary(node):
        found.append(node)
        node = node.prev
    return found


def _is_boundary(node: fx.Node) -> bool:
    is_end = kind_of(node) in (Kind.WAIT, Kind.PAUSE)
    return is_exchange(node) or is_end or _is_whole_exchange(node)


def _is_whole_exchange(node: fx.Node) -> bool:
    """Return whether a node launches collectives of values and waits for them itself."""
    spec = spec_of(node)
    return spec is not None and spec.is_value and spec.is_sync


def _may_move(node: fx.Node, past: fx.Node) -> bool:
    """Return whether a node may pass another: draws keep their order, units stay together."""
    where = info(node)
    is_same = (where.unit, where.phase) == (info(past).unit, info(past).phase)
    return is_same and not where.is_random and not node.is_impure()


def _is_of_parameter(launch: fx.Node) -> bool:
    """Return whether a launch sends a parameter, whose memory is released after its readers."""
    return any(info(_root(given)).role is Role.PARAM for given in launch.all_input_nodes)


def _root(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and is_alias(node):
        node = next(iter(node.all_input_nodes))
    return node
