"""Turn notes of work that overlaps a schedule's calls into spans of its lanes, by name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zerofx.analysis.time.measured import MeasuredSpan
from zerofx.analysis.time.steps import Lane, Step
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.runtime.tiers.beside import UPDATE, Note
from zerofx.runtime.tiers.host_tier import D2H, H2D, NVME_READ, NVME_WRITE
from zerofx.tools.record.stopwatch import Clock

if TYPE_CHECKING:
    from zerofx.tools.record.steps import RecordedStep

STEP = "step"
LANES = {
    UPDATE: Lane.UPDATE, D2H: Lane.D2H, H2D: Lane.H2D,
    NVME_READ: Lane.NVME, NVME_WRITE: Lane.TO_NVME,
}  # fmt: skip
_VERBS = {UPDATE: "update", D2H: "D2H", H2D: "H2D", NVME_READ: "RD", NVME_WRITE: "WR"}


class Row(NamedTuple):
    """One span of one step: begin, end, time of the host in it, and the bytes of a note."""

    start: float
    end: float
    host_us: float = 0.0
    nbytes: int = 0
    is_own: bool = False


class Place(NamedTuple):
    """The span that a note belongs to."""

    name: str
    graph: str
    lane: Lane
    bucket: int


def own_rows(
    recorded: RecordedStep, expected: Mapping[str, Sequence[Step]], clock: Clock
) -> dict[Place, Row]:
    """Return the rows of a recorded step's notes, one per span with all of its requests."""
    found: dict[Place, Row] = {}
    zero = recorded.own()[FORWARD].began
    for note in recorded.notes:
        place = _place(note, recorded, expected)
        if place is None:
            continue
        if note.moment is None and note.lane != UPDATE:
            start, end = (clock.between_us(zero, mark) for mark in note.span)
        else:
            moment = note.moment
            ends = note.span if moment is None else (moment.began_ns, moment.ended_ns)
            if not all(ends):
                continue  # in flight when the recording ended
            start, end = (clock.until_us(zero, at) for at in ends)
        before = found.get(place, Row(start, end))
        found[place] = Row(
            min(before.start, start), max(before.end, end), 0.0, before.nbytes + note.nbytes, True
        )
    return found


def _place(
    note: Note, recorded: RecordedStep, expected: Mapping[str, Sequence[Step]]
) -> Place | None:
    """Return the span of a note: the step of the schedule that launched it, or one of its own."""
    lane, verb = LANES[note.lane], _VERBS[note.lane]
    bucket = int(note.what[1:]) if note.what else -1
    for graph, run in recorded.own().items():
        if not run.began_ns <= note.launched_ns <= run.ended_ns:
            continue
        at = max(0, bisect_right(run.calls_ns, note.launched_ns) - 1)
        step = expected[graph][at]
        is_launch = step.kind == "launch" and step.lane is lane
        if is_launch or (step.kind == "update" and lane is Lane.UPDATE):
            return Place(step.name, graph, lane, step.bucket)
        states = " states" if graph == BACKWARD and lane is Lane.NVME else ""
        return Place(f"{graph} {verb} {note.what}{states}", graph, lane, bucket)
    for began_ns, ended_ns in recorded.update_times:
        if began_ns <= note.launched_ns <= ended_ns:
            return Place(f"{STEP} {verb} {note.what}", STEP, lane, bucket)
    return None  # between steps: the user read values


def span_of(place: Place, program: Planned) -> MeasuredSpan:
    """Return a span without times for work that is no step of the schedule."""
    kind = "update" if place.lane is Lane.UPDATE else "transfer"
    buckets = {b.index: b for b in program.layout.buckets}
    unit = buckets[place.bucket].label() if place.bucket in buckets else ""
    return MeasuredSpan(place.name, place.graph, place.lane, kind, unit, place.bucket)


def hand_out(notes: Iterable[Note], steps: Sequence[RecordedStep]) -> None:
    """Assign each note to the step in which it was launched."""
    starts = [step.runs[0][1].began_ns for step in steps]
    for note in notes:
        at = bisect_right(starts, note.launched_ns) - 1
        if at >= 0:
            steps[at].notes.append(note)
