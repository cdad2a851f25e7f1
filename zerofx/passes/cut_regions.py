"""cut-regions: group compute into regions, with a cut wherever execution moves to another unit.

The tiles of a tiled layer are cut apart like units, since each gathers its own rows. A fused node
is a region of its own, because the schedule calls its kernel.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx.ir.graphs import is_alias, is_broadcast, is_compute, is_fused, root_producer
from zerofx.ir.meta import info, set_info
from zerofx.ir.program import Planned
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class CutRegions(Pass):
    """Number the compute regions of each graph; later passes move launches only between regions.

    Regions are cut once, before bucketing and prefetching, so that identical layers give identical
    regions regardless of the collectives around them.
    """

    name: ClassVar[str] = "cut-regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED, Fact.SPLIT})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_CUT})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})

    def run(self, program: Planned) -> Report:
        counts = []
        for gm in program.graphs.values():
            _getitems_behind_producers(gm.graph)
            counts.append(_number(gm.graph))
            _repeat_broadcasts(gm.graph)
        return Report(True, f"{'+'.join(map(str, counts))} regions")


def _getitems_behind_producers(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is operator.getitem:
            root = root_producer(node)
            last = root
            while (
                last.next.op == "call_function"
                and last.next.target is operator.getitem
                and (root_producer(last.next) is root)
            ):
                last = last.next
            if last is not node and node.prev is not last:
                last.append(node)


def _number(graph: fx.Graph) -> int:
    region, place, is_kernel, is_cut = -1, None, False, False
    for node in graph.nodes:
        if not is_compute(node):
            is_cut |= node.op == "call_function"  # a collective of values separates regions
            continue
        here = info(node).unit, info(node).tile
        if is_kernel or is_fused(node):
            begins = not _is_item_of_kernel(node)
        else:
            begins = here != place and not (region >= 0 and _follows(node, region))
        begins, is_cut = begins or is_cut, False
        if begins:
            region, place, is_kernel = region + 1, here, is_fused(node)
        set_info(node, region=region)
    return region + 1


def _repeat_broadcasts(graph: fx.Graph) -> None:
    """Repeat broadcast views in every region that reads them, so that none crosses regions.

    A compiled region would return a broadcast view as a full-size tensor of its own, with a layout
    that differs from the one its reader was compiled for.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in reversed(list(order)):
        if not is_compute(node) or not is_broadcast(node):
            continue
        copies: dict[int | None, fx.Node] = {}
        for user in sorted(node.users, key=order.__getitem__):
            region = info(user).region
            if not is_compute(user) or region == info(node).region:
                continue
            if region not in copies:
                with graph.inserting_before(user):
                    copies[region] = graph.node_copy(node, lambda n: n)
                set_info(copies[region], region=region)
                order[copies[region]] = order[user]  # for its source, visited next
            user.replace_input_with(node, copies[region])
        if not node.users:
            graph.erase_node(node)


def _is_item_of_kernel(node: fx.Node) -> bool:
    return node.target is operator.getitem and is_fused(root_producer(node))


def _follows(node: fx.Node, region: int) -> bool:
    """Return whether a node stays in the region before it although its unit differs.

    Views and getitems stay with their source, and the sum of two gradients stays with the unit that
    produced the second one. Otherwise layers with and without such a node would be cut differently.
    """
    if node.target is operator.getitem or is_alias(node):
        return info(node.args[0]).region == region  # type: ignore[arg-type]
    return bool(node.meta.get("is_gradient_acc"))
