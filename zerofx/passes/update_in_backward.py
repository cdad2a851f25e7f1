"""update-in-backward: run the optimizer on each bucket as soon as its gradient is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx import ops
from zerofx.ir.graphs import call, regions, set_results, users_after_views
from zerofx.ir.meta import Phase, Role, info, set_info
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Kind, OpSpec, kind_of, spec_of, wait_for
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class UpdateInBackward(Pass):
    """Place each bucket's optimizer update in backward, so that its gradient is freed immediately.

    The update runs after the gradient is stored and after the region with the last read of the
    shard, whose values it overwrites: at stage 0, and in a world of one, layers compute on the
    shard itself. For a shard on NVMe, the update writes the new values into the resident copies, so
    readers of those copies count as well.
    """

    name: ClassVar[str] = "update-in-backward"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_SUNK, Fact.PREFETCHED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.UPDATES_PLACED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED})

    enabled: bool = False

    def run(self, program: Planned) -> Report:
        if not self.enabled or BACKWARD not in program.graphs:
            return Report(False, "the optimizer steps after backward")
        graph = program.graph(BACKWARD)
        shards = {info(n).index: n for n in program.placeholders(BACKWARD, Role.SHARD)}
        stored = [n for n in graph.nodes if kind_of(n) is Kind.STORE]
        followed = () if program.plan.offload.delayed else program.layout.far_buckets
        for node in stored:
            index = info(node).index
            _place(graph, node, shards[index], index in followed)
        _return_no_gradients(program)
        return Report(bool(stored), f"{len(stored)} updates")


def _place(graph: fx.Graph, stored: fx.Node, shard: fx.Node, is_followed: bool) -> None:
    order = {n: i for i, n in enumerate(graph.nodes)}
    last = max([stored, *_readers(shard, is_followed)], key=order.__getitem__)
    region = info(last).region
    if region is not None:
        last = regions(graph)[region][-1]
    with graph.inserting_after(last):
        node = call(graph, ops.update, (stored, shard, info(stored).index))
    where = info(stored)
    set_info(node, phase=Phase.BACKWARD, unit=where.unit, index=where.index)


def _return_no_gradients(program: Planned) -> None:
    """Remove the gradient shards from backward's results: they are freed before it ends."""
    left = [
        (spec, node)
        for spec, node in zip(program.outputs[BACKWARD], program.results(BACKWARD), strict=True)
        if spec.role is not Role.SHARD_GRAD
    ]
    program.outputs[BACKWARD] = tuple(spec for spec, _ in left)
    set_results(program.graph(BACKWARD), [node for _, node in left])


def _readers(shard: fx.Node, is_followed: bool) -> list[fx.Node]:
    """Return the nodes that read the shard; a gather or reload reads it until its wait.

    is_followed: include the readers of a resident copy of the shard.
    """
    found = list(users_after_views(shard))
    if is_followed:
        for node in [n for n in found if _is(n, lambda s: s.stays and s.kind is Kind.MAKE)]:
            found += users_after_views(node)
        for node in [n for n in found if _is(n, lambda s: s.is_reload)]:
            found += users_after_views(wait_for(node))
    sent = [n for n in found if _is(n, lambda s: s.is_gather or s.is_reload)]
    return found + [wait_for(node) for node in sent]


def _is(node: fx.Node, test: Callable[[OpSpec], bool]) -> bool:
    spec = spec_of(node)
    return spec is not None and test(spec)
