"""Bars on lanes: the form in which predicted and measured times are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerofx.analysis.time.forecast import Forecast
from zerofx.analysis.time.measured import Measured, MeasuredMemory, MeasuredSpan
from zerofx.analysis.time.steps import Lane
from zerofx.plan.sizes import format_bytes
from zerofx.tools.room import room
from zerofx.tools.views.timeline import format_us
from zerofx.tools.words import counted

WIDTH = 96  # characters of a lane
TAKEN, LEAST = 24, 24  # columns next to a lane, and of the shortest one
LEGEND = "# compute  = transfer  w wait  l launch  , busy less than half  . idle"
_FILL = {"wait": "w", "launch": "l", "release": "l"}  # else "#" for compute, "=" for transfers


@dataclass(frozen=True)
class Bar:
    """One interval of a lane. kind: "region", "transfer", "wait", ..., as of a measured span."""

    name: str
    lane: Lane
    kind: str
    start_us: float
    end_us: float
    graph: str = ""
    unit: str = ""
    note: str = ""

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Track:
    """The step of one rank: predicted or measured.

    step_us: duration of the step; transfers that overlap it may end in the next one.
    range_us: shortest and longest step. note: hardware and ranks, or device and steps. critical:
        names of the bars whose times add up to the step. memory: measured memory, if any.
    """

    name: str
    bars: tuple[Bar, ...]
    step_us: float
    range_us: tuple[float, float] = (0.0, 0.0)
    note: str = ""
    critical: frozenset[str] = frozenset()
    memory: MeasuredMemory | None = None


def timeline_track(predicted: Forecast) -> Track:
    """Return the predicted step."""
    timeline, ranks = predicted.timeline, predicted.program.world_size
    bars = tuple(
        Bar(s.task.name, s.task.lane, s.task.kind, s.start_us, s.end_us, s.task.graph, s.task.unit,
            f"{format_us(s.task.low_us)} .. {format_us(s.task.high_us)}  {s.idle_reason}".strip())
        for s in timeline.spans
    )  # fmt: skip
    critical = frozenset(s.task.name for s in timeline.critical_path())
    note = f"{predicted.hardware.name}, each of {ranks} ranks"
    return Track(
        "predicted", bars, timeline.step_us, (timeline.low_us, timeline.high_us), note, critical
    )


def measured_track(measured: Measured) -> Track:
    """Return the most typical step of a recording."""
    bars = tuple(
        Bar(s.name, s.lane, s.kind, s.start_us, s.end_us, s.graph, s.unit, _spread(s))
        for s in measured.spans
    )
    steps = measured.steps_us
    note = f"{measured.device}, the most typical of {counted(len(steps), 'step')}"
    step_us = steps[measured.typical]
    around = min(steps), max(steps)
    name = f"measured, rank {measured.rank}"
    return Track(name, bars, step_us, around, note, memory=measured.memory)


def _spread(span: MeasuredSpan) -> str:
    """Return the times of a span over all steps, as text."""
    said = f"median {format_us(span.us)} ({format_us(span.low_us)} .. {format_us(span.high_us)})"
    if span.nbytes and span.us:
        said += f", {format_bytes(span.nbytes)} at {span.nbytes / span.us / 1e3:.2g} GB/s"
    elif span.kind == "transfer" and not span.is_own:
        said += ", from its launch to the end of its wait"
    return "\n".join([said, *(f"{op}  {format_us(us)}" for op, us in span.ops)])


def lanes_of(bars: Iterable[Bar]) -> list[Lane]:
    """Return the lanes that have bars, in the order of Lane."""
    used = {bar.lane for bar in bars}
    return [lane for lane in Lane if lane in used]


def lane_lines(bars: tuple[Bar, ...], width: int = WIDTH, in_steps: bool = False) -> list[str]:
    """Draw lanes as rows of characters: `#` compute, `=` transfer, `w` wait, `l` launch, `.` idle.

    A character shows the activity that fills most of its time; `,` if all activities together fill
    less than half of it.
    """
    end = max((bar.end_us for bar in bars), default=0.0)
    if end <= 0.0:
        return []
    width = 4 * (room(width, TAKEN, LEAST) // 4)  # a tick every quarter
    cell = end / width
    write = "{:.0f}".format if in_steps else format_us
    ticks = [f"{write(end * k / 4):<{width // 4}}" for k in range(4)]
    lines = [f"{'':<12}{''.join(ticks)}{write(end)}"]
    for lane in lanes_of(bars):
        shares = _shares([b for b in bars if b.lane is lane], width, cell)
        row = "".join(_character(share, cell) for share in shares)
        lines.append(f"{lane.value:<12}{row}")
    return lines


def _shares(bars: Iterable[Bar], width: int, cell: float) -> list[dict[str, float]]:
    """Return, for each cell, the time of each character's bars in it."""
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for bar in bars:
        mark = _FILL.get(bar.kind, "=" if bar.kind == "transfer" else "#")
        first = max(0, int(bar.start_us / cell))
        for at in range(first, min(width, int(bar.end_us / cell) + 1)):
            inside = min(bar.end_us, (at + 1) * cell) - max(bar.start_us, at * cell)
            if inside > 0.0:
                shares[at][mark] = shares[at].get(mark, 0.0) + inside
    return shares


def _character(share: dict[str, float], cell: float) -> str:
    if not share:
        return "."
    mark = max(share, key=lambda m: share[m])
    return mark if sum(share.values()) >= cell / 2 else ","
