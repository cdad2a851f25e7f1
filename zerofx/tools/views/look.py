"""A program over time, predicted and as recorded: as text, a page, a trace, or plain values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofx.analysis.memory.memory import ATEN
from zerofx.analysis.time.forecast import Forecast
from zerofx.analysis.time.measured import Measured
from zerofx.analysis.time.steps import Lane, StepList
from zerofx.ir.program import Planned, Program
from zerofx.ir.text import as_text
from zerofx.plan.sizes import format_bytes
from zerofx.tools.views.bars import LEGEND, Bar, Track, lane_lines, measured_track, timeline_track
from zerofx.tools.views.beside import pair_lines, pairs
from zerofx.tools.views.details import details
from zerofx.tools.views.page import page_data, render, step_times
from zerofx.tools.views.schedule import title
from zerofx.tools.views.timeline import format_us
from zerofx.tools.views.trace import Process, write_trace


@dataclass(frozen=True)
class Look:
    """A program's schedule with its tracks: print it, write `page` or `trace`, or `to_dict()`.

    starts: of each track, when it began on the wall's clock (ns), 0 where it never ran.
    predicted: the prediction on some hardware, if there is one.
    in_steps: no times are known: the only track is the schedule, each step one wide.
    unpriced: why there is no prediction on the hardware that was asked for.
    basis: what regions are counted as in memory, "aten" or "compiled".
    """

    program: Program
    schedule: StepList
    tracks: tuple[Track, ...]
    starts: tuple[int, ...]
    predicted: Forecast | None = None
    in_steps: bool = False
    unpriced: str = ""
    basis: str = ATEN

    def __str__(self) -> str:
        lines = [f"# {title(self.program, self.basis)}"]
        lines += [f"no predicted times: {self.unpriced}"] if self.unpriced else []
        for track in self.tracks:
            end = f"{track.step_us:.0f} steps" if self.in_steps else format_us(track.step_us)
            lines += ["", f"{track.name}: {end}   {track.note}"]
            lines += lane_lines(track.bars, in_steps=self.in_steps)
        lines += ["", LEGEND]
        if self.predicted is not None:
            about = details(self.program.planned(), self.schedule)
            predicted, *measured = self.tracks
            for track in measured:
                lines += ["", *pair_lines(pairs(predicted, track, about), track.name)]
        if any(track.memory for track in self.tracks):
            lines += ["", *self._memory_lines()]
        return as_text(lines)

    def _memory_lines(self) -> list[str]:
        """Return the predicted peak, and next to it what each rank measured."""
        predicted = self.schedule.memory.peak_bytes
        lines = [f"{'peak memory':<22}{format_bytes(predicted):>12}   predicted"]
        return lines + [
            f"{'':<22}{format_bytes(track.memory.peak_bytes):>12}   {track.name} "
            f"({beside(track.memory.peak_bytes, predicted)})"
            for track in self.tracks
            if track.memory
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return what the page shows, as plain values, but for the passes."""
        return page_data(self, passes=False) | {"unpriced": self.unpriced}

    def page(self, path: str | os.PathLike[str], passes: bool = True) -> Path:
        """Write the HTML page. passes: with what each pass changed."""
        where = Path(path)
        where.write_text(render(page_data(self, passes), self._facts()), encoding="utf-8")
        return where

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Write trace events for Perfetto, gzip: a process each track, on one clock."""
        began = min((at for at in self.starts if at), default=0)
        processes = [
            Process(track.name, track.bars, self._counters(track), max(0, at - began) / 1e3)
            for track, at in zip(self.tracks, self.starts, strict=True)
        ]
        return write_trace(path, processes, details(self.program.planned(), self.schedule))

    def _facts(self) -> list[tuple[str, str]]:
        """Return the facts above the page's picture: (name, value)."""
        report, program = self.schedule.memory, self.program.planned()
        found = [("peak memory a rank", format_bytes(report.peak_bytes))]
        for track in (t for t in self.tracks if t.memory):
            peak = track.memory.peak_bytes if track.memory else 0
            said = f"{format_bytes(peak)} ({beside(peak, report.peak_bytes)})"
            found.append((f"peak memory, {track.name}", said))
        if program.plan.memory_budget:
            found.append(("memory budget", format_bytes(program.plan.memory_budget)))
        if report.host_bytes:
            found.append(("host memory", format_bytes(report.host_bytes)))
        if report.nvme_bytes:
            found.append(("files", format_bytes(report.nvme_bytes)))
        for track in () if self.in_steps else self.tracks:
            low, high = map(format_us, track.range_us)
            found.append((f"step, {track.name}", f"{format_us(track.step_us)} ({low} .. {high})"))
        if self.predicted is not None:
            found += _foreseen(self.predicted)
        if self.unpriced:
            found.append(("no predicted times", self.unpriced))
        found += [("world", str(program.world_size))]
        found += [("steps of the schedule", str(len(self.schedule.steps)))]
        if isinstance(self.program, Planned):
            found += [("stage", str(program.plan.stage)), ("kernels", program.plan.kernels)]
        return found

    def _counters(self, track: Track) -> Mapping[str, list[tuple[float, int]]]:
        """Return the memory over the track's time."""
        times = step_times(track, self.schedule)
        held = [(t[0], s.resident_bytes) for t, s in zip(times, self.schedule.steps, strict=True)]
        found = {"memory, predicted": held}
        if track.memory:
            measured = track.memory.held
            found["memory, measured"] = [
                (t[0], measured[s.name])
                for t, s in zip(times, self.schedule.steps, strict=True)
                if s.name in measured
            ]
        return found


