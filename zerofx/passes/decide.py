"""Decisions under a memory budget: which activations are kept, how early gathers are launched.

The program is first compiled on paper with everything kept. Its memory curve shows how far each
moment exceeds the budget, and its segments show what could be given up and at what cost in time.
`solve` selects among these, and the result is compiled on paper again, until it fits. Identical
layers are solved once. Every decision is a function of program, plan and hardware alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zerofx.analysis.memory.memory import Memory, memory
from zerofx.analysis.recompute.activations import Policy, Solved
from zerofx.analysis.recompute.options import Link
from zerofx.analysis.recompute.tradeoffs import Tradeoffs, solve_fraction
from zerofx.analysis.time.prices import Roofline
from zerofx.analysis.time.steps import Lane
from zerofx.errors import BudgetError, PlanError
from zerofx.ir.program import JOINT, Decision, Planned
from zerofx.plan.plan import Plan
from zerofx.plan.sizes import format_bytes

ROUNDS = 6  # at most so many corrections of an estimate
SPARE = 1000  # 1/SPARE of the budget is left to the training loop
WORTH = 0.02  # fraction of the budget below which another round does not pay


@dataclass(frozen=True)
class Choices:
    """The decisions that a memory budget makes before the passes run.

    activations: the policy passed to `split`. prefetch: the distance in units. spend_bytes: the
        peak up to which buckets may stay gathered, or None to keep none of them. decisions: the
        reasons.
    """

    activations: Policy
    prefetch: int
    spend_bytes: int | None = None
    decisions: tuple[Decision, ...] = ()

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Return the names of the values that are offloaded to the host to meet the budget."""
        solved = self.activations
        return tuple(sorted(solved.offloaded)) if isinstance(solved, Solved) else ()


Trial = Callable[[Choices], Planned]  # compiles on paper


def budget_bytes(plan: Plan, margin_bytes: int = 0) -> int | None:
    """Return the part of a plan's budget that a program may use: all but a thousandth and a margin.

    The thousandth covers what no graph shows: step counts, norms, the scalars of the training loop.
    The margin covers the memory that compiled regions were measured to use beyond their operators.
    """
    budget = plan.memory_budget
    return None if budget is None else budget - budget // SPARE - margin_bytes


def budget_for(peak_bytes: int) -> int:
    """Return the smallest budget under which a program may use `peak_bytes`."""
    return peak_bytes + (peak_bytes - 1) // (SPARE - 1)


def link_of(plan: Plan, prices: Roofline) -> Link | None:
    """Return the link to the host for activations, or None if the plan does not offload them.

    On a CPU, copies run inline; on a GPU, they have lanes of their own.
    """
    if plan.offload.activations == "none":
        return None
    least_bytes = prices.hardware.offload_min_bytes
    return Link(lambda n: prices.copy(Lane.D2H, n).us, least_bytes, not prices.is_inline)


def decide(
    captured: Planned,
    plan: Plan,
    prices: Roofline,
    prefetch: int,
    trial: Trial,
    margin_bytes: int = 0,
) -> Choices:
    """Return the fastest choices whose peak is within the plan's budget minus `margin_bytes`.

    captured: the program as `split` will receive it. prefetch: the initial distance; if the plan
        leaves it open, it is reduced when nothing else fits.

    Raises:
        BudgetError: nothing fits; the message gives the smallest sufficient budget and the largest
            holders at that peak.
    """
    link = link_of(plan, prices)
    tradeoffs = functools.cache(lambda: Tradeoffs(captured, prices, link, plan.host_budget))
    least: Memory | None = None
    for distance in range(prefetch, -1, -1) if plan.prefetch == "auto" else (prefetch,):
        attempt = _Attempt(captured, plan, distance, trial, tradeoffs, margin_bytes)
        choices = attempt.run()
        if choices is not None:
            return choices
        if least is None or attempt.least.peak_bytes < least.peak_bytes:
            least = attempt.least
    assert least is not None
    raise _infeasible(captured, plan, least)


