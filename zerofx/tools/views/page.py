"""The page of a program: one HTML file with its data, script and style, which opens offline."""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import jinja2

from zerofx.analysis.memory.memory import Memory
from zerofx.analysis.memory.storage import Category, Storage
from zerofx.analysis.time.forecast import Forecast, available_bytes
from zerofx.analysis.time.steps import Lane, StepList
from zerofx.ir.program import Entry, Program
from zerofx.ir.repeats import find_repeats, is_numbered
from zerofx.ir.spec import meanings
from zerofx.ir.text import without_numbers
from zerofx.tools.views.bars import Bar, Track
from zerofx.tools.views.beside import pairs
from zerofx.tools.views.details import Detail, details
from zerofx.tools.views.schedule import title
from zerofx.tools.views.why import BUDGET
from zerofx.tools.words import counted

_HERE = Path(__file__).parent / "templates"
_SCRIPTS = (
    "page_html.js",
    "page_axis.js",
    "page_colours.js",
    "page_lanes.js",
    "page_memory.js",
    "page_words.js",
    "page_tables.js",
    "page.js",
)


def render(data: dict[str, Any], facts: Sequence[tuple[str, str]]) -> str:
    """Return the page of a program's data, headed by (name, value) facts.

    Names come from models and recordings of strangers. They stay text: the template escapes them,
    the data has no character that HTML interprets, the scripts write through `html` alone, and the
    content-security policy allows these scripts only, by their hashes.
    """
    said = json.dumps(data, separators=(",", ":"))
    for char in "<>&":
        said = said.replace(char, f"\\u{ord(char):04x}")
    script = "\n".join(_text(name) for name in _SCRIPTS)
    css = _text("page.css")
    template = jinja2.Template(_text("page.html.j2"), autoescape=True)
    made = template.render(
        title=data["title"],
        facts=facts,
        css=css,
        css_hash=_hash(css),
        script=script,
        script_hash=_hash(script),
        data=said,
    )
    return made.encode("utf-8", "backslashreplace").decode()  # a lone surrogate


def _hash(text: str) -> str:
    """Return the name of a script or style in a content-security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


# -- The memory below the lanes: bytes by category at each step, and the largest tensors -----------


STORAGES = 3000  # the largest tensors, which the tip at the pointer names
APART = (Category.HOST, Category.NVME)


class Texts:
    """Texts by number: equal texts of layers are stored once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._number: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._number:
            self._number[text] = len(self.texts)
            self.texts.append(text)
        return self._number[text]


def step_times(track: Track, schedule: StepList) -> list[tuple[float, float]]:
    """Return (start, end) of each step in a track; a step ends when the next one begins.

    A step without a bar starts when the compute before it has ended.
    """
    by_name = {bar.name: bar for bar in track.bars}
    starts, at = [], 0.0
    for step in schedule.steps:
        own = by_name.get(f"{step.name} launch" if step.kind == "launch" else step.name)
        if own is not None and own.kind != "transfer":
            at = max(at, own.start_us)
            starts.append(at)
            at = max(at, own.end_us)
        else:
            starts.append(at)
    return list(zip(starts, [*starts[1:], max(at, track.step_us)], strict=True)) if starts else []


def memory_by_step(schedule: StepList) -> dict[str, Any]:
    """Return the bytes of each category at the peak of each step."""
    report = schedule.memory
    times = [_fullest(report, *step.times) for step in schedule.steps]
    curves = {c: _curve(_all(report, c), len(report.curve)) for c in Category}
    shown = {c: [curve[t] for t in times] for c, curve in curves.items()}
    on_device = [c for c in Category if c not in APART and any(shown[c])]
    return {
        "categories": [c.value for c in on_device],
        "bytes": [shown[c] for c in on_device],
        "apart": {c.value: shown[c] for c in APART if any(shown[c])},
    }


def _fullest(report: Memory, first: int, end: int) -> int:
    return max(range(first, end), key=lambda t: report.curve[t])


def _all(report: Memory, category: Category) -> list[Storage]:
    every = (*report.storages, *report.on_host, *report.on_nvme)
    return [s for s in every if s.category is category]


