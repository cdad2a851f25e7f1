"""Lanes over time as text: when each is busy, how long it waits, and the critical path.

    time      0 .. 1.2 ms
    compute   ########++##########  1.0 ms busy
    gather    ##  ##  ##            0.3 ms busy, 0.1 ms exposed

Each column is a part of the step: `#` if the lane is busy most of it, `+` half, `.` a little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.timeline import Span, Timeline
from zerofx.ir.text import as_text, without_numbers
from zerofx.plan.sizes import format_bytes
from zerofx.tools.room import room

WIDTH = 72  # columns of a lane
TAKEN, LEAST = 56, 24  # columns next to a lane, and of the shortest one
LINES = 8  # of the critical path


@dataclass(frozen=True)
class TimelineView:
    """The lanes of one step: print them, or take `to_dict()` for JSON."""

    title: str
    timeline: Timeline

    def __str__(self) -> str:
        return as_text(self.lines())

    def lines(self) -> list[str]:
        """Return the lanes, the idle time of compute, and the critical path by kind of task."""
        found = self.timeline
        lines = [f"# {self.title}", f"{'time':<12}0 .. {format_us(found.step_us)}"]
        for lane in Lane:
            spans = [s for s in found.spans if s.task.lane is lane and s.task.us > 0.0]
            if spans:
                lines.append(self._lane(lane, spans))
        idle = found.step_us - found.busy_us[Lane.COMPUTE]
        lines.append(f"compute idle: {format_us(idle)}{_share(idle, found.step_us)}")
        return lines + self._critical()

    def _lane(self, lane: Lane, spans: Sequence[Span]) -> str:
        bar = "".join(map(_mark, _filled(spans, self.timeline.step_us)))
        notes = [f"{format_us(self.timeline.busy_us[lane])} busy"]
        moved = sum(s.task.nbytes for s in spans)
        if lane is not Lane.COMPUTE:
            notes.append(f"{format_us(self.timeline.exposed_us[lane])} exposed")
            notes += [format_bytes(moved)] if moved and lane is not Lane.HOST else []
        return f"{lane.value:<12}{bar}  {', '.join(notes)}"

    def _critical(self) -> list[str]:
        """Return the longest tasks of the critical path, those of identical layers summed."""
        sums: dict[tuple[str, str], tuple[float, int]] = {}
        for span in self.timeline.critical_path():
            name = without_numbers(f"{span.task.name} {span.task.unit}".split(" #")[0]).strip()
            us, count = sums.get((span.task.lane.value, name), (0.0, 0))
            sums[span.task.lane.value, name] = us + span.task.us, count + 1
        ranked = sorted(sums.items(), key=lambda kv: -kv[1][0])[:LINES]
        rows = [
            f"  {format_us(us):>10}{_share(us, self.timeline.step_us)}  {lane:<11} {name}"
            + (f" x{count}" if count > 1 else "")
            for (lane, name), (us, count) in ranked
        ]
        return ["critical path, longest first", *rows]

    def to_dict(self) -> dict[str, Any]:
        """Return every span, and the sums, as plain values."""
        return {"title": self.title, **self.timeline.to_dict()}


def _filled(spans: Sequence[Span], step_us: float) -> list[float]:
    """Return the share of each column for which a lane is busy."""
    columns = room(WIDTH, TAKEN, LEAST)
    width = step_us / columns
    found = [0.0] * columns
    for span in spans:
        first = min(int(span.start_us / width), columns - 1)
        last = min(int(span.end_us / width), columns - 1)
        for column in range(first, last + 1):
            begin, end = column * width, (column + 1) * width
            found[column] += max(min(span.end_us, end) - max(span.start_us, begin), 0.0) / width
    return found


def _mark(filled: float) -> str:
    if filled > 0.7:
        return "#"
    if filled > 0.3:
        return "+"
    return "." if filled > 0.02 else " "


def _share(us: float, step_us: float) -> str:
    return f" ({us / step_us:.0%})" if step_us else ""


def format_us(us: float) -> str:
    """Return a time with its unit: `12.3 us`, `4.5 ms`, `1.2 s`."""
    if us >= 1e6:
        return f"{us / 1e6:.3g} s" if us < 1e9 else f"{us / 1e6:.0f} s"
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} us"


def format_rate(rate: float, figures: int = 3) -> str:
    """Return a rate without more digits than a prediction knows: `52,900`, `4.94`."""
    if rate <= 0:
        return f"{rate:g}"
    decimals = figures - 1 - math.floor(math.log10(rate))
    return f"{round(rate, decimals):,.{max(0, decimals)}f}"
