"""What a search found: the plans that fit, the front of memory against time, what was left out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zerofx.tools.search.outcome import Outcome
from zerofx.tools.search.space import Space

# Times that differ by less are the same; a plan that holds less by less is no point of the front.
TIE, WORTH = 0.001, 0.01
MIB = 2**20


@dataclass(frozen=True)
class Counts:
    """Of all plans considered: left out for their memory by a bound alone, priced, refused.

    All others were left out because no time that they could reach would have been the best, or,
    for a part of the memory, behind as many more promising ones as are priced for it.
    """

    considered: int
    too_large: int
    priced: int
    refused: int

    @property
    def too_slow(self) -> int:
        return max(self.considered - self.too_large - self.priced - self.refused, 0)


@dataclass(frozen=True)
class Found:
    """The end of a search. fits: the fastest first. priced: all whose figures are known.

    refusal: why the first of those that cannot be cannot.
    """

    space: Space
    fits: tuple[Outcome, ...]
    priced: tuple[Outcome, ...]
    counts: Counts
    refusal: str = ""

    @cached_property
    def best(self) -> Outcome:
        """The plan that holds least of those that are as fast as any."""
        as_fast = [o for o in self.fits if o.step_us <= self.fits[0].step_us * (1 + TIE)]
        return min(as_fast, key=lambda o: (o.peak_bytes // MIB, o.choice.place))

    @cached_property
    def front(self) -> tuple[Outcome, ...]:
        """The plans that fit and of which no faster one holds about as little, the best first."""
        found = [self.best]
        for each in self.fits:
            if each.peak_bytes < found[-1].peak_bytes * (1 - WORTH):
                found.append(each)
        return tuple(found)

    @cached_property
    def runner_up(self) -> Outcome | None:
        """The fastest plan that is not as fast as the best; where all are, the next of these."""
        slower = [o for o in self.fits if o.step_us > self.fits[0].step_us * (1 + TIE)]
        others = [o for o in self.fits if o is not self.best]
        return next(iter([*slower, *others]), None)
