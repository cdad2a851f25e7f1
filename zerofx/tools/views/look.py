"""A program over time, predicted and measured: as text, a page, a trace, or plain values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofx.analysis.memory.memory import ATEN
from zerofx.analysis.time.forecast import Forecast, Shortage, available_bytes
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
from zerofx.tools.views.timeline import format_rate, format_us
from zerofx.tools.views.trace import Process, write_trace
from zerofx.tools.words import counted


@dataclass(frozen=True)
class Look:
    """A program's schedule with its tracks: print it, write `page` or `trace`, or `to_dict()`.

    starts: wall-clock time (ns) at which each track began, 0 for a prediction.
    predicted: the prediction on some hardware, if there is one.
    in_steps: there are no times; the only track is the schedule, in which each step is one wide.
    unpriced: the reason why there is no prediction on the requested hardware.
    basis: how memory inside regions is counted, "aten" or "compiled".
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
        lines += [f"{name}: {value}" for name, value in self._fit()]
        for track in self.tracks:
            end = (
                counted(round(track.step_us), "step") if self.in_steps else format_us(track.step_us)
            )
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
        """Return the predicted peak, and the measured peak of each rank."""
        predicted = self.schedule.memory.peak_bytes
        lines = [f"{'peak memory':<22}{format_bytes(predicted):>12}   predicted"]
        return lines + [
            f"{'':<22}{format_bytes(track.memory.peak_bytes):>12}   {track.name} "
            f"({beside(track.memory.peak_bytes, predicted)})"
            for track in self.tracks
            if track.memory
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the data of the page, without the passes, as plain values."""
        return page_data(self, passes=False) | {"unpriced": self.unpriced}

    def page(self, path: str | os.PathLike[str], passes: bool = True) -> Path:
        """Write the HTML page. passes: with the changes of each pass."""
        where = Path(path)
        where.write_text(render(page_data(self, passes), self._facts()), encoding="utf-8")
        return where

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Write trace events for Perfetto, gzip: a process per track, on one clock."""
        began = min((at for at in self.starts if at), default=0)
        processes = [
            Process(track.name, track.bars, self._counters(track), max(0, at - began) / 1e3)
            for track, at in zip(self.tracks, self.starts, strict=True)
        ]
        return write_trace(path, processes, details(self.program.planned(), self.schedule))

    def _fit(self) -> list[tuple[str, str]]:
        """Return whether the program fits the hardware, as a fact: ("fits", "2 GiB of 78 GiB")."""
        planned = self.program.planned()
        hardware = planned.hardware if self.predicted is None else self.predicted.hardware
        peak, there = self.schedule.memory.peak_bytes, available_bytes(hardware)
        short = "; ".join(map(str, self.predicted.shortages)) if self.predicted else ""
        if not short and peak > there:
            short = str(Shortage("each device", peak, there))
        if short:
            return [("does not fit", f"{hardware.name}: {short}")]
        share = f"{100 * peak / there:.2g} %" if there else "all"
        return [("fits", f"{share} of the {format_bytes(there)} of a {hardware.name} device")]

    def _facts(self) -> list[tuple[str, str]]:
        """Return the facts above the page's picture: (name, value)."""
        report, program = self.schedule.memory, self.program.planned()
        found = [*self._fit(), ("peak memory per rank", format_bytes(report.peak_bytes))]
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
            low, high = track.range_us
            said = f"{format_us(track.step_us)} ({format_us(low)} .. {format_us(high)})"
            found.append((f"step, {track.name}", said))
        if self.predicted is not None:
            found += _predicted(self.predicted)
        if self.unpriced:
            found.append(("no predicted times", self.unpriced))
        found += [("steps of the schedule", str(len(self.schedule.steps)))]
        if isinstance(self.program, Planned):
            found += [("kernels", program.plan.kernels)]
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
    """Return a program's look from its prediction and its recordings.

    unpriced: the reason why there is no prediction on the requested hardware.
    """
    tracks = [] if predicted is None else [timeline_track(predicted)]
    tracks += [measured_track(m) for m in recorded]
    starts = [0] * (predicted is not None) + [m.walls_ns[m.typical] for m in recorded]
    if not tracks:
        track = step_track(schedule)
        return Look(program, schedule, (track,), (0,), None, True, unpriced, basis)
    return Look(program, schedule, tuple(tracks), tuple(starts), predicted, False, unpriced, basis)


def beside(measured: int, predicted: int) -> str:
    """Compare a measured value with the predicted one: `0.4 % more than predicted`."""
    percent = f"{abs(measured / predicted - 1.0) * 100:.1f}"
    return f"{percent} % {'more' if measured >= predicted else 'less'} than predicted"


def _predicted(predicted: Forecast) -> list[tuple[str, str]]:
    """Return the figures of a prediction above the page's picture, each as a range."""
    exposed, mfu, tokens = predicted.exposed_us, predicted.mfu, predicted.tokens_per_s
    found = [
        ("hardware", predicted.hardware.name),
        ("exposed communication", f"{format_us(exposed.low)} .. {format_us(exposed.high)}"),
        ("model FLOPS utilisation", f"{mfu.low:.0%} .. {mfu.high:.0%}"),
    ]
    if predicted.tokens:
        found.append(("tokens/s", f"{format_rate(tokens.low, 2)} .. {format_rate(tokens.high, 2)}"))
    return found


def step_track(schedule: StepList) -> Track:
    """Return the schedule as a track in which every step is one wide."""
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
