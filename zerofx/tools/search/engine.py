"""One search: choices in the order of their bounds, priced until no other can be the best."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zerofx.analysis.time.forecast import available_bytes
from zerofx.errors import CaptureError, PlanError, TargetError, as_sentence
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
# so many plans of it. A family of axes that has none that fits gets one, after so many bounds.
MOST_OVER_AXES = 16
FAMILY_LOOKS = 8


def _time_first(bound: Bound) -> tuple[float, ...]:
    return (bound.step_us,)  # of equal bounds the plan that comes first, which changes least


def _memory_first(bound: Bound) -> tuple[float, ...]:
    return bound.peak_bytes, bound.step_us


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
            raise PlanError(
                f"search: no valid plan exists: {as_sentence(self.space.contradiction())}"
            )
        limit = available_bytes(self.hardware)
        for level in LEVELS[:1] if self.space.has_axes else LEVELS:
            memory = format_bytes(round(level * limit))
            self.says(
                f"{counted(len(choices), 'plan')}: the fastest within {memory} per device", False
            )
            most = MOST_OVER_AXES if self.space.has_axes else None if level == 1.0 else MOST_PRICED
            left_us = self.fastest_within(level * limit, choices, most)
            if level == 1.0:
                self.least_left_us = left_us
        if self.space.has_axes:
            self._price_each_family(choices, limit)
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
        """Price one plan that may fit of each family of axes that has none, to compare with.

        It is the fastest by its bounds; if that does not fit, the smallest by its bounds as well.
        """
        known = {family_of(c.plan.parallel) for c, o in self.priced.items() if o.fits}
        waiting: dict[str, list[Choice]] = {}
        for choice in choices:
            name = family_of(choice.plan.parallel)
            if name not in known and choice not in self.priced and choice not in self.refused:
                waiting.setdefault(name, []).append(choice)
        for own in waiting.values():
            for least in (_time_first, _memory_first):
                first = self._most_promising(own, limit, least)
                found = None if first is None else self.price(first)
                if first is None or (found is not None and found.fits):
                    break

    def _most_promising(
        self, choices: Sequence[Choice], limit: float, least: Callable[[Bound], tuple[float, ...]]
    ) -> Choice | None:
        """Return the choice with the least exact bound that may fit, None if none may.

        After a number of bounds that grew, the one that is then the least is taken as it is.
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
            self._next(first)
            looks += 1
        return None

    def fastest_within(
        self, limit: float, choices: Sequence[Choice], most: int | None
    ) -> float | None:
        """Price choices in the order of their bounds, until no other can be faster.

        At most `most` new ones are priced, if it is a number; then the least bound of the others is
        returned, if it is below the best.

        Bounds are rough at first, closer later, and exact before anything is priced. Of choices
        that differ only in the prefetch distance, the one with the least memory comes first: the
        others need at least as much, and overlap at least as many of their transfers.
        """
        kin = self._kin(limit, choices)
        waiting = [(self.bounded[each[0]].step_us, each[0].place, each[0]) for each in kin.values()]
        heapq.heapify(waiting)
        best, before = float("inf"), len(self.priced)
        while waiting and (most is None or len(self.priced) < before + most):
            least_us, _, choice = heapq.heappop(waiting)
            if least_us * (1 + TIME_GAP) >= best:
                return None
            bound = self._next(choice)
            if bound is None or bound.peak_bytes > limit:
                continue
            if bound.step_us > least_us or choice not in self.exact:
                least_us = max(bound.step_us, least_us)
                heapq.heappush(waiting, (least_us, choice.place, choice))
                continue
            found = self.price(choice)
            if found is None or found.peak_bytes > limit or found.shortages:
                continue
            best = min(best, found.step_us)
            for other in kin.pop(choice.kin, [])[1:]:
                least_us = max(bound.step_us, found.covered_us)
                heapq.heappush(waiting, (least_us, other.place, other))
        return waiting[0][0] if waiting and waiting[0][0] * (1 + TIME_GAP) < best else None

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
