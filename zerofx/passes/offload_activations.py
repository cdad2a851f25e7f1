"""offload-activations: keep saved values on the host between forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from torch import fx

from zerofx import ops
from zerofx.analysis.recompute.activations import Policy
from zerofx.analysis.recompute.leaving import Leaving, chain, leaving
from zerofx.errors import PlanError
from zerofx.ir.graphs import add_placeholder, call, set_results
from zerofx.ir.meta import OutputInfo, Phase, Role, info, set_info, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.placement import Span, Units, spans
from zerofx.plan.sizes import format_bytes


@dataclass(frozen=True)
class OffloadActivations(Pass):
    """Copy saved values to the host after their last use, and back before backward's first.

    A value leaves as a whole storage; backward reads it again through the views that were saved.
    The copies of one region are waited for, and their sources released, after the next region that
    launches copies, so that the compute between the two hides them. A reload is launched `distance`
    units before its value is read.

    activations: the plan's policy. Units whose pattern says "offload" leave, except storages
        smaller than `least_bytes`.
    everything: also offload all saved values that no pattern mentions, except those that
        backward would reload before it has computed anything, since their round trip would only
        cost time.
    values: names of saved values, or of forward nodes, that leave in any case.

    Raises:
        PlanError: the offloaded values take more than `host_budget_bytes`.
    """

    name: ClassVar[str] = "offload-activations"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.SPLIT, Fact.REGIONS_CUT})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})

    activations: Policy | float = "keep"
    everything: bool = False
    values: tuple[str, ...] = ()
    distance: int = 1
    least_bytes: int = 0
    host_budget_bytes: int | None = None

    def options(self) -> dict[str, object]:
        return super().options() | {"values": len(self.values)}

    def run(self, program: Planned) -> Report:
        if BACKWARD not in program.graphs:
            return Report(False, "inference: nothing is saved")
        begins = Units(program.graph(BACKWARD), self.distance)
        groups = [g for g in leaving(program) if self._leaves(g, begins)]
        size = sum(g.nbytes for g in groups)
        if self.host_budget_bytes is not None and size > self.host_budget_bytes:
            raise PlanError(
                f"host_budget: {program.model_name} would hold {format_bytes(size)} ({size} bytes) "
                f"of activations on the host, but the budget is "
                f"{format_bytes(self.host_budget_bytes)}. Raise it, or offload fewer units."
            )
        if groups:
            taken = {info(n).index: n for n in program.placeholders(BACKWARD, Role.SAVED)}
            hosts = _leave(program.graph(FORWARD), groups)
            first = _save(program, groups, hosts, taken)
            reloaded = _come_back(program.graph(BACKWARD), groups, hosts, first, begins)
            for group, value_again in zip(groups, reloaded, strict=True):
                _look_into(program.graph(BACKWARD), group, value_again, taken, begins.spans)
        return Report(bool(groups), f"{len(groups)} values offloaded, {size} bytes")

    def _leaves(self, group: Leaving, begins: Units) -> bool:
        if set(self.values) & {*group.names, *(view.name for view in group.views.values())}:
            return True
        if group.nbytes < self.least_bytes:
            return False
        choices = {self._choice(unit) for unit in group.units}
        if choices == {"offload"}:
            return True
        is_worth_it = begins.launch_region(group.first) > begins.earliest
        return self.everything and choices <= {"offload", None} and is_worth_it

    def _choice(self, unit: str) -> str | None:
        """Return the choice of the plan's patterns for a unit, or None if no pattern matches."""
        if not isinstance(self.activations, Mapping):
            return None
        found = (c for pattern, c in self.activations.items() if fnmatchcase(unit, pattern))
        return next(found, None)


# -- forward --------------------------------------------------------------------------------------
def _leave(graph: fx.Graph, groups: Sequence[Leaving]) -> list[fx.Node]:
    """Insert each value's offload after its last use, and its wait; return the waits."""
    behind = {region: span.last.next for region, span in spans(graph).items()}
    waits: list[fx.Node] = []
    launched: list[tuple[int, fx.Node]] = []

    def wait_for_all() -> None:
        for number, launch in launched:
            waits.append(_describe(call(graph, ops.wait, (launch,)), groups[number], number))
        launched.clear()

    for number, group in enumerate(groups):
        with graph.inserting_before(behind[group.last]):
            if launched and groups[launched[0][0]].last != group.last:
                wait_for_all()
            launch = call(graph, ops.offload, (group.root,))
            launched.append((number, _describe(launch, group, number)))
    with graph.inserting_before(graph.output_node()):
        wait_for_all()
    return waits


