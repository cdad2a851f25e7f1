"""spill-activations: move offloaded values on from the host to NVMe, and back through the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx import ops
from zerofx.ir.graphs import call, set_results
from zerofx.ir.meta import Info, info, nbytes, set_info, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.spec import OpSpec, is_wait_of, spec_of
from zerofx.layout.tiers import Tier
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.placement import Units


@dataclass(frozen=True)
class SpillActivations(Pass):
    """Write each offloaded value to NVMe from the host, and read it back before its reload.

    Values that arrive together are written while the next group is copied, and waited for before
    the group after that. The host therefore holds the values of two groups, regardless of the
    total. A read is launched `distance` units ahead of its value's reload, which is itself ahead of
    the use.
    """

    name: ClassVar[str] = "spill-activations"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.SPLIT, Fact.REGIONS_CUT})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})

    enabled: bool = False
    distance: int = 1

    def run(self, program: Planned) -> Report:
        if not self.enabled or BACKWARD not in program.graphs:
            return Report(False, "nothing goes farther than the host")
        graph = program.graph(FORWARD)
        arrivals = [n for n in graph.nodes if is_wait_of(n, _is_copy_to(Tier.HOST))]
        stored = _write_out(graph, arrivals)
        results = [stored.get(r, r) if r is not None else r for r in program.results(FORWARD)]
        set_results(graph, results)
        num = _read_back(program.graph(BACKWARD), self.distance)
        assert num == len(stored), f"{len(stored)} values are written, {num} read"
        size = sum(nbytes(value(n)) for n in stored)
        return Report(num > 0, f"{num} values on NVMe, {size} bytes")


def _is_copy_to(tier: Tier) -> Callable[[OpSpec], bool]:
    return lambda spec: spec.is_copy and spec.lands is tier


def _write_out(graph: fx.Graph, arrivals: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Write the arriving values, one run of waits after another; return the replacement of each."""
    stored: dict[fx.Node, fx.Node] = {}
    under_way: list[fx.Node] = []

    def wait_for_all(before: fx.Node) -> None:
        for write in under_way:
            with graph.inserting_before(before):
                wait = call(graph, ops.wait, (write,))
            stored[write.all_input_nodes[0]] = _describe(wait, info(write))
        under_way.clear()

    for run in _runs(arrivals):
        wait_for_all(run[0])
        behind = run[-1].next
        for arrival in run:
            where = info(arrival)
            name = f"{where.unit}.{where.name}" if where.unit else where.name
            with graph.inserting_before(behind):
                write = call(graph, ops.write_out, (arrival, name))
            under_way.append(_describe(write, where))
    wait_for_all(graph.output_node())
    return stored


def _runs(arrivals: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Group waits that directly follow one another."""
    found: list[list[fx.Node]] = []
    for arrival in arrivals:
        if found and found[-1][-1].next is arrival:
            found[-1].append(arrival)
        else:
            found.append([arrival])
    return found


def _read_back(graph: fx.Graph, distance: int) -> int:
    """Insert the read of each value before its reload; return the number of reads."""
    to_device = _is_copy_to(Tier.DEVICE)
    reloads = [n for n in graph.nodes if (spec := spec_of(n)) is not None and to_device(spec)]
    units = Units(graph, distance)
    gaps = {region: _gap(span.first) for region, span in units.spans.items()}
    reads = []
    for reload in reloads:
        here = _next_region(reload)
        ahead = units.launch_region(here)
        # after the waits at this position: the reloads that they complete have left the host
        before = gaps[ahead] if ahead == here else units.spans[ahead].first
        with graph.inserting_before(before):
            read = call(graph, ops.read_back, (reload.all_input_nodes[0],))
        reads.append(_describe(read, info(reload)))
    for reload, read in zip(reloads, reads, strict=True):
        with graph.inserting_before(reload):
            arrived = _describe(call(graph, ops.wait, (read,)), info(reload))
        reload.replace_input_with(reload.all_input_nodes[0], arrived)
    return len(reloads)


def _gap(first: fx.Node) -> fx.Node:
    """Return the first node between a region and the one before it."""
    while first.prev.op == "call_function" and info(first.prev).region is None:
        first = first.prev
    return first


def _next_region(node: fx.Node) -> int:
    while (region := info(node).region) is None:
        node = node.next
    return region


def _describe(node: fx.Node, where: Info) -> fx.Node:
    set_info(
        node, phase=where.phase, unit=where.unit, module=where.module, line=where.line,
        name=where.name, index=where.index,
    )  # fmt: skip
    return node
