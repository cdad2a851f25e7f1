"""keep-gathered: leave some buckets gathered from forward to backward."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zerofx.analysis.memory.memory import peak_bytes
from zerofx.errors import BudgetError
from zerofx.ir.graphs import add_placeholder, set_results
from zerofx.ir.meta import OutputInfo, Phase, Role, info, nbytes, set_info, value
from zerofx.ir.program import BACKWARD, FORWARD, Decision, Planned
from zerofx.ir.spec import Kind, kind_of, launch_of, spec_of, wait_for
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.colouring import assign
from zerofx.passes.decide import ways_out
from zerofx.plan.sizes import format_bytes

SLOTS = 4  # slots, of the largest buckets, whose sizes are looked at


@dataclass(frozen=True)
class KeepGathered(Pass):
    """Save the backward all-gather of as many buckets as the budget has room for.

    Buckets are taken from the last of forward to the first: backward needs the last ones soonest,
    so a kept byte is held for the shortest time. The peak is measured on the final order, slots
    included. Without a budget nothing is kept. A budget of 0 keeps the number with the lowest peak.

    Raises:
        BudgetError: the budget is below the memory that the program needs with any number kept.
    """

    name: ClassVar[str] = "keep-gathered"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED, Fact.RELEASED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.KEPT_GATHERED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SLOTS_ASSIGNED})

    budget_bytes: int | None = None

    def run(self, program: Planned) -> Report:
        if self.budget_bytes is None or BACKWARD not in program.graphs:
            return Report(False, "no budget to spend")
        fits = self._how_many(program)
        candidates = _candidates(program)
        program.decisions += tuple(self._decisions(program, candidates, fits))
        size = sum(_keep(program, *pair) for pair in candidates[:fits])
        return Report(fits > 0, f"{fits} buckets kept, {size} bytes")

    def _how_many(self, program: Planned) -> int:
        """Return how many of the candidates fit.

        Keeping more of them can need less memory, since a bucket that stays gathered needs no slot
        in backward: once the largest are kept, slots are smaller.
        """
        assert self.budget_bytes is not None
        candidates = _candidates(program)
        too_many = len(candidates)
        if self.budget_bytes and _peak_with(program, too_many) <= self.budget_bytes:
            return too_many
        peaks = {count: _peak_with(program, count) for count in _turns(candidates)}
        if not self.budget_bytes:
            return min(peaks, key=lambda count: (peaks[count], -count))
        within = [count for count, peak in peaks.items() if peak <= self.budget_bytes]
        if not within:
            least = min(peaks.values())
            raise BudgetError(
                f"memory_budget: {program.model_name} needs {format_bytes(least)} ({least} bytes) "
                f"per rank at stage {program.plan.stage} and world {program.world_size} with "
                "as many buckets kept as need least, optimizer states of AdamW included, but the "
                f"budget is {format_bytes(self.budget_bytes)}. {ways_out(program, program.plan)}.",
                least,
            )
        fits = max(within)
        too_many = min((count for count in peaks if count > fits), default=too_many)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if _peak_with(program, middle) <= self.budget_bytes:
                fits = middle
            else:
                too_many = middle
        return fits

    def _decisions(
        self, program: Planned, candidates: list[tuple[fx.Node, fx.Node]], fits: int
    ) -> Iterator[Decision]:
        """Yield the decision on each bucket, and the budget spent in total."""
        assert self.budget_bytes is not None
        peak, budget = _peak_with(program, fits), format_bytes(self.budget_bytes)
        spent = f"the peak is {format_bytes(peak)} of {budget}"
        for i, (forward, _) in enumerate(candidates):
            unit, size = info(forward).unit, nbytes(value(forward))
            if i < fits:
                why = f"one all-gather of {format_bytes(size)} less; {spent}"
            elif i == fits:
                needed = format_bytes(_peak_with(program, i + 1))
                why = f"keeping it would raise the peak to {needed} of {budget}"
                spent += f"; at {needed} {unit} would stay gathered too"
            else:
                why = "backward needs it later than the buckets that had no room"
            choice = "keep gathered" if i < fits else "gather again"
            yield Decision(unit, unit, "", choice, size, why)
        yield Decision("memory_budget", "", "", "spend", self.budget_bytes, spent)


def _peak_with(program: Planned, count: int) -> int:
    """Return the peak bytes of one step if the first `count` candidates were kept."""
    trial = program.clone()
    for pair in _candidates(trial)[:count]:
        _keep(trial, *pair)
    trial.slot_bytes = tuple(assign(trial))
    return peak_bytes(trial)


def _turns(candidates: list[tuple[fx.Node, fx.Node]]) -> list[int]:
    """Return the numbers of kept buckets at which the slots of the others can be smaller, and 0.

    Between two of them, each bucket that is kept raises the peak.
    """
    sizes = [nbytes(value(forward)) for forward, _ in candidates]
    needed = [sum(heapq.nlargest(SLOTS, sizes[i:])) for i in range(len(sizes) + 1)]
    return [0, *(i for i in range(1, len(needed)) if needed[i] < needed[i - 1])]


def _candidates(program: Planned) -> list[tuple[fx.Node, fx.Node]]:
    """Return the (forward, backward) waits of each bucket gathered in both, in backward's order."""
    forward = _gathers(program.graph(FORWARD))
    backward = _gathers(program.graph(BACKWARD))
    return [(forward[bucket], wait) for bucket, wait in backward.items() if bucket in forward]


