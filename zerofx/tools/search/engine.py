"""One search: choices, the most promising first, priced until no other can be the best."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zerofx.analysis.time.forecast import available_bytes
from zerofx.errors import CaptureError, PlanError, TargetError
from zerofx.hardware import Hardware
from zerofx.plan.sizes import format_bytes
from zerofx.tools.search.bounds import Bound, Bounds
from zerofx.tools.search.family import Family, Says, silent
from zerofx.tools.search.outcome import Counts, Found, Outcome, outcome
from zerofx.tools.search.reasons import family_of, verdicts
from zerofx.tools.search.space import Choice, Space
from zerofx.tools.words import counted

# A plan that cannot gain more than this share of the time is not priced.
TIME_GAP = 0.01
# The fastest plan is searched for the whole memory of a device, and for these parts of it.
LEVELS = (1.0, 0.5, 0.25)
# Plans priced at most for each smaller part, for which bounds on memory are loose. The search for
# the fastest plan of the whole memory has no limit, unless axes are searched.
MOST_PRICED = 24
# Where axes are searched, a plan takes longer to price. So only the whole memory is looked at, and
# so many plans of it. Before them each family of axes gets one that fits, after so many bounds for
# which a model is compiled.
MOST_OVER_AXES = 16
FAMILY_LOOKS = 8


def _time_first(bound: Bound) -> tuple[float, float]:
    return bound.step_us, bound.peak_bytes


def _memory_first(bound: Bound) -> tuple[float, float]:
    return bound.peak_bytes, bound.step_us


def kind_of(choice: Choice) -> tuple[Any, ...]:
    """Return a key of choices whose bounds are about as far below their figures."""
    plan = choice.plan
    away = tuple(name for name, tier in plan.offload.tiers.items() if tier != "none")
    return family_of(plan.parallel), away, plan.parallel.schedule


@dataclass
class Search:
    """One search: the choices priced so far, and the bounds by which others were left out.

    least_left_us: the least bound among plans that were not priced because enough others were.
    """

    family: Family
    space: Space
    bounds: Bounds
    priced: dict[Choice, Outcome] = field(default_factory=dict)
    refused: dict[Choice, str] = field(default_factory=dict)
    bounded: dict[Choice, Bound] = field(default_factory=dict)
    exact: set[Choice] = field(default_factory=set)
    closer: set[Choice] = field(default_factory=set)
    least_left_us: float | None = None
    says: Says = silent

    @property
    def hardware(self) -> Hardware:
        return self.space.hardware

    def price(self, choice: Choice) -> Outcome | None:
        """Return the outcome of a choice, None if its plan is not valid for this model."""
        if choice not in self.priced and choice not in self.refused:
            try:
                found = outcome(choice, self.family, self.hardware, self.space.world_size)
                self.priced[choice] = found
                self.says(f"{counted(len(self.priced), 'plan')} priced", True)
            except PlanError as error:
                self.refused[choice] = str(error)
            except (CaptureError, TargetError) as error:
                self._refuse(choice, error)
        return self.priced.get(choice)

    def run(self) -> Found:
        """Find the fastest plan for each level of memory; return everything found.

        Raises:
            PlanError: the given fields allow no valid plan.
        """
        choices = list(self.space.choices())
        if not choices:
            raise PlanError(f"search: no valid plan exists: {self.space.contradiction()}")
        limit = available_bytes(self.hardware)
        for level in LEVELS[:1] if self.space.has_axes else LEVELS:
            memory = format_bytes(round(level * limit))
            self.says(
                f"{counted(len(choices), 'plan')}: the fastest within {memory} per device", False
            )
            most = MOST_OVER_AXES if self.space.has_axes else None if level == 1.0 else MOST_PRICED
            if self.space.has_axes:
                self._price_each_family(choices, limit)
            left_us = self.fastest_within(level * limit, choices, most)
            if level == 1.0:
                self.least_left_us = left_us
        too_large = sum(bound.peak_bytes > limit for bound in self.bounded.values())
        fits = [o for o in self.priced.values() if not o.shortages]
        fits.sort(key=lambda o: (o.step_us, o.choice.place))
        counts = Counts(len(choices), too_large, len(self.priced), len(self.refused))
        refusal = next(iter(self.refused.values()), "")
        found = Found(
            self.space, tuple(fits), tuple(self.priced.values()), counts, refusal,
            least_left_us=self.least_left_us,
        )  # fmt: skip
        if not fits or not self.space.has_axes:
            return found
        said = verdicts(self.space, found.best, found.priced, self.bounded, self.refused)
        return replace(found, verdicts=said)

    def _price_each_family(self, choices: Sequence[Choice], limit: float) -> None:
        """Price one plan that fits of each family of axes, to compare with.

        It is the fastest by its bounds; if that does not fit, the smallest by its bounds as well.
        """
        self._kin(limit, choices)
        waiting: dict[str, list[Choice]] = {}
        for choice in choices:
            waiting.setdefault(family_of(choice.plan.parallel), []).append(choice)
        for own in waiting.values():
            for least in (_time_first, _memory_first):
                first = self._most_promising(own, limit, least)
                found = None if first is None else self.price(first)
                if first is None or (found is not None and found.fits):
                    break

    def _most_promising(
        self, choices: Sequence[Choice], limit: float, least: Callable[[Bound], tuple[float, float]]
    ) -> Choice | None:
        """Return the choice with the least exact bound that may fit, None if none may.

        After a number of bounds for which a model was compiled, the one that is then the least is
        taken as it is.
        """

        def could() -> list[Choice]:
            return [
                c
                for c in choices
                if self.bounded[c].peak_bytes <= limit
                and c not in self.priced
                and c not in self.refused
            ]

        looks = 0
        while left := could():
            first = min(left, key=lambda c: (*least(self.bounded[c]), c.place))
            if first in self.exact or looks == FAMILY_LOOKS:
                return first
            known = self.bounds.num_compiled
            self._next(first)
            looks += self.bounds.num_compiled > known
        return None

    def fastest_within(
        self, limit: float, choices: Sequence[Choice], most: int | None
    ) -> float | None:
        """Price choices, the most promising first, until no other can be faster.

        At most `most` new ones are priced, if it is a number; then the least bound of the others is
        returned, if it is below the best.

        Bounds are rough at first, closer later, and exact before anything is priced. They are
        further below the figures of some kinds of plans than of others. So the next choice is that
        with the least bound times what the priced plans of its kind take of theirs. Of choices
        that differ only in the prefetch distance, the one with the least memory comes first: the
        others need at least as much, and overlap at least as many of their transfers.
        """
        kin = self._kin(limit, choices)
        waiting: dict[Any, list[tuple[float, int, Choice]]] = {}  # by kind

        def add(least_us: float, choice: Choice) -> None:
            heapq.heappush(
                waiting.setdefault(kind_of(choice), []), (least_us, choice.place, choice)
            )

        for each in kin.values():
            if each[0] not in self.priced:
                add(self.bounded[each[0]].step_us, each[0])
        given = set(choices)
        within = [o for o in self.priced.values() if o.choice in given and o.fits]
        within = [o for o in within if o.peak_bytes <= limit]
        best = min((o.step_us for o in within), default=float("inf"))
        for found in within:
            self._add_kin(found, kin, add)
        before = len(self.priced)
        while True:
            for queue in waiting.values():
                while queue and queue[0][0] * (1 + TIME_GAP) >= best:
                    queue.clear()
            waiting = {kind: queue for kind, queue in waiting.items() if queue}
            if not waiting or (most is not None and len(self.priced) >= before + most):
                break
            ratios = self._ratios()
            kind = min(waiting, key=lambda k: (waiting[k][0][0] * ratios(k), waiting[k][0][1]))
            least_us, _, choice = heapq.heappop(waiting[kind])
            bound = self._next(choice)
            if bound is None or bound.peak_bytes > limit:
                continue
            if bound.step_us > least_us or choice not in self.exact:
                add(max(bound.step_us, least_us), choice)
                continue
            priced = self.price(choice)
            if priced is None or priced.peak_bytes > limit or priced.shortages:
                continue
            best = min(best, priced.step_us)
            self._add_kin(priced, kin, add)
        return min((queue[0][0] for queue in waiting.values()), default=None)

    def _add_kin(
        self, priced: Outcome, kin: dict[Any, list[Choice]], add: Callable[[float, Choice], None]
    ) -> None:
        """Add the choices that differ from a priced one in what it has the least of, once."""
        bound = self.bounded[priced.choice]
        for other in kin.pop(priced.choice.kin, [])[1:]:
            if other not in self.priced:
                add(max(bound.step_us, priced.covered_us), other)

    def _ratios(self) -> Callable[[Any], float]:
        """Return what plans of a kind take at least of their bounds: of those that were priced.

        For a kind of which none was, that of its family is taken.
        """
        known: dict[Any, float] = {}
        for choice, found in self.priced.items():
            least_us = self.bounded[choice].step_us if choice in self.bounded else 0.0
            if least_us > 0 and found.fits:
                ratio = found.step_us / least_us
                for name in (kind_of(choice), kind_of(choice)[0]):
                    known[name] = min(known.get(name, ratio), ratio)
        return lambda kind: known.get(kind, known.get(kind[0], 1.0))

    def _kin(self, limit: float, choices: Sequence[Choice]) -> dict[Any, list[Choice]]:
        """Return the choices that may fit, in groups of kin, the least memory first."""
        found: dict[Any, list[Choice]] = {}
        for choice in choices:
            if choice not in self.bounded:
                self.bounded[choice] = self.bounds.rough(choice)
            if self.bounded[choice].peak_bytes <= limit:
                found.setdefault(choice.kin, []).append(choice)
        for kin in found.values():
            kin.sort(key=lambda choice: choice.holds(self.hardware))
        return found

    def _next(self, choice: Choice) -> Bound | None:
        """Return a closer bound of a choice than the last one, until it is exact."""
        if choice in self.exact or choice in self.closer or choice in self.refused:
            return self.exactly(choice)
        self.closer.add(choice)
        self.bounded[choice] = self.bounds.closer(choice)
        return self.bounded[choice]

    def exactly(self, choice: Choice) -> Bound | None:
        """Return the bound of a choice, None if the model cannot be captured at its micro-batch."""
        if choice not in self.exact and choice not in self.refused:
            try:
                self.bounded[choice] = self.bounds.of(choice)
                self.exact.add(choice)
            except (CaptureError, TargetError) as error:
                self._refuse(choice, error)
        return self.bounded[choice] if choice in self.exact else None

    def _refuse(self, choice: Choice, error: CaptureError | TargetError) -> None:
        """Leave out a micro-batch or axes that the model refuses; raise for the example call."""
        if choice.samples == self.family.samples and not choice.plan.parallel.is_used:
            raise error
        self.refused[choice] = str(error)
