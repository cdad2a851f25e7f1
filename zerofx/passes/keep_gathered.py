"""keep-gathered: let some buckets stay gathered from forward to backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx.analysis.memory import peak_bytes
from zerofx.ir import ops
from zerofx.ir.graphs import add_placeholder, set_results
from zerofx.ir.meta import OutputInfo, Phase, Role, info, value
from zerofx.ir.program import BACKWARD, FORWARD, Program
from zerofx.passes.base import Fact, Pass, Report


@dataclass(frozen=True)
class KeepGathered(Pass):
    """Spare the backward's all-gather of the buckets that fit into the budget.

    Buckets are taken from the last of forward to the first: the last ones are needed again
    soonest, so a kept byte is held for the shortest time. Without a budget nothing is kept.
    """

    name: ClassVar[str] = "keep-gathered"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED, Fact.SPLIT})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.KEPT_GATHERED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED, Fact.SLOTS_ASSIGNED})

    budget_bytes: int | None = None

    def run(self, program: Program) -> Report:
        if self.budget_bytes is None or BACKWARD not in program.graphs:
            return Report(False, "no budget to spend")
        room = self.budget_bytes - peak_bytes(program)
        kept = []
        forward = {b: w for b, w in _gathers(program.graph(FORWARD))}
        for bucket, full in _gathers(program.graph(BACKWARD)):
            size = value(full).numel() * value(full).element_size()
            if bucket in forward and size <= room:
                _keep(program, forward.pop(bucket), full, bucket)
                room -= size
                kept.append(info(full).unit)
        return Report(bool(kept), f"{len(kept)} buckets kept, {max(room, 0)} bytes left")


def _gathers(graph: fx.Graph) -> list[tuple[int, fx.Node]]:
    found = [n for n in graph.nodes if n.target is ops.wait and n.args[0].target is ops.all_gather]
    return [(n.args[0].args[1], n) for n in found]


def _keep(program: Program, forward: fx.Node, backward: fx.Node, bucket: int) -> None:
    """Return `forward`'s gathered buffer as a saved value; read it in place of `backward`."""
    position = sum(1 for s in program.outputs[FORWARD] if s.role is Role.SAVED)
    name = f"gathered_{bucket}"
    results = program.results(FORWARD)
    set_results(program.graph(FORWARD), [*results, forward])
    program.outputs[FORWARD] += (OutputInfo(Role.SAVED, name, position),)
    graph = program.graph(BACKWARD)
    held = add_placeholder(
        graph, name, value(backward), Role.SAVED, name=name, index=position,
        phase=Phase.BACKWARD, unit=info(backward).unit,
    )
    launch = backward.args[0]
    backward.replace_all_uses_with(held)
    graph.erase_node(backward)
    graph.erase_node(launch)  # type: ignore[arg-type]


def is_kept(node: fx.Node) -> bool:
    """Say whether a gathered buffer leaves its graph (and so must not lie in a slot)."""
    return any(u.op == "output" for u in node.users)