def _gathers(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return the wait of each gathered bucket; of two, the one nearest to the end of forward."""
    waits = [n for n in graph.nodes if kind_of(n) is Kind.WAIT and _delivers_whole(launch_of(n))]
    found: dict[int, fx.Node] = {}
    for node in waits:
        bucket = info(node).index
        if info(node).phase is Phase.FORWARD or bucket not in found:
            found[bucket] = node
    return found


def _keep(program: Planned, forward: fx.Node, backward: fx.Node) -> int:
    """Return `forward`'s gathered buffer as a saved value, and read it in place of `backward`'s."""
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
    shard = launch.all_input_nodes[0]
    graph.erase_node(launch)
    _erase_moves(graph, shard)
    if info(shard).role is Role.SAVED and not shard.users:
        _drop_saved(program, shard)
    return size


def _drop_saved(program: Planned, taken: fx.Node) -> None:
    """Stop saving a secondary shard that backward does not gather from any more."""
    position, graph = info(taken).index, program.graph(FORWARD)
    pairs = list(zip(program.outputs[FORWARD], program.results(FORWARD), strict=True))
    is_it = [spec.role is Role.SAVED and spec.index == position for spec, _ in pairs]
    made = pairs[is_it.index(True)][1]
    left = [pair for pair, is_dropped in zip(pairs, is_it, strict=True) if not is_dropped]
    program.outputs[FORWARD] = tuple(
        replace(spec, index=spec.index - 1)
        if spec.role is Role.SAVED and spec.index > position
        else spec
        for spec, _ in left
    )
    set_results(graph, [result for _, result in left])
    graph.erase_node(made)
    program.graph(BACKWARD).erase_node(taken)
    for node in program.placeholders(BACKWARD, Role.SAVED):
        if info(node).index > position:
            set_info(node, index=info(node).index - 1)


def _delivers_whole(launch: fx.Node) -> bool:
    """Return whether a launch delivers a whole bucket: a gather, or the sole owner's reload."""
    spec = spec_of(launch)
    if spec is None or spec.stays:
        return False
    return spec.is_gather or (spec.is_reload and not _is_sent(launch))


def _is_sent(launch: fx.Node) -> bool:
    users = [spec_of(u) for u in wait_for(launch).users]
    return any(spec is not None and spec.is_gather for spec in users)


def _erase_moves(graph: fx.Graph, held: fx.Node) -> None:
    """Erase the reload and the read of a shard that nothing uses any more."""
    while kind_of(held) is Kind.WAIT:
        _erase_release(graph, held)
        launch = held.all_input_nodes[0]
        graph.erase_node(held)
        held = launch.all_input_nodes[0]
        graph.erase_node(launch)


def _erase_release(graph: fx.Graph, full: fx.Node) -> None:
    for user in list(full.users):
        if kind_of(user) is Kind.RELEASE:
            graph.erase_node(user)
