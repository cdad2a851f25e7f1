"""join-sums: sum the small gradients of a bucket over the tensor axis in one message.

If the sequence is sharded, each rank holds one summand of the gradients of norms and biases. Each
such sum is a collective of a few kilobytes. The sums of one bucket that only its reduction reads
are merged into one collective. Every sum is launched as soon as its summands are ready.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from zerofx import ops
from zerofx.ir.graphs import after_pause, call, root_producer
from zerofx.ir.meta import Hole, Placed, Role, info, nbytes, set_info, value
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Kind, is_exchange, kind_of
from zerofx.layout.placements import R
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.placement import Span, spans


@dataclass(frozen=True)
class JoinSums(Pass):
    """Merge the sums over the tensor axis that feed one bucket's gradients into one collective.

    below_bytes: a sum of this size or larger stays separate, since joining values copies them.
    """

    name: ClassVar[str] = "join-sums"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETS_ASSIGNED, Fact.REGIONS_CUT})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADS_REDUCED})

    below_bytes: int = 256 << 10

    def run(self, program: Planned) -> Report:
        if BACKWARD not in program.graphs:
            return Report(False, "inference: no gradients")
        graph = program.graph(BACKWARD)
        groups: dict[Hashable, list[fx.Node]] = defaultdict(list)
        for spec, node in zip(program.outputs[BACKWARD], program.results(BACKWARD), strict=True):
            if spec.role is not Role.GRAD or not isinstance(node, fx.Node) or not _is_sum(node):
                continue
            is_small = nbytes(value(node)) < self.below_bytes
            bucket = program.layout.where[spec.name][0].index
            placed = info(node.all_input_nodes[0]).placed
            lies = None if placed is None else placed.gives
            groups[(bucket, value(node).dtype, lies) if is_small else node].append(node)
        where = spans(graph)
        number = 1 + max((info(n).index for n in graph.nodes if is_exchange(n)), default=-1)
        for waits in groups.values():
            _launch(graph, waits, where, number)
            number += len(waits) > 1
        sums = sum(map(len, groups.values()))
        return Report(bool(groups), f"{sums} sums in {len(groups)} messages")


def _is_sum(node: fx.Node) -> bool:
    """Return whether a gradient is a sum over the tensor axis that has exactly one reader."""
    if kind_of(node) is not Kind.WAIT or len(node.users) != 1:
        return False
    return node.all_input_nodes[0].target is ops.reduce_values


def _launch(graph: fx.Graph, waits: list[fx.Node], where: dict[int, Span], number: int) -> None:
    """Launch sums after the region that computes the last summand, and wait one region later.

    number: the number of the message, if several sums share one.
    """
    launches = [wait.all_input_nodes[0] for wait in waits]
    summands: list[Any] = [launch.args[0] for launch in launches]
    behind = after_pause(max(_end(summand, where) for summand in summands))
    launch, done = launches[0], waits[0]
    if len(waits) > 1:
        shapes = [tuple(value(wait).shape) for wait in waits]
        with graph.inserting_before(launch):
            joined = call(graph, ops.reduce_joined, (summands, launch.args[1]), like=launch)
            whole = call(graph, ops.wait, (joined,), like=done)
            note = info(launch).placed
            set_info(joined, placed=_as_joined(note, shapes, launch.args[1]), index=number)
            set_info(whole, index=number)
            offset = 0
            for i, wait in enumerate(waits):
                args = (whole, i, offset, list(shapes[i]))
                at = call(graph, ops.joined_value, args, like=wait)
                set_info(at, placed=_as_one(note, args[1:]))
                wait.replace_all_uses_with(at)
                offset += value(wait).numel()
        for node in (*waits, *launches):
            graph.erase_node(node)
        launch, done = joined, whole
    moved = [launch, done, *(u for u in done.users if kind_of(u) is Kind.MAKE)]
    for node in reversed(moved):
        behind.append(node)
    following = moved[-1].next
    while following.op != "output" and info(following).region is None:
        following = following.next
    if (region := info(following).region) is not None:
        for node in reversed(moved[1:]):
            where[region].last.append(node)


def _as_joined(note: Placed | None, shapes: list[Any], axis: Any) -> Placed:
    """Return the note of several sums in one message; what one of them alone notes is given."""
    joined = Placed(R, tuple(shapes))
    if note is None or note.outer is None:
        return joined
    numel = sum(map(math.prod, shapes))  # over the context axis all of it is a summand
    args = [Hole(i) for i in range(len(shapes))], axis
    return Placed(note.gives, (numel,), ops.reduce_joined, args, {}, outer=joined)


def _as_one(note: Placed | None, args: tuple[Any, ...]) -> Placed:
    """Return the note of one of these sums."""
    one = Placed(R, tuple(args[-1]))
    if note is None or note.outer is None:
        return one
    return Placed(note.gives, one.shape, ops.joined_value, (Hole(0), *args), {}, outer=one)


def _end(summand: fx.Node, where: dict[int, Span]) -> fx.Node:
    region = info(root_producer(summand)).region
    return summand if region is None else where[region].last
