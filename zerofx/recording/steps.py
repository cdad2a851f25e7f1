"""From the marks of a recording to one program's measured steps: which call was which, medians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from zerofx.analysis.measured import Measured, MeasuredSpan, identity_of
from zerofx.analysis.steps import Lane, Step
from zerofx.errors import RecordingError
from zerofx.ir.program import FORWARD, Program
from zerofx.runtime.stopwatch import REGION, Clock, Run
from zerofx.runtime.world import World

UPDATE = "step update"  # the name of the optimizer's own step, behind backward
_VERBS = {"region": {REGION}, "wait": {"wait"}, "release": {"release"}, "pack": {"pack"},
          "update": {"update"}, "sync": {"sync_buffers"}}  # fmt: skip

Row = tuple[float, float, float]  # begin, end, how long the host was in it


@dataclass
class RecordedStep:
    """What ran from one forward to the next: of its own program, and of any other."""

    program: Program
    runs: list[tuple[Program, Run]] = field(default_factory=list)
    updates: list[tuple[Any, Any, float]] = field(default_factory=list)  # begin, end, host_us
    end: Any = None

    def close(self, mark: Any) -> None:
        """Note the step's end."""
        self.end = mark

    def own(self) -> dict[str, Run]:
        """Return the first run of each of the program's functions."""
        found: dict[str, Run] = {}
        for program, run in self.runs:
            if program is self.program:
                found.setdefault(run.graph, run)
        return found


def measured(
    steps: Sequence[Step],
    recorded: Sequence[RecordedStep],
    clock: Clock,
    world: World,
    ops: Mapping[str, tuple[tuple[str, float], ...]],
) -> Measured:
    """Lay the recorded steps of one program over its schedule's `steps`.

    Of these only such count as ran all functions that any of them ran, to the end.

    Raises:
        RecordingError: all were broken off.
    """
    program = recorded[0].program
    expected: dict[str, list[Step]] = {}
    for step in steps:
        expected.setdefault(step.graph, []).append(step)
    whole = [r for r in recorded if _is_whole(r, expected)]
    num = max((len(r.own()) for r in whole), default=0)
    whole = [r for r in whole if len(r.own()) == num]
    if not whole:
        raise RecordingError(f"record: no step of {program.model_name} ran to its end")
    tables = [_table(r, expected, clock) for r in whole]
    steps_us = [clock.between_us(r.own()[FORWARD].began, r.end) for r in whole]
    typical = sorted(range(len(whole)), key=lambda i: steps_us[i])[(len(whole) - 1) // 2]
    spans = tuple(
        _span(about, [t.get(name) for t in tables], typical, ops.get(name, ()))
        for name, about in _abouts(steps).items()
        if any(name in t for t in tables)
    )
    functions = {
        graph: median(clock.between_us(r.own()[graph].began, r.own()[graph].ended) for r in whole)
        for graph in whole[0].own()
    }
    return Measured(
        program.model_name, identity_of(program), world.rank, world.size, str(world.device),
        tuple(steps_us), spans, functions, tuple(r.own()[FORWARD].wall_ns for r in whole), typical,
    )  # fmt: skip


def _is_whole(recorded: RecordedStep, expected: Mapping[str, list[Step]]) -> bool:
    """Tell whether every function ran all of its calls."""
    for graph, run in recorded.own().items():
        steps = expected.get(graph, [])
        if len(run.calls) < len(steps):
            return False  # an exception ended it
        assert len(run.calls) == len(steps), f"{graph}: {len(run.calls)} calls, {len(steps)} steps"
        for step, (verb, *_) in zip(steps, run.calls, strict=True):
            known = _VERBS.get(step.kind)
            assert known is None or verb in known, f"{step.name} ran as {verb}"
    return True


def _table(
    recorded: RecordedStep, expected: Mapping[str, list[Step]], clock: Clock
) -> dict[str, Row]:
    """Return the times of each of a step's spans, from its forward's begin on."""
    rows: dict[str, Row] = {}
    zero = recorded.own()[FORWARD].began
    for graph, run in recorded.own().items():
        for step, (_, began, ended), host in zip(
            expected[graph], run.calls, run.host_us, strict=True
        ):
            start, end = clock.between_us(zero, began), clock.between_us(zero, ended)
            if step.kind == "launch":
                rows[step.name] = start, end, host  # up to its wait, below
                rows[f"{step.name} launch"] = start, end, host
            else:
                rows[step.name] = start, end, host
            launch = step.name.removesuffix(" wait")
            if step.kind == "wait" and launch in rows:
                rows[launch] = rows[launch][0], end, rows[launch][2] + host
    for began, ended, host in recorded.updates:
        rows[UPDATE] = clock.between_us(zero, began), clock.between_us(zero, ended), host
    return rows


def _abouts(steps: Sequence[Step]) -> dict[str, MeasuredSpan]:
    """Return a span without times for every name that a table may have."""
    found: dict[str, MeasuredSpan] = {}

    def add(name: str, step: Step, lane: Lane, kind: str) -> None:
        found[name] = MeasuredSpan(name, step.graph, lane, kind, step.unit, step.bucket)

    for step in steps:
        if step.kind == "launch":
            add(step.name, step, step.lane, "transfer")
            add(f"{step.name} launch", step, Lane.HOST, "launch")
        else:
            lane = Lane.HOST if step.kind == "release" else Lane.COMPUTE
            add(step.name, step, lane, step.kind)
    found[UPDATE] = MeasuredSpan(UPDATE, "step", Lane.COMPUTE, "update")
    return found


def _span(
    about: MeasuredSpan,
    rows: Sequence[Row | None],
    typical: int,
    ops: tuple[tuple[str, float], ...],
) -> MeasuredSpan:
    """Return a span with the medians over its rows; its place is the typical one's."""
    had = [row for row in rows if row is not None]
    each = [end - start for start, end, _ in had]
    start, end, _ = rows[typical] or had[0]
    places = tuple(None if row is None else row[:2] for row in rows)
    return MeasuredSpan(
        about.name, about.graph, about.lane, about.kind, about.unit, about.bucket, start, end,
        median(each), min(each), max(each), median(row[2] for row in had), ops, places,
    )  # fmt: skip
