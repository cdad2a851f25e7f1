"""Turn the marks of a recording into one program's measured steps, with medians over all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from zerofx.analysis.time.measured import Measured, MeasuredMemory, MeasuredSpan, identity_of
from zerofx.analysis.time.steps import Lane, Step
from zerofx.comm.world import World
from zerofx.errors import RecordingError
from zerofx.ir.program import FORWARD, Planned
from zerofx.ir.spec import specs
from zerofx.runtime.tiers.beside import Note
from zerofx.tools.record.lanes import LANES, Place, Row, own_rows, span_of
from zerofx.tools.record.stopwatch import REGION, Clock, Run

UPDATE = "step update"  # the name of the optimizer's own step, after backward
_VERBS = {"region": {REGION}, "wait": {"wait"}, "release": {"release"}, "pack": {"pack"},
          "update": {"update"}}  # fmt: skip

_NOTED = frozenset(LANES.values())  # lanes whose own begins and ends are known


@dataclass
class RecordedStep:
    """The runs between one forward and the next, of its own program and of others."""

    program: Planned
    runs: list[tuple[Planned, Run]] = field(default_factory=list)
    updates: list[tuple[Any, Any, float]] = field(default_factory=list)  # begin, end, host_us
    update_times: list[tuple[int, int]] = field(default_factory=list)  # the same on the host
    notes: list[Note] = field(default_factory=list)  # of transfers and updates launched meanwhile
    end: Any = None

    def close(self, mark: Any) -> None:
        """Mark the end of the step."""
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
    memory: MeasuredMemory | None = None,
) -> Measured:
    """Match the recorded steps of one program with its schedule's `steps`.

    memory: measured on one more step.

    Raises:
        RecordingError: no step ran to its end.
    """
    program = recorded[0].program
    expected: dict[str, list[Step]] = {}
    for step in steps:
        expected.setdefault(step.graph, []).append(step)
    whole = _whole(recorded, expected)
    own = [own_rows(r, expected, clock) for r in whole]
    abouts = _abouts(steps, program, {place: None for rows in own for place in rows})
    tables = [
        _table(r, expected, clock, {place.name: row for place, row in rows.items()})
        for r, rows in zip(whole, own, strict=True)
    ]
    steps_us = [clock.between_us(r.own()[FORWARD].began, r.end) for r in whole]
    typical = sorted(range(len(whole)), key=lambda i: steps_us[i])[(len(whole) - 1) // 2]
    spans = tuple(
        _span(about, [t.get(name) for t in tables], typical, ops.get(name, ()))
        for name, about in abouts.items()
        if any(name in t for t in tables)
    )
    functions = {
        graph: median(clock.between_us(r.own()[graph].began, r.own()[graph].ended) for r in whole)
        for graph in whole[0].own()
    }
    return Measured(
        program.model_name, identity_of(program), world.rank, world.size, str(world.device),
        tuple(steps_us), spans, functions, tuple(r.own()[FORWARD].wall_ns for r in whole), typical,
        memory,
    )  # fmt: skip


def _whole(
    recorded: Sequence[RecordedStep], expected: Mapping[str, list[Step]]
) -> list[RecordedStep]:
    """Return the steps that ran every function to the end that any of them ran."""
    whole = [r for r in recorded if _is_whole(r, expected)]
    num = max((len(r.own()) for r in whole), default=0)
    if not whole:
        name = recorded[0].program.model_name
        raise RecordingError(f"record: no step of {name} ran to its end.")
    return [r for r in whole if len(r.own()) == num]


def _is_whole(recorded: RecordedStep, expected: Mapping[str, list[Step]]) -> bool:
    """Tell whether every function ran all of its calls."""
    for graph, run in recorded.own().items():
        steps = expected.get(graph, [])
        if len(run.calls) < len(steps):
            return False  # an exception ended it
        assert len(run.calls) == len(steps), f"{graph}: {len(run.calls)} calls, {len(steps)} steps"
        for step, (verb, *_) in zip(steps, run.calls, strict=True):
            known = _syncs() if step.kind == "sync" else _VERBS.get(step.kind)
            assert known is None or verb in known, f"{step.name} ran as {verb}"
    return True


def _syncs() -> set[str]:
    return {spec.call for spec in specs() if spec.is_sync}


def _table(
    recorded: RecordedStep,
    expected: Mapping[str, list[Step]],
    clock: Clock,
    own: Mapping[str, Row],
) -> dict[str, Row]:
    """Return the times of each span of a step, counted from the begin of its forward.

    own: rows of the spans that reported their own begin and end.
    """
    rows: dict[str, Row] = {}
    zero = recorded.own()[FORWARD].began
    for graph, run in recorded.own().items():
        for step, (_, began, ended), host in zip(
            expected[graph], run.calls, run.host_us, strict=True
        ):
            start, end = clock.between_us(zero, began), clock.between_us(zero, ended)
            rows[step.name] = Row(start, end, host)  # of a launch: up to its wait, below
            if step.kind == "launch" or (step.kind == "update" and step.name in own):
                rows[f"{step.name} launch"] = Row(start, end, host)
            launch = step.name.removesuffix(" wait")
            if step.kind == "wait" and launch in rows:
                rows[launch] = Row(rows[launch].start, end, rows[launch].host_us + host)
    for began, ended, host in recorded.updates:
        rows[UPDATE] = Row(clock.between_us(zero, began), clock.between_us(zero, ended), host)
    for step in (s for graph in recorded.own() for s in expected[graph]):
        if step.kind == "launch" and step.lane in _NOTED and step.name not in own:
            del rows[step.name]  # its data was there already
    for name, row in own.items():
        rows[name] = row._replace(host_us=rows[name].host_us if name in rows else 0.0)
    return rows


def _abouts(
    steps: Sequence[Step], program: Planned, places: Iterable[Place]
) -> dict[str, MeasuredSpan]:
    """Return a span without times for every name that a table may have."""
    found: dict[str, MeasuredSpan] = {}
    own = {place.name: place for place in places}

    def add(name: str, step: Step, lane: Lane, kind: str) -> None:
        found[name] = MeasuredSpan(name, step.graph, lane, kind, step.unit, step.bucket)

    for step in steps:
        if step.kind == "launch":
            add(step.name, step, step.lane, "transfer")
            add(f"{step.name} launch", step, Lane.HOST, "launch")
        elif step.name in own:
            add(step.name, step, own[step.name].lane, step.kind)
            add(f"{step.name} launch", step, Lane.HOST, "launch")
        else:
            lane = Lane.HOST if step.kind == "release" else Lane.COMPUTE
            add(step.name, step, lane, step.kind)
    for name, place in own.items():
        if name not in found:
            found[name] = span_of(place, program)
    has_parts = any(p.graph == "step" and p.lane is Lane.UPDATE for p in own.values())
    if has_parts or any(step.kind == "update" for step in steps):  # shown by themselves
        found[UPDATE] = MeasuredSpan(UPDATE, "step", Lane.HOST, "call")
    else:
        lane = Lane.UPDATE if _updates_away(program) else Lane.COMPUTE
        found[UPDATE] = MeasuredSpan(UPDATE, "step", lane, "update")
    return found


def _updates_away(program: Planned) -> bool:
    """Tell whether all parameters that the optimizer updates live off the device."""
    buckets = program.layout.buckets
    trained = [b for b in buckets if b.trainable]
    return bool(trained) and all(b.is_away for b in trained)


def _span(
    about: MeasuredSpan,
    rows: Sequence[Row | None],
    typical: int,
    ops: tuple[tuple[str, float], ...],
) -> MeasuredSpan:
    """Return a span with the medians over its rows, at the place of the most typical one."""
    had = [row for row in rows if row is not None]
    each = [row.end - row.start for row in had]
    shown = rows[typical] or had[0]
    places = tuple(None if row is None else (row.start, row.end) for row in rows)
    return dataclasses.replace(
        about, start_us=shown.start, end_us=shown.end, us=median(each), low_us=min(each),
        high_us=max(each), host_us=median(row.host_us for row in had), ops=ops, places=places,
        nbytes=shown.nbytes, is_own=all(row.is_own for row in had),
    )  # fmt: skip