def _describe(node: fx.Node, group: Leaving, number: int, phase: Phase = Phase.FORWARD) -> fx.Node:
    where = info(group.root)
    set_info(
        node, phase=phase, unit=where.unit, module=where.module, line=where.line,
        name=_label(group), index=number,
    )  # fmt: skip
    return node


def _label(group: Leaving) -> str:
    """Name a storage after the saved value that spans it, or else after the forward node."""
    whole = (n for n, v in zip(group.names, group.views.values(), strict=True) if v is group.root)
    return next(whole, group.root.name)


def _save(
    program: Planned, groups: Sequence[Leaving], hosts: Sequence[fx.Node], taken: dict[int, fx.Node]
) -> int:
    """Append the host copies to the values that stay saved; return the position of the first."""
    gone = {position for group in groups for position in group.views}
    pairs = list(zip(program.outputs[FORWARD], program.results(FORWARD), strict=True))
    others = [(s, r) for s, r in pairs if s.role is not Role.SAVED]
    saved = [(s.name, r) for s, r in pairs if s.role is Role.SAVED]
    stay = [position for position in range(len(saved)) if position not in gone]
    for index, position in enumerate(stay):
        set_info(taken[position], index=index)
    kept = [saved[i] for i in stay]
    kept += [(_label(g), host) for g, host in zip(groups, hosts, strict=True)]
    specs = [OutputInfo(Role.SAVED, name, i) for i, (name, _) in enumerate(kept)]
    program.outputs[FORWARD] = (*(s for s, _ in others), *specs)
    set_results(program.graph(FORWARD), [*(r for _, r in others), *(r for _, r in kept)])
    return len(stay)


# -- backward -------------------------------------------------------------------------------------
def _come_back(
    graph: fx.Graph, groups: Sequence[Leaving], hosts: Sequence[fx.Node], index: int, begins: Units
) -> list[fx.Node]:
    """Insert each value's reload and, before its first reader, the wait; return the waits."""
    launches: dict[int, fx.Node] = {}
    for number in sorted(range(len(groups)), key=lambda n: groups[n].first):
        group = groups[number]
        where, host = info(group.root), value(hosts[number])
        held = add_placeholder(
            graph, _label(group), host, Role.SAVED, name=_label(group), index=index + number,
            unit=where.unit, module=where.module, line=where.line, phase=Phase.BACKWARD,
        )  # fmt: skip
        anchor = begins.spans[begins.launch_region(group.first)].first
        with graph.inserting_before(anchor):
            device = value(group.root).device
            launch = call(graph, ops.reload, (held,), named={"device": device})
        launches[number] = _describe(launch, group, number, Phase.BACKWARD)
    waits: dict[int, fx.Node] = {}
    for number, launch in launches.items():
        with graph.inserting_before(begins.spans[groups[number].first].first):
            wait = call(graph, ops.wait, (launch,))
        waits[number] = _describe(wait, groups[number], number, Phase.BACKWARD)
    return [waits[number] for number in range(len(groups))]


def _look_into(
    graph: fx.Graph,
    group: Leaving,
    root: fx.Node,
    taken: dict[int, fx.Node],
    where: dict[int, Span],
) -> None:
    """Make backward read a reloaded storage, each region through views of its own."""
    made: dict[tuple[int, fx.Node], fx.Node] = {}
    for position, view in group.views.items():
        before = taken[position]
        for user in list(before.users):
            region = info(user).region
            assert region is not None, f"{user} reads a saved value outside any region"
            now = root
            for forward in chain(group.root, view):
                if (region, forward) not in made:
                    made[region, forward] = _again(graph, forward, now, where[region].first)
                now = made[region, forward]
            user.replace_input_with(before, now)
        graph.erase_node(before)


def _again(graph: fx.Graph, forward: fx.Node, source: fx.Node, first: fx.Node) -> fx.Node:
    """Copy a view of forward to the beginning of a backward region."""
    with graph.inserting_before(first):
        view = graph.node_copy(forward, lambda _: source)
    view.meta = dict(forward.meta)
    here = info(first)
    set_info(view, phase=Phase.BACKWARD, recomputed=True, unit=here.unit, region=here.region)
    return view