class _Attempt:
    """An attempt to meet the budget at one prefetch distance; `least` is the lowest memory seen."""

    def __init__(
        self,
        captured: Planned,
        plan: Plan,
        distance: int,
        trial: Trial,
        tradeoffs: Callable[[], Tradeoffs],
        margin_bytes: int,
    ) -> None:
        self.captured, self.plan = captured, plan
        self.distance, self.trial, self.tradeoffs = distance, trial, tradeoffs
        budget = budget_bytes(plan, margin_bytes)
        assert budget is not None
        self.budget = budget
        self.least: Memory

    def run(self) -> Choices | None:
        is_solved = self.plan.activations == "auto" and JOINT in self.captured.graphs
        first = self._asked_for("keep" if is_solved else self.plan.activations)
        self.least = report = memory(self.trial(first))
        if report.peak_bytes <= self.budget:
            return self._spending(first)
        return self._give_up(report) if is_solved else self._tight(first)

    def _asked_for(self, activations: Policy | float) -> Choices:
        """Return the choices that the plan asks for, regardless of the budget."""
        if not isinstance(activations, float):
            return Choices(activations, self.distance)
        solved, reasons = solve_fraction(self.captured, activations)
        return Choices(solved, self.distance, decisions=reasons)

    def _give_up(self, whole: Memory) -> Choices | None:
        """Give up activations until the program fits; each round corrects the last estimate."""
        tradeoffs = self.tradeoffs()
        target = self.budget
        for _ in range(ROUNDS):
            picked = tradeoffs.within(whole, target)
            choices = self._choices(tradeoffs, picked)
            peak = self._peak(choices)
            if peak <= self.budget:
                return self._take_back(tradeoffs, whole, choices, target)
            if tradeoffs.is_least(picked):
                return self._tight(choices)
            target -= peak - self.budget
        choices = self._choices(tradeoffs, tradeoffs.within(whole, 0))
        if self._peak(choices) <= self.budget:
            return self._spending(choices)
        return self._tight(choices)

    def _take_back(
        self, tradeoffs: Tradeoffs, whole: Memory, fits: Choices, target: int
    ) -> Choices:
        """Keep as many activations again as fit after the rest of the budget is spent.

        A bucket that stays gathered needs no slot in backward, which can free more than it
        occupies.
        """
        fits = self._spending(fits)
        slack = self.budget - self._peak(fits)
        if slack <= self.budget * WORTH:
            return fits
        more = self._spending(self._choices(tradeoffs, tradeoffs.within(whole, target + slack)))
        try:
            return more if self._peak(more) <= self.budget else fits
        except PlanError:  # keep-gathered found no number of buckets that fits
            return fits

    def _tight(self, choices: Choices) -> Choices | None:
        """Return choices that fit only if some buckets stay gathered, or None."""
        lowest = replace(choices, spend_bytes=0)
        return self._spending(choices) if self._peak(lowest) <= self.budget else None

    def _peak(self, choices: Choices) -> int:
        report = memory(self.trial(choices))
        if report.peak_bytes < self.least.peak_bytes:
            self.least = report
        return report.peak_bytes

    def _spending(self, choices: Choices) -> Choices:
        return replace(choices, spend_bytes=self.budget)

    def _choices(self, tradeoffs: Tradeoffs, picked: Sequence[int]) -> Choices:
        aim = f"stay under {format_bytes(self.budget)}"
        reasons = tuple(tradeoffs.decisions(picked, aim))
        return Choices(tradeoffs.solved(picked), self.distance, decisions=reasons)


def _infeasible(program: Planned, plan: Plan, least: Memory) -> BudgetError:
    """Build the error that states the smallest sufficient budget and the largest holders."""
    assert plan.memory_budget is not None
    needed = budget_for(least.peak_bytes)
    held = least.held_at(least.peak_time)
    names = ", ".join(
        f"{h.category.value} {h.name}{f' of {h.module}' if h.module else ''} "
        f"({format_bytes(h.nbytes)})"
        for h in held[:4]
    )
    how = {"auto": "with activations recomputed and nothing prefetched"}.get(
        str(plan.activations), f"with activations={plan.activations!r} and nothing kept gathered"
    )
    stage, who = program.stage, program.model_name
    if stage.size > 1:
        who = f"pipeline stage {stage.position} of {who}"
    if program.loop.accumulation > 1:
        how += ", gradients of earlier micro-batches held"
    return BudgetError(
        f"memory_budget: {who} needs {format_bytes(needed)} "
        f"({needed} bytes) per rank at stage {plan.stage} {how}, optimizer states of AdamW "
        f"included, but the budget is {format_bytes(plan.memory_budget)}. The "
        f"largest holders at that peak are {names}. {ways_out(program, plan)}.",
        needed,
    )


def ways_out(program: Planned, plan: Plan) -> str:
    """Return what helps a program that exceeds the budget, as a sentence without its full stop."""
    ways = ["raise the budget to that value"]
    if plan.activations not in ("auto", "recompute"):
        ways.append("set activations='auto'")
    if plan.stage == 0:  # which replicates everything, on any number of ranks
        ways.append("use a stage from 1 to 3 on several ranks")
    else:
        if plan.stage < 3:
            ways.append("use a higher stage (at most 3)")
        ways.append("use more ranks")
        if plan.offload.optimizer == "none":
            ways.append("keep optimizer states on the host (offload={'optimizer': 'cpu'})")
    first = (
        "If the loop does not accumulate, call optimizer.zero_grad() before the forward. Otherwise "
        if program.loop.accumulation > 1
        else ""
    )
    text = first + (f"{', '.join(ways[:-1])}, or {ways[-1]}" if ways[1:] else ways[0])
    return text[0].upper() + text[1:]