def look(
    program: Program, schedule: StepList, predicted: Forecast | None, recorded: Sequence[Measured],
    unpriced: str = "", basis: str = ATEN,
) -> Look:  # fmt: skip
    """Return a program's look from what was predicted and recorded of it.

    unpriced: why nothing was predicted on the hardware that was asked for.
    """
    tracks = [] if predicted is None else [timeline_track(predicted)]
    tracks += [measured_track(m) for m in recorded]
    starts = [0] * (predicted is not None) + [m.walls_ns[m.typical] for m in recorded]
    if not tracks:
        track = step_track(schedule)
        return Look(program, schedule, (track,), (0,), None, True, unpriced, basis)
    return Look(program, schedule, tuple(tracks), tuple(starts), predicted, False, unpriced, basis)


def beside(measured: int, predicted: int) -> str:
    """Say how much more or less was measured than predicted: `0.4 % more than predicted`."""
    percent = f"{abs(measured / predicted - 1.0) * 100:.1f}"
    return f"{percent} % {'more' if measured >= predicted else 'less'} than predicted"


def _foreseen(predicted: Forecast) -> list[tuple[str, str]]:
    """Return the figures of a prediction that a page begins with."""
    found = [
        ("hardware", predicted.hardware.name),
        ("exposed communication", format_us(predicted.exposed_us.middle)),
        ("model FLOPS utilisation", f"{predicted.mfu.middle:.1%}"),
    ]
    if predicted.tokens:
        found.append(("tokens/s", f"{predicted.tokens_per_s.middle:,.0f}"))
    short = "; ".join(map(str, predicted.shortages))
    return [*found, ("does not fit", short)] if short else found


def step_track(schedule: StepList) -> Track:
    """Return the schedule as a track on which every step is one wide."""
    waits = {s.name.removesuffix(" wait"): s.index for s in schedule.steps if s.kind == "wait"}
    bars = []
    for s in schedule.steps:
        kind, end = ("transfer", waits.get(s.name, s.index)) if s.kind == "launch" else (
            s.kind, s.index
        )  # fmt: skip
        lane = Lane.HOST if s.kind == "release" else s.lane
        if s.kind != "wait":
            bars.append(Bar(s.name, lane, kind, s.index, end + 1, s.graph, s.unit))
    note = "each step one wide; --hardware NAME predicts times"
    return Track("schedule", tuple(bars), float(len(schedule.steps)), note=note)
