"""keep-gathered: let some buckets stay gathered from forward to backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx.analysis.memory import peak_bytes
from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.graphs import add_placeholder, set_results
from zerofx.ir.meta import OutputInfo, Phase, Role, info, nbytes, value
from zerofx.ir.program import BACKWARD, FORWARD, Program
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.colouring import assign
from zerofx.sizes import format_bytes


@dataclass(frozen=True)
class KeepGathered(Pass):
    """Spare the backward's all-gather of as many buckets as the budget has room for.

    Buckets are taken from the last of forward to the first: the last ones are needed again
    soonest, so a kept byte is held for the shortest time. What fits is measured on the final
    order, slots included. Without a budget nothing is kept.

    Raises:
        PlanError: the budget is below what the program needs with nothing kept.
    """

    name: ClassVar[str] = "keep-gathered"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED, Fact.RELEASED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.KEPT_GATHERED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED})

    budget_bytes: int | None = None

    def run(self, program: Program) -> Report:
        if self.budget_bytes is None or BACKWARD not in program.graphs:
            return Report(False, "no budget to spend")
        if (least := _peak_with(program, 0)) > self.budget_bytes:
            raise PlanError(
                f"memory_budget: {program.model_name} needs {format_bytes(least)} ({least} bytes) "
                f"a rank at stage {program.plan.stage} and world {program.world_size} with nothing "
                f"kept, optimizer states of AdamW included, but the budget is "
                f"{format_bytes(self.budget_bytes)}; raise it, shard more (stage, ranks), or set "
                "activations='recompute'"
            )
        fits, too_many = 0, len(_candidates(program)) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if _peak_with(program, middle) <= self.budget_bytes:
                fits = middle
            else:
                too_many = middle
        size = sum(_keep(program, *pair) for pair in _candidates(program)[:fits])
        return Report(fits > 0, f"{fits} buckets kept, {size} bytes")


def _peak_with(program: Program, count: int) -> int:
    """Return the peak of one step if the first `count` candidates were kept."""
    trial = program.clone()
    for pair in _candidates(trial)[:count]:
        _keep(trial, *pair)
    trial.slots = {"bytes": assign(trial)}
    return peak_bytes(trial)


def _candidates(program: Program) -> list[tuple[fx.Node, fx.Node]]:
    """Return (forward's, backward's) wait of each bucket gathered in both, in backward's order."""
    forward = _gathers(program.graph(FORWARD))
    backward = _gathers(program.graph(BACKWARD))
    return [(forward[bucket], wait) for bucket, wait in backward.items() if bucket in forward]


def _gathers(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return the wait of each gathered bucket, the one nearest to the turn where there are two."""
    waits = [n for n in graph.nodes if n.target is ops.wait and n.args[0].target is ops.all_gather]
    found: dict[int, fx.Node] = {}
    for node in waits:
        bucket = info(node).index
        if info(node).phase is Phase.FORWARD or bucket not in found:
            found[bucket] = node
    return found


def _keep(program: Program, forward: fx.Node, backward: fx.Node) -> int:
    """Return `forward`'s gathered buffer as a saved value, read it in place of `backward`'s."""
    bucket, size = info(forward).index, nbytes(value(forward))
    position = sum(1 for s in program.outputs[FORWARD] if s.role is Role.SAVED)
    name = f"gathered_{bucket}"
    _erase_release(program.graph(FORWARD), forward)
    set_results(program.graph(FORWARD), [*program.results(FORWARD), forward])
    program.outputs[FORWARD] += (OutputInfo(Role.SAVED, name, position),)
    graph = program.graph(BACKWARD)
    held = add_placeholder(
        graph, name, value(backward), Role.SAVED, name=name, index=position,
        phase=Phase.BACKWARD, unit=info(backward).unit,
    )  # fmt: skip
    launch = backward.all_input_nodes[0]
    _erase_release(graph, backward)
    backward.replace_all_uses_with(held)
    graph.erase_node(backward)
    graph.erase_node(launch)
    return size


def _erase_release(graph: fx.Graph, full: fx.Node) -> None:
    for user in list(full.users):
        if user.target is ops.release:
            graph.erase_node(user)
