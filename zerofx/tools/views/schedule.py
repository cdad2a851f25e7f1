"""The schedule as text: what runs when in each lane, and what is resident meanwhile.

    step  compute   gather     reduce    host    resident   (23 steps; peak 3.5 KiB at step 3)
       0  .         AG b0 >    .         .       2.0 KiB    ######
       3  mm fc0    |  b1      .         .       3.5 KiB    ##########  <- peak

Below it, the marks and short words that it uses are explained.
"""

from __future__ import annotations

from collections.abc import Sequence
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

LANES = (Lane.COMPUTE, Lane.GATHER, Lane.REDUCE, Lane.HOST)  # shown always, others if used
WIDTH = 24  # of the bar
COLUMN = {Lane.COMPUTE: 26, Lane.HOST: 6}  # characters; any other lane has 20


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
        """Return the lanes that are shown."""
        used = {step.lane for step in self.schedule.steps}
        return LANES + tuple(lane for lane in Lane if lane in used and lane not in LANES)

    def lines(self) -> list[str]:
        """Return the timeline's lines, identical layers once."""
        steps = self.schedule.steps
        head = "  ".join(f"{lane.value:<{COLUMN.get(lane, 20)}}" for lane in self.lanes)
        peak = f"peak {format_bytes(self.peak_bytes)} at step {self.schedule.peak_step}"
        top = [f"# {self.title}", f"step  {head}  {'resident':<10} ({len(steps)} steps; {peak})"]
        return top + collapse(self._rows(), indent="      ") + self._legend()

    def _legend(self) -> list[str]:
        """Return the meaning of the marks and short words that are used."""
        steps = self.schedule.steps
        kinds = {step.kind for step in steps}
        marks = {
            "'": ("in backward", any(step.is_backward for step in steps)),
            "b0": ("bucket 0", any(step.bucket >= 0 and not step.is_value for step in steps)),
            "v0": ("value 0, an activation", any(step.is_value for step in steps)),
            ">": ("launched", "launch" in kinds),
            "|": ("under way", "launch" in kinds),
            "<": ("waited for", "wait" in kinds),
            "x": ("released", "release" in kinds),
            "pack": ("gradients into a bucket", "pack" in kinds),
            "update": ("the optimizer's, of a bucket", "update" in kinds),
        }
        said = [f"{mark} {meaning}" for mark, (meaning, is_used) in marks.items() if is_used]
        used = {step.verb for step in steps}
        verbs = [f"{verb} {meaning}" for verb, meaning in meanings().items() if verb in used]
        return ["", *("  ".join(["     ", *words]) for words in (verbs, said) if words)]

    def _rows(self) -> list[Row]:
        found = []
        flying: dict[Lane, list[Step]] = {lane: [] for lane in self.lanes}
        for step in self.schedule.steps:
            cells = {lane: _under_way(flying[lane]) for lane in self.lanes}
            cells[step.lane] = _cell(step)
            _fly(flying[step.lane], step)
            found.append(self._row(step, cells))
        return found

    def _row(self, step: Step, cells: dict[Lane, str]) -> Row:
        """Return a step's line; in a repeated layer the numbers become ranges."""
        resident = step.resident_bytes
        is_peak = step.index == self.schedule.peak_step
        unit = step.unit
        key = (step.kind, step.lane, step.graph, without_numbers(unit), step.num_nodes, step.verb)
        shapes = tuple(without_numbers(cells[lane]) for lane in self.lanes)
        bar = "#" * max(1, round(WIDTH * resident / max(self.peak_bytes, 1)))
        held = format_bytes(resident)
        mark = "  <- peak" if is_peak else ""

        def write(layers: Layers) -> str:
            shown = "  ".join(f"{cells[lane]:<{COLUMN.get(lane, 20)}}" for lane in self.lanes)
            last = layers[-1][0]
            until = f" .. {last}" if last != held else ""
            return f"{step.index:>4}  {shown}  {held:<10} {bar}{until}{mark}"

        return Row(unit, (key, shapes, is_peak), write, (held,), step.kind == "region")

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain values: every step, nothing collapsed."""
        return {
            "title": self.title,
            "peak_bytes": self.peak_bytes,
            "peak_step": self.schedule.peak_step,
            "steps": [_plain(asdict(step)) for step in self.schedule.steps],
        }


def view(program: Program, compiled: Compiled | None = None, basis: str = ATEN) -> ScheduleView:
    """Return the schedule of a program. compiled: see `memory`; basis: what it was chosen by."""
    return ScheduleView(title(program, basis), schedule(program.planned(), compiled))


def title(program: Program, basis: str = ATEN, where: str = "") -> str:
    """Name a program, its hardware and the basis of its memory for the first line of a view.

    where: the hardware in other words than its name.
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
        return "BC buffers"
    return f"{step.verb} {_moved(step)} {'>' if step.kind == 'launch' else '<'}"


def _moved(step: Step) -> str:
    return f"{'v' if step.is_value else 'b'}{step.bucket}"


def _under_way(flying: Sequence[Step]) -> str:
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