def _curve(storages: Sequence[Storage], end: int) -> list[int]:
    change = [0] * (end + 1)
    for storage in storages:
        change[storage.birth] += storage.nbytes
        change[storage.death + 1] -= storage.nbytes
    curve, held = [], 0
    for step in change[:-1]:
        held += step
        curve.append(held)
    return curve


def largest_storages(schedule: StepList, table: Texts) -> list[list[int]]:
    """Return [name, place, category, bytes, first step, last step] of the largest tensors."""
    report = schedule.memory
    step_at = [0] * (len(report.curve) + 1)
    for step in schedule.steps:
        for t in range(step.times[0], len(step_at)):
            step_at[t] = step.index
            if t >= step.times[1]:
                break
    kinds = list(Category)
    largest = sorted(report.storages, key=lambda s: -s.nbytes)[:STORAGES]
    return [
        [table.number(s.name), table.number(f"{s.where.module or s.where.unit}  {s.where.line}"),
         kinds.index(s.category), s.nbytes, step_at[s.birth], step_at[s.death]]
        for s in largest if s.nbytes
    ]  # fmt: skip


# -- The data of a page as plain values, kept small since the file contains it ---------------------


GRAPHS = ("forward", "backward", "step")
DIFF_LINES = 400  # of one pass


class Shown(Protocol):
    """The subject of a page (tools/views/look.py)."""

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
    """Return the data that the page's script reads. passes: with the changes of each pass."""
    program, schedule = shown.program.planned(), shown.schedule
    about = details(program, schedule)
    table = Texts()
    steps = [_step(d, table) for d in about.values()]
    place = {name: i for i, name in enumerate(about)}
    report = schedule.memory
    return {
        "title": title(shown.program, shown.basis).replace("   ", " · "),  # HTML joins spaces
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
    """Return (name, bytes) of the limits of a rank's memory: the budget, and the device."""
    found = []
    planned = shown.program.planned()
    if planned.plan.memory_budget:
        found.append(("budget", planned.plan.memory_budget))
    hardware = planned.hardware if shown.predicted is None else shown.predicted.hardware
    found.append((hardware.device, available_bytes(hardware)))
    return found


def layers(schedule: StepList) -> list[list[Any]]:
    """Return [first step, steps per layer, layers, unit of the first] of identical layers."""
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
    """Return a track with its bars.

    A bar is its name or the number of its step, kind, lane, graph, start, end, note, and 1 if it is
    on the critical path. held: measured bytes at each step, -1 if there are none.
    """
    bars = [
        [place.get(bar.name, bar.name), bar.kind, list(Lane).index(bar.lane), bar.graph,
         round(bar.start_us, 2), round(bar.end_us, 2), _note(bar, place),
         int(bar.name in track.critical)]
        for bar in track.bars
    ]  # fmt: skip
    times = [[round(a, 2), round(b, 2)] for a, b in step_times(track, schedule)]
    held = []
    if track.memory:
        held = [track.memory.held.get(step.name, -1) for step in schedule.steps]
    return {"name": track.name, "bars": bars, "times": times, "range": track.range_us,
            "note": track.note, "held": held, "step": track.step_us,
            "peak_bytes": track.memory.peak_bytes if track.memory else 0}  # fmt: skip


def _beside(
    shown: Shown, about: Mapping[str, Detail], place: dict[str, int]
) -> list[list[list[Any]]]:
    """Return the rows of `pairs` for each measured track, if there is a prediction.

    A row is the number of the step or -1, name, unit, what, count, predicted, measured.
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
    """Return the note of a bar, with the unit of a bar that is no step."""
    unit = f"unit {bar.unit}\n" if bar.unit and bar.name not in place else ""
    return unit + bar.note


def _history(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return every pass with its changes of the program's text."""
    found, before = [], ""
    for number, entry in enumerate(entries):
        record = entry.record()
        lines = list(difflib.unified_diff(before.splitlines(), record.body.splitlines(),
                                          lineterm="", n=1))[2:] if number else []  # fmt: skip
        more = len(lines) - DIFF_LINES
        if more > 0:
            lines = [*lines[:DIFF_LINES], f"... and {counted(more, 'more line')}"]
        found.append({
            "pass": entry.pass_spec, "summary": entry.summary, "nodes": entry.num_nodes,
            "comm_bytes": record.comm_bytes, "peak_bytes": record.peak_bytes, "diff": lines,
        })  # fmt: skip
        before = record.body
    return found
