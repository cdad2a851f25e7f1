"""Where communication may stand: between regions. Shared by the passes that insert or move it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from zerofx.ir.graphs import regions
from zerofx.ir.meta import Role, info
from zerofx.ir.program import Program
from zerofx.plan import Plan
from zerofx.runtime.layout import Layout, UnitParam, merge_small, unit_layout


def plan_layout(
    params: Iterable[UnitParam], plan: Plan, world_size: int, persist_below: int, bucket_bytes: int
) -> Layout:
    """Return the buckets of a model: a function of model, plan, machine table and world only.

    Stage 0 is sharded over one rank and replicated over all; stages 1 and 2 keep every parameter
    gathered, so `persist_below` matters at stage 3 only.
    """
    params = list(params)
    shard_size, replicate_size = plan.axis_sizes(world_size)
    persist = persist_below if plan.stage == 3 and shard_size > 1 else 0
    layout = unit_layout(params, shard_size, replicate_size, persist)
    return merge_small(layout, params, bucket_bytes)


@dataclass(frozen=True)
class Span:
    """The half-open stretch of a graph that one region occupies: its first and last node."""

    first: fx.Node
    last: fx.Node


def spans(graph: fx.Graph) -> dict[int, Span]:
    """Return where each region begins and ends."""
    return {k: Span(nodes[0], nodes[-1]) for k, nodes in regions(graph).items()}


def reading_regions(node: fx.Node) -> set[int]:
    """Return the regions that read a value (regions contain their own views of it)."""
    found = set()
    for user in node.users:
        region = info(user).region
        if region is not None:
            found.add(region)
    return found


def bucket_uses(program: Program, graph: str) -> dict[int, list[fx.Node]]:
    """Return, for each bucket, the parameter placeholders of `graph` that lie in it."""
    assert program.layout is not None
    where = program.layout.where
    found: dict[int, list[fx.Node]] = {}
    for node in program.placeholders(graph, Role.PARAM):
        if node.users:
            bucket, _ = where[info(node).name]
            found.setdefault(bucket.index, []).append(node)
    return found
