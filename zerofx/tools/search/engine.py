"""One search: choices in the order of their bounds, priced until no other can be the best."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zerofx.analysis.time.forecast import available_bytes
from zerofx.errors import CaptureError, PlanError, TargetError
from zerofx.hardware import Hardware
from zerofx.plan.sizes import format_bytes
from zerofx.tools.search.bounds import Bound, Bounds
from zerofx.tools.search.family import Family, Says, silent
from zerofx.tools.search.outcome import Counts, Found, Outcome, outcome
from zerofx.tools.search.space import Choice, Space
from zerofx.tools.words import counted

# A plan that cannot gain more than this share of the time is not priced.
TIME_GAP = 0.01
# The fastest plan is searched for the whole memory of a device, and for these parts of it.
LEVELS = (1.0, 0.5, 0.25)
# Plans priced at most for each smaller part, for which bounds on memory are loose. The search for
# the fastest plan of the whole memory has no limit.
MOST_PRICED = 24


@dataclass
class Search:
    """One search: the choices priced so far, and the bounds by which others were left out."""

    family: Family
    space: Space
    bounds: Bounds
    priced: dict[Choice, Outcome] = field(default_factory=dict)
    refused: dict[Choice, str] = field(default_factory=dict)
    bounded: dict[Choice, Bound] = field(default_factory=dict)
    exact: set[Choice] = field(default_factory=set)
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
        for level in LEVELS:
            memory = format_bytes(round(level * limit))
            self.says(
                f"{counted(len(choices), 'plan')}: the fastest within {memory} per device", False
            )
            self.fastest_within(level * limit, choices, None if level == 1.0 else MOST_PRICED)
        too_large = sum(bound.peak_bytes > limit for bound in self.bounded.values())
        fits = [o for o in self.priced.values() if not o.shortages]
        fits.sort(key=lambda o: (o.step_us, o.choice.place))
        counts = Counts(len(choices), too_large, len(self.priced), len(self.refused))
        refusal = next(iter(self.refused.values()), "")
        return Found(self.space, tuple(fits), tuple(self.priced.values()), counts, refusal)

    def fastest_within(self, limit: float, choices: Sequence[Choice], most: int | None) -> None:
        """Price choices in the order of their bounds, until no other can be faster.

        At most `most` new ones are priced, if it is a number.

        Bounds are rough at first, and exact before anything is priced. Of choices that differ only
        in the prefetch distance, the one with the least memory comes first: the others need at
        least as much, and overlap at least as many of their transfers.
        """
        kin = self._kin(limit, choices)
        waiting = [(self.bounded[each[0]].step_us, each[0].place, each[0]) for each in kin.values()]
        heapq.heapify(waiting)
        best, before = float("inf"), len(self.priced)
        while waiting and (most is None or len(self.priced) < before + most):
            least_us, _, choice = heapq.heappop(waiting)
            if least_us * (1 + TIME_GAP) >= best:
                return
            bound = self.exactly(choice)
            if bound is None or bound.peak_bytes > limit:
                continue
            if bound.step_us > least_us:
                heapq.heappush(waiting, (bound.step_us, choice.place, choice))
                continue
            found = self.price(choice)
            if found is None or found.peak_bytes > limit or found.shortages:
                continue
            best = min(best, found.step_us)
            for other in kin.pop(choice.kin, [])[1:]:
                least_us = max(bound.step_us, found.covered_us)
                heapq.heappush(waiting, (least_us, other.place, other))

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
        """Leave out a micro-batch that the model refuses; raise for that of the example call."""
        if choice.samples == self.family.samples:
            raise error
        self.refused[choice] = str(error)
