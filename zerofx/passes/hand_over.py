"""hand-over: without other data ranks, gradients become p.grad and pass through no bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx import ops
from zerofx.ir.graphs import call
from zerofx.ir.meta import Phase, info, set_info
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Kind, gradients_of, is_reduction, kind_of
from zerofx.ops.handed import copied_of
from zerofx.passes.base import Fact, Pass, Report
from zerofx.policy import reduction


@dataclass(frozen=True)
class HandOver(Pass):
    """Replace the packing and the reduction of buckets that no other process shares.

    The gradients of a bucket are handed over after the last of them, where it would be reduced.
    """

    name: ClassVar[str] = "hand-over"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADS_REDUCED, Fact.WAITS_SUNK})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED})

    def run(self, program: Planned) -> Report:
        if BACKWARD not in program.graphs:
            return Report(False, "inference: no gradients")
        layout, plan = program.layout, program.plan
        launches = [
            node
            for node in program.graph(BACKWARD).nodes
            if is_reduction(node)
            and reduction.hands_over(layout, plan, layout.buckets[info(node).index])
        ]
        made, copied = [_hand_over(program, launch) for launch in launches], 0
        for node in made:  # once it is known what each of them takes
            positions = copied_of([grad for grad, _ in gradients_of(node)])
            node.args = (*node.args[:-1], positions)
            copied += len(positions)
        return Report(bool(made), f"{len(made)} buckets, {copied} gradients copied")


def _hand_over(program: Planned, launch: fx.Node) -> fx.Node:
    """Replace all that happens to a bucket's gradients, from their buffer to p.grad."""
    graph, bucket = program.graph(BACKWARD), program.layout.buckets[info(launch).index]
    (wait,) = launch.users
    (store,) = (user for user in wait.users if kind_of(user) is Kind.STORE)
    packs = []
    node = launch.all_input_nodes[0]
    while kind_of(node) is Kind.PACK:
        packs.append(node)
        node = node.all_input_nodes[0]
    taken = [pair for pack in reversed(packs) for pair in gradients_of(pack)]
    grads, offsets = [grad for grad, _ in taken], [offset for _, offset in taken]
    with graph.inserting_before(launch):
        made = call(graph, ops.hand_over, (grads, offsets, bucket.numel, bucket.index, []))
    set_info(made, phase=Phase.BACKWARD, unit=bucket.label(), index=bucket.index)
    store.replace_all_uses_with(made)
    shard = node.all_input_nodes[0]
    for erased in (store, wait, launch, *packs, node):
        graph.erase_node(erased)
    if not shard.users:  # a placeholder for the form of the buffer
        graph.erase_node(shard)
    return made
