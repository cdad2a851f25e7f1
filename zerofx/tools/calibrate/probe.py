"""A probe: work of one size whose time is a point of a curve, and the measurement of its time."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Work = Callable[[], object]

ROUND = "round"  # first word of a line in which a rank reports its progress
LEAST_S = 4e-3  # of one measurement: some thousand times the resolution of the clock
MOST_CALLS = 2000
TURNS = 12  # sets of tensors: as many as a small model has layers


def in_turn(make: Callable[[], Work]) -> Work:
    """Return a call that works on other tensors each time, as the layers of a model do.

    Unless the tensors are small, they have left the caches when their turn comes again.
    """
    turns = itertools.cycle([make() for _ in range(TURNS)])
    return lambda: next(turns)()


@dataclass
class Probe:
    """One size of one kind of work.

    curve, x: the point that it measures. amount: operations, bytes or elements of one call, for a
    rate. make: builds the tensors, and returns the call to time. calls: per measurement; None finds
    a number that takes long enough, which ranks that wait for each other must not do.
    """

    curve: str
    x: float
    amount: float
    make: Callable[[], Work]
    calls: int | None = None
    found_s: list[float] = field(default_factory=list)
    _work: Work | None = None

    def prepare(self) -> None:
        """Build, warm up, and find the number of calls per measurement."""
        self._work = self.make()
        self.calls, is_found = (1, False) if self.calls is None else (self.calls, True)
        self.run()
        while not is_found and self.calls < MOST_CALLS:
            took = self.run() * self.calls
            if took >= LEAST_S:
                break
            self.calls = min(MOST_CALLS, max(2 * self.calls, int(self.calls * LEAST_S / took)))

    def run(self) -> float:
        """Measure the seconds of one call."""
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
        """The median of the noted seconds."""
        return statistics.median(self.found_s)
