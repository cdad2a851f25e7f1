"""secondary-shards: gather in backward from a second copy of the parameters, kept in each node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx import ops
from zerofx.ir.graphs import add_placeholder, call, set_results
from zerofx.ir.meta import OutputInfo, Phase, Role, info, set_info, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.spec import spec_of, wait_for
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class SecondaryShards(Pass):
    """Keep this rank's part of each gathered bucket for backward, which gathers within the node.

    A bucket that both graphs gather is copied in part after its last wait in forward. This
    secondary shard is saved for backward, whose gathers of the bucket read it instead of the shard.
    It is freed after the last of them. Every value stays the same, since a part of what forward
    gathered is sent on.

    Source: ZeRO++ (arXiv 2306.10209), hierarchical weight partition (hpZ).
    """

    name: ClassVar[str] = "secondary-shards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})

    enabled: bool = False

    def run(self, program: Planned) -> Report:
        if not self.enabled or program.layout.node_size == 1:
            return Report(False, "one copy of the shards")
        if BACKWARD not in program.graphs:
            return Report(False, "no backward gathers again")
        first = {info(gather).index: gather for gather in _gathers(program.graph(FORWARD))}
        again: dict[int, list[fx.Node]] = {}
        for gather in _gathers(program.graph(BACKWARD)):
            if info(gather).index in first:
                again.setdefault(info(gather).index, []).append(gather)
        for index, gathers in again.items():
            held = _keep(program, first[index])
            for gather in gathers:
                _gather_from(program.graph(BACKWARD), gather, held)
        return Report(bool(again), f"{len(again)} buckets")


def _gathers(graph: fx.Graph) -> list[fx.Node]:
    """Return the gathers over the shard axis whose result does not stay gathered."""
    found = ((n, spec_of(n)) for n in graph.nodes)
    return [n for n, s in found if s is not None and s.is_gather and not s.stays]


def _keep(program: Planned, gather: fx.Node) -> fx.Node:
    """Copy and save this rank's part of what a gather delivers; return backward's placeholder."""
    full, where = wait_for(gather), info(gather)
    bucket = program.layout.buckets[where.index]
    graph = program.graph(FORWARD)
    with graph.inserting_after(full):
        numel = program.layout.secondary_numel(bucket)
        made = call(graph, ops.secondary_shard, (full, bucket.index, numel))
    set_info(made, phase=Phase.FORWARD, unit=where.unit, index=bucket.index)
    position = sum(1 for s in program.outputs[FORWARD] if s.role is Role.SAVED)
    name = f"secondary_{bucket.index}"
    set_results(graph, [*program.results(FORWARD), made])
    program.outputs[FORWARD] += (OutputInfo(Role.SAVED, name, position),)
    return add_placeholder(
        program.graph(BACKWARD), name, value(made), Role.SAVED, name=name, index=position,
        phase=Phase.BACKWARD, unit=where.unit,
    )  # fmt: skip


def _gather_from(graph: fx.Graph, gather: fx.Node, held: fx.Node) -> None:
    """Replace a gather over the shard axis by one of secondary shards, within the node."""
    where = info(gather)
    bucket, numel = gather.args[1:3]
    with graph.inserting_before(gather):
        made = call(graph, ops.gather_secondary, (held, bucket, numel))
    set_info(made, phase=where.phase, unit=where.unit, index=where.index)
    gather.replace_all_uses_with(made)
    graph.erase_node(gather)
