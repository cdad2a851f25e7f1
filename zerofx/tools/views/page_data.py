"""What the page of a program shows, as plain values: small, since it travels inside the file."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from zerofx.analysis.time.forecast import RESERVED_BYTES, Forecast
from zerofx.analysis.time.steps import Lane, StepList
from zerofx.ir.program import Entry, Program
from zerofx.ir.repeats import find_repeats, is_numbered
from zerofx.ir.spec import meanings
from zerofx.ir.text import without_numbers
from zerofx.tools.views.bars import Bar, Track
from zerofx.tools.views.beside import pairs
from zerofx.tools.views.details import Detail, details
from zerofx.tools.views.page_memory import Texts, largest_storages, memory_by_step, step_times
from zerofx.tools.views.schedule import title
from zerofx.tools.views.why import BUDGET

GRAPHS = ("forward", "backward", "step")
CRITICAL = "; underlined: the critical path"  # of a track, as the page draws it
DIFF_LINES = 400  # of one pass


class Shown(Protocol):
    """What a page is of (tools/views/look.py)."""

    @property
    def program(self) -> Program: ...

    @property
    def schedule(self) -> StepList: ...

    @property
    def tracks(self) -> tuple[Track, ...]: ...

    @property
    def predicted(self) -> Forecast | None: ...

    @property
    def in_steps(self) -> bool: ...

    @property
    def basis(self) -> str: ...


def page_data(shown: Shown, passes: bool) -> dict[str, Any]:
    """Return everything that the page's script reads. passes: with what each changed."""
    program, schedule = shown.program.planned(), shown.schedule
    about = details(program, schedule)
    table = Texts()
    steps = [_step(d, table) for d in about.values()]
    place = {name: i for i, name in enumerate(about)}
    report = schedule.memory
    return {
        "title": title(shown.program, shown.basis),
        "lanes": [lane.value for lane in Lane],
        "verbs": meanings(),
        "graphs": GRAPHS,
        "steps": steps,
        "texts": table.texts,
        "uses": [place.get(d.used_by, -1) for d in about.values()],
        "tracks": [_track(track, schedule, place) for track in shown.tracks],
        "beside": _beside(shown, about, place),
        "in_steps": shown.in_steps,
        "layers": layers(schedule),
        "memory": memory_by_step(schedule),
        "storages": largest_storages(schedule, table),
        "peak_bytes": report.peak_bytes,
        "peak_step": schedule.peak_step,
        "host_bytes": report.host_bytes,
        "nvme_bytes": report.nvme_bytes,
        "limits": _limits(shown),
        "history": _history(program.history) if passes else [],
        "decisions": [asdict(d) for d in program.decisions if d.subject != BUDGET],
        "spent": next((d.why for d in program.decisions if d.subject == BUDGET), ""),
    }


def _step(detail: Detail, table: Texts) -> list[Any]:
    """Return name, kind, lane, graph, unit, moves, bytes, line, names, resident bytes."""
    step = detail.step
    return [
        step.name, table.number(step.kind), list(Lane).index(step.lane), GRAPHS.index(step.graph),
        table.number(step.unit), table.number(detail.moves), detail.nbytes,
        table.number(detail.line), table.number("\n".join(detail.names)), step.resident_bytes,
        table.number(step.heaviest),
    ]  # fmt: skip


def _limits(shown: Shown) -> list[tuple[str, int]]:
    """Return (name, bytes) of what a rank's memory should stay under."""
    found = []
    plan, predicted = shown.program.planned().plan, shown.predicted
    if plan.memory_budget:
        found.append(("budget", plan.memory_budget))
    if predicted is not None:
        hardware = predicted.hardware
        room = hardware.device_memory_bytes - RESERVED_BYTES[hardware.device_type]
        found.append((hardware.device, room))
    return found


def layers(schedule: StepList) -> list[list[Any]]:
    """Return [first step, steps a layer, layers, unit of the first] of what repeats."""
    steps = schedule.steps
    keys: list[Hashable] = [
        (s.kind, s.lane, s.graph, without_numbers(s.unit), s.num_nodes, s.verb) for s in steps
    ]
    starts = [i == 0 or steps[i].unit != steps[i - 1].unit for i in range(len(steps))]
    found = []
    for repeat in find_repeats(keys, starts):
        own = steps[repeat.start : repeat.start + repeat.period]
        unit = next((s.unit for s in own if s.kind == "region" and is_numbered(s.unit)), "")
        found.append([repeat.start, repeat.period, repeat.count, unit or own[0].unit])
    return found


def _track(track: Track, schedule: StepList, place: dict[str, int]) -> dict[str, Any]:
    """Return a track, and its bars: name or the step's number, kind, lane, graph, start, end,
    note, 1 where it is on the critical path. held: what was measured at each step, -1: nothing.
    """
    bars = [
        [place.get(bar.name, bar.name), bar.kind, list(Lane).index(bar.lane), bar.graph,
         round(bar.start_us, 2), round(bar.end_us, 2), _note(bar, place),
         int(bar.name in track.critical)]
        for bar in track.bars
    ]  # fmt: skip
    times = [[round(a, 2), round(b, 2)] for a, b in step_times(track, schedule)]
    held = []
    note = track.note + (CRITICAL if track.critical else "")
    if track.memory:
        held = [track.memory.held.get(step.name, -1) for step in schedule.steps]
    return {"name": track.name, "bars": bars, "times": times, "range": track.range_us,
            "note": note, "held": held, "step": track.step_us,
            "peak_bytes": track.memory.peak_bytes if track.memory else 0}  # fmt: skip


def _beside(
    shown: Shown, about: Mapping[str, Detail], place: dict[str, int]
) -> list[list[list[Any]]]:
    """Return the rows of `pairs` for each measured track that a prediction precedes:
    the step's number or -1, name, unit, what, count, predicted, measured.
    """
    if shown.predicted is None:
        return []
    predicted, *measured = shown.tracks
    return [
        [[place.get(p.name, -1), p.name, p.unit, p.what, p.count, round(p.predicted_us, 2),
          round(p.measured_us, 2)] for p in pairs(predicted, track, about)]
        for track in measured
    ]  # fmt: skip


def _note(bar: Bar, place: dict[str, int]) -> str:
    """Return what is said of a bar; of one that is no step, its unit too."""
    unit = f"unit {bar.unit}\n" if bar.unit and bar.name not in place else ""
    return unit + bar.note


def _history(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return every pass with what it changed of the program's text."""
    found, before = [], ""
    for number, entry in enumerate(entries):
        record = entry.record()
        lines = list(difflib.unified_diff(before.splitlines(), record.body.splitlines(),
                                          lineterm="", n=1))[2:] if number else []  # fmt: skip
        more = len(lines) - DIFF_LINES
        if more > 0:
            lines = [*lines[:DIFF_LINES], f"... and {more} lines more"]
        found.append({
            "pass": entry.pass_spec, "summary": entry.summary, "nodes": entry.num_nodes,
            "comm_bytes": record.comm_bytes, "peak_bytes": record.peak_bytes, "diff": lines,
        })  # fmt: skip
        before = record.body
    return found
