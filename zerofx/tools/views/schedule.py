"""The schedule as text: the steps of each lane in order, and the memory resident at each step.

    step  compute   gather     reduce    host    resident   (23 steps; peak 3.5 KiB at step 3)
       0  .         AG b0 >    .         .       2.0 KiB    ######
       3  mm fc0    |  b1      .         .       3.5 KiB    ##########  <- peak

A legend below explains its marks and short words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerofx.analysis.memory.memory import ATEN, COMPILED, runs_compiled
from zerofx.analysis.memory.storage import Compiled
from zerofx.analysis.time.steps import Lane, Step, StepList, schedule
from zerofx.ir.program import Planned, Program
from zerofx.ir.repeats import Layers, Row, collapse
from zerofx.ir.spec import meanings
from zerofx.ir.text import as_text, without_numbers
from zerofx.plan.sizes import format_bytes
from zerofx.tools.room import is_limited, room
from zerofx.tools.words import counted

LANES = (Lane.COMPUTE, Lane.GATHER, Lane.REDUCE, Lane.HOST)  # always shown; others if used
WIDTH = 24  # of the bar
WIDEST = 48  # characters that a lane takes where its names are long
COLUMN = {Lane.COMPUTE: 26, Lane.HOST: 6}  # characters; every other lane has 20
NARROW = {Lane.COMPUTE: 12, Lane.HOST: 4}  # least on a narrow terminal; every other lane has 9
MARGIN = 24  # columns of the step, its resident bytes and the bar at its shortest
SHORT = 6  # columns of the shortest bar


@dataclass(frozen=True)
class ScheduleView:
    """A program's schedule: print it, or take `to_dict()` for JSON."""

    title: str
    schedule: StepList

    def __str__(self) -> str:
        return as_text(self.lines())

    @property
    def peak_bytes(self) -> int:
        return self.schedule.memory.peak_bytes

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that are shown."""
        used = {step.lane for step in self.schedule.steps}
        return LANES + tuple(lane for lane in Lane if lane in used and lane not in LANES)

    def lines(self) -> list[str]:
        """Return the timeline's lines, identical layers once."""
        steps = self.schedule.steps
        wide = self._columns()
        head = "  ".join(f"{lane.value:<{wide[lane]}}" for lane in self.lanes)
        peak = f"peak {format_bytes(self.peak_bytes)} at step {self.schedule.peak_step}"
        top = [
            f"# {self.title}",
            f"step  {head}  {'resident':<10} ({counted(len(steps), 'step')}; {peak})",
        ]
        return top + collapse(self._rows(wide), indent="      ") + self._legend()

    def _legend(self) -> list[str]:
        """Return lines that explain the marks and short words in use."""
        steps = self.schedule.steps
        kinds = {step.kind for step in steps}
        marks = {
            "'": ("in backward", any(step.is_backward for step in steps)),
            "b0": ("bucket 0", any(step.bucket >= 0 and not step.is_value for step in steps)),
            "v0": ("value 0, an activation", any(step.is_value for step in steps)),
            ">": ("launched", "launch" in kinds),
            "|": ("in flight", "launch" in kinds),
            "<": ("waited for", "wait" in kinds),
            "x": ("released", "release" in kinds),
            "pack": ("gradients into a bucket", "pack" in kinds),
            "update": ("optimizer step of a bucket", "update" in kinds),
        }
        said = [f"{mark} {meaning}" for mark, (meaning, is_used) in marks.items() if is_used]
        used = {step.verb for step in steps}
        verbs = [f"{verb} {meaning}" for verb, meaning in meanings().items() if verb in used]
        return ["", *("  ".join(["     ", *words]) for words in (verbs, said) if words)]

    def _columns(self) -> dict[Lane, int]:
        """Return the width of each lane: the usual one, more for long names, or what fits."""
        wide = {lane: COLUMN.get(lane, 20) for lane in self.lanes}
        used = self._longest()
        if not is_limited():
            return {lane: max(usual, min(used[lane], WIDEST)) for lane, usual in wide.items()}
        wide = {lane: min(wide[lane], used[lane]) for lane in self.lanes}
        for lane in sorted(self.lanes, key=lambda lane: -wide[lane]):
            others = sum(n for other, n in wide.items() if other is not lane)
            taken = MARGIN + others + 2 * len(self.lanes)
            wide[lane] = room(wide[lane], taken, NARROW.get(lane, 9))
        return wide

    def _longest(self) -> dict[Lane, int]:
        """Return the longest text of each lane, its name included."""
        longest = {lane: len(lane.value) for lane in self.lanes}
        for cells in self._cells():
            for lane, text in cells.items():
                longest[lane] = max(longest[lane], len(text))
        return longest

    def _cells(self) -> Iterator[dict[Lane, str]]:
        """Yield the text of each lane, step by step."""
        flying: dict[Lane, list[Step]] = {lane: [] for lane in self.lanes}
        for step in self.schedule.steps:
            cells = {lane: _in_flight(flying[lane]) for lane in self.lanes}
            cells[step.lane] = _cell(step)
            _fly(flying[step.lane], step)
            yield cells

    def _rows(self, wide: Mapping[Lane, int]) -> list[Row]:
        """Return a row for each step, with lanes of these widths."""
        steps = self.schedule.steps
        return [
            self._row(step, cells, wide) for step, cells in zip(steps, self._cells(), strict=True)
        ]

    def _row(self, step: Step, cells: dict[Lane, str], wide: Mapping[Lane, int]) -> Row:
        """Return the row of a step; the numbers of a repeated layer become ranges."""
        resident = step.resident_bytes
        is_peak = step.index == self.schedule.peak_step
        unit = step.unit
        key = (step.kind, step.lane, step.graph, without_numbers(unit), step.num_nodes, step.verb)
        shapes = tuple(without_numbers(cells[lane]) for lane in self.lanes)
        others = sum(wide.values()) + 2 * len(wide) + MARGIN - SHORT
        longest = room(WIDTH, others, SHORT)
        bar = "#" * max(1, round(longest * resident / max(self.peak_bytes, 1)))
        held = format_bytes(resident)
        mark = "  <- peak" if is_peak else ""

        def write(layers: Layers) -> str:
            shown = "  ".join(f"{_within(cells[lane], wide[lane])}" for lane in self.lanes)
            last = layers[-1][0]
            until = f" .. {last}" if last != held else ""
            return f"{step.index:>4}  {shown}  {held:<10} {bar}{until}{mark}"

        return Row(unit, (key, shapes, is_peak), write, (held,), step.kind == "region")

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain values, every step of every layer."""
        return {
            "title": self.title,
            "peak_bytes": self.peak_bytes,
            "peak_step": self.schedule.peak_step,
            "steps": [_plain(asdict(step)) for step in self.schedule.steps],
        }


def view(program: Program, compiled: Compiled | None = None, basis: str = ATEN) -> ScheduleView:
    """Return the schedule of a program.

    compiled: see `memory`; basis: the basis by which it was chosen.
    """
    return ScheduleView(title(program, basis), schedule(program.planned(), compiled))


def title(program: Program, basis: str = ATEN, where: str = "") -> str:
    """Name a program, its hardware and the basis of its memory for the first line of a view.

    where: replaces the name of the hardware.
    """
    kind = "training" if program.is_training else "inference"
    if not isinstance(program, Planned):
        return f"{program.model_name}: {kind}"
    setting = f"stage={program.plan.stage} world={program.world_size}"
    regions = "compiled" if basis == COMPILED and runs_compiled(program) else "ATen"
    return (
        f"{program.model_name}: {kind}   {setting} on {where or program.hardware.name}   "
        f"memory: regions as {regions}"
    )


def _within(text: str, columns: int) -> str:
    """Return a cell of a lane; a longer text is cut off on a narrow terminal alone."""
    if is_limited() and len(text) > columns:
        text = text[: columns - 1] + "…"
    return f"{text:<{columns}}"


def _cell(step: Step) -> str:
    prime = "'" if step.is_backward else ""
    if step.kind == "region":
        return f"{step.heaviest} {step.unit or '(root)'}{prime}".strip()
    if step.kind == "pack":
        return f"pack b{step.bucket}{prime}"
    if step.kind == "update":
        return f"update b{step.bucket}{prime}"
    if step.kind == "release":
        return f"x  b{step.bucket}"
    if step.kind == "sync":
        return f"{step.verb} {_moved(step)}{prime}" if step.is_value else "BC buffers"
    return f"{step.verb} {_moved(step)} {'>' if step.kind == 'launch' else '<'}"


def _moved(step: Step) -> str:
    return f"{'v' if step.is_value else 'b'}{step.bucket}"


def _in_flight(flying: Sequence[Step]) -> str:
    if not flying:
        return "."
    return "|  " + " ".join(map(_moved, flying))


def _fly(flying: list[Step], step: Step) -> None:
    if step.kind == "launch":
        flying.append(step)
    elif step.kind == "wait":
        flying[:] = [s for s in flying if _moved(s) != _moved(step)]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v.value if isinstance(v, Lane) else v for k, v in values.items()}
