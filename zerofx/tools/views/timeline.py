"""Lanes over time as text: what is busy when, what it waits for, what the step is made of.

    time      0 .. 1.2 ms
    compute   ########++##########  1.0 ms busy
    gather    ##  ##  ##            0.3 ms busy, 0.1 ms exposed

A column is a part of the step: `#` where the lane is busy most of it, `+` half, `.` a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.timeline import Span, Timeline
from zerofx.ir.text import as_text, without_numbers
from zerofx.plan.sizes import format_bytes

WIDTH = 72
LINES = 8  # of the critical path


@dataclass(frozen=True)
class TimelineView:
    """One step's lanes: print it, or take `to_dict()` for JSON."""

    title: str
    timeline: Timeline

    def __str__(self) -> str:
        return as_text(self.lines())

    def lines(self) -> list[str]:
        """Return the lanes, why compute is idle, and the critical path by kind of task."""
        found = self.timeline
        lines = [f"# {self.title}", f"{'time':<12}0 .. {format_us(found.step_us)}"]
        for lane in Lane:
            spans = [s for s in found.spans if s.task.lane is lane and s.task.us > 0.0]
            if spans:
                lines.append(self._lane(lane, spans))
        idle = found.step_us - found.busy_us[Lane.COMPUTE]
        lines.append(f"compute stands still for {format_us(idle)}{_share(idle, found.step_us)}")
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
        """Return what the longest chain consists of, alike tasks of identical layers together."""
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
        return ["critical path, most first", *rows]

    def to_dict(self) -> dict[str, Any]:
        """Return every span and the sums as plain values."""
        return {"title": self.title, **self.timeline.to_dict()}


def _filled(spans: Sequence[Span], step_us: float) -> list[float]:
    """Return which share of each column a lane is busy."""
    width = step_us / WIDTH
    found = [0.0] * WIDTH
    for span in spans:
        first = min(int(span.start_us / width), WIDTH - 1)
        last = min(int(span.end_us / width), WIDTH - 1)
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
    """Return a time for people: `12.3 us`, `4.5 ms`, `1.2 s`."""
    if us >= 1e6:
        return f"{us / 1e6:.3g} s" if us < 1e9 else f"{us / 1e6:.0f} s"
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} us"
