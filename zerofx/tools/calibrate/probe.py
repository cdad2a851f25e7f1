"""A probe: work of one size whose time is a point of a curve; and how its time is taken."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Work = Callable[[], object]

ROUND = "round"  # what a line begins with by which a rank says how far it is
LEAST_S = 4e-3  # of one measurement: some thousand times what the clock resolves
MOST_CALLS = 2000
TURNS = 12  # sets of tensors: as many as a small model has layers


def in_turn(make: Callable[[], Work]) -> Work:
    """Return a call that works on other tensors each time, as layers of a model do.

    What one call brought into the caches is gone when its turn comes again, unless it is little.
    """
    turns = itertools.cycle([make() for _ in range(TURNS)])
    return lambda: next(turns)()


@dataclass
class Probe:
    """One size of one kind of work.

    curve, x: the point that it measures. amount: operations, bytes or elements of one call, what a
    rate is made of. make: builds the tensors, and returns the call that is timed. calls: in one
    measurement; None finds how many fill it, which ranks that wait for each other must not.
    """

    curve: str
    x: float
    amount: float
    make: Callable[[], Work]
    calls: int | None = None
    found_s: list[float] = field(default_factory=list)
    _work: Work | None = None

    def prepare(self) -> None:
        """Build, warm up, and find how many calls one measurement takes."""
        self._work = self.make()
        self.calls, is_found = (1, False) if self.calls is None else (self.calls, True)
        self.run()
        while not is_found and self.calls < MOST_CALLS:
            took = self.run() * self.calls
            if took >= LEAST_S:
                break
            self.calls = min(MOST_CALLS, max(2 * self.calls, int(self.calls * LEAST_S / took)))

    def run(self) -> float:
        """Return the seconds of one call, now."""
        assert self._work is not None and self.calls is not None
        work = self._work
        began = time.perf_counter()
        for _ in range(self.calls):
            work()
        return (time.perf_counter() - began) / self.calls

    def measure(self) -> None:
        """Note the seconds of one call."""
        self.found_s.append(self.run())

    @property
    def seconds(self) -> float:
        """The median of what was found."""
        return statistics.median(self.found_s)
