"""Measured steps: a recording of a program, with the times of every step as plain values.

Times are in microseconds. The position of a span is that in one typical step (of median length, or
of all ranks' median if several ranks are compared). Its duration is a median over all recorded
steps, with the minimum and maximum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerofx import schema
from zerofx.analysis.time.steps import Lane
from zerofx.errors import RecordingError, as_sentence
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import Planned
from zerofx.ir.text import describe

FORMAT = 2


@dataclass(frozen=True)
class MeasuredSpan:
    """One step of a schedule as it was measured.

    kind: as for a Step, except that a "transfer" lasts from its launch to the end of its wait, by
        which it has arrived. If it `is_own`, its begin and end were recorded themselves. The launch
        and the wait are spans too: the time of the host, or of the compute.
    nbytes: the bytes recorded as moved.
    host_us: time that the host spent in the call. ops: its most expensive operators, with their
        times.
    places: its begin and end in each recorded step, None for a step without it.
    """

    name: str
    graph: str
    lane: Lane
    kind: str
    unit: str = ""
    bucket: int = -1
    start_us: float = 0.0
    end_us: float = 0.0
    us: float = 0.0
    low_us: float = 0.0
    high_us: float = 0.0
    host_us: float = 0.0
    ops: tuple[tuple[str, float], ...] = ()
    places: tuple[tuple[float, float] | None, ...] = ()
    nbytes: int = 0
    is_own: bool = False


@dataclass(frozen=True)
class MeasuredMemory:
    """The live tensor bytes of one step.

    peak_bytes: the peak. held: span's name -> the most bytes during it. unsure_bytes: the possible
        underestimate of the peak, from blocks that another thread freed at an unknown time.
    """

    peak_bytes: int
    held: dict[str, int]
    unsure_bytes: int = 0


@dataclass(frozen=True)
class Measured:
    """One program's steps on one rank.

    identity: the properties that identify the program. steps_us: time of each recorded step, from
        the begin of its forward to that of the next one. functions_us: graph -> the median of the
        whole function.
    walls_ns: when each step began, to align ranks. typical: the index of the step
        whose positions the spans have. memory: of an additional step, if it was requested.
    """

    model: str
    identity: dict[str, Any]
    rank: int
    world: int
    device: str
    steps_us: tuple[float, ...]
    spans: tuple[MeasuredSpan, ...]
    functions_us: dict[str, float]
    walls_ns: tuple[int, ...]
    typical: int
    memory: MeasuredMemory | None = None

    @property
    def step_us(self) -> float:
        """The median step."""
        ranked = sorted(self.steps_us)
        return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2

    @property
    def exposed_us(self) -> float:
        """The time that compute waits for transfers in a step, as a sum of medians."""
        return sum(s.us for s in self.spans if s.kind == "wait")

    def at(self, step: int) -> Measured:
        """Return a copy with every span at its position in another step."""
        spans = []
        for span in self.spans:
            start, end = span.places[step] or (span.start_us, span.end_us)
            spans.append(dataclasses.replace(span, start_us=start, end_us=end))
        return dataclasses.replace(self, spans=tuple(spans), typical=step)

    def by_name(self) -> dict[str, MeasuredSpan]:
        return {s.name: s for s in self.spans}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which `from_dict` accepts."""
        return {"format": FORMAT, **dataclasses.asdict(self), "step_us": self.step_us} | {
            "spans": [{**dataclasses.asdict(s), "lane": s.lane.value} for s in self.spans],
        }

    @classmethod
    def from_dict(cls, said: dict[str, Any]) -> Measured:
        """Restore what `to_dict` returned.

        Raises:
            RecordingError: the values have another format, or are not a recording.
        """
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            found = said.get("format") if isinstance(said, dict) else type(said).__name__
            raise RecordingError(f"recording format {found!r}: this zerofx reads {FORMAT}.")
        try:
            schema.check(said, _MEASURED)
            _check_steps(said)
        except schema.FormError as error:
            raise RecordingError(as_sentence(error)) from error
        fields = {f.name: said[f.name] for f in dataclasses.fields(cls)}
        fields["spans"] = tuple(map(_span, said["spans"]))
        if fields["memory"] is not None:
            fields["memory"] = MeasuredMemory(**{name: fields["memory"][name] for name in _MEMORY})
        for name in ("steps_us", "walls_ns"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


_TEXT, _US, _COUNT = schema.text(), schema.number(), schema.integer()
_SPAN: dict[str, schema.Form] = {
    "name": _TEXT,
    "graph": _TEXT,
    "lane": schema.one_of(lane.value for lane in Lane),
    "kind": _TEXT,
    "unit": _TEXT,
    "bucket": schema.integer(-1),
    **{f"{name}us": _US for name in ("start_", "end_", "", "low_", "high_", "host_")},
    "ops": schema.sequence(schema.row(_TEXT, _US)),
    "places": schema.sequence(schema.optional(schema.row(_US, _US))),
    "nbytes": _COUNT,
    "is_own": schema.boolean,
}
_MEMORY = {
    "peak_bytes": _COUNT,
    "held": schema.mapping(_TEXT, schema.integer(-1)),
    "unsure_bytes": _COUNT,
}
_MEASURED = schema.record(
    {
        "model": _TEXT,
        "identity": schema.record({"plan": schema.mapping(_TEXT, schema.anything)}),
        "rank": _COUNT,
        "world": schema.integer(1),
        "device": _TEXT,
        "steps_us": schema.sequence(schema.number(0.0), least=1),
        "spans": schema.sequence(schema.record(_SPAN)),
        "functions_us": schema.mapping(_TEXT, _US),
        "walls_ns": schema.sequence(schema.integer(-schema.MOST, 1 << 63)),
        "typical": _COUNT,
        "memory": schema.optional(schema.record(_MEMORY)),
    }
)


def _check_steps(said: dict[str, Any]) -> None:
    """Raise unless all parts of a recording have the same number of steps."""
    num = len(said["steps_us"])
    if said["typical"] >= num or len(said["walls_ns"]) != num:
        raise schema.FormError(f"typical and walls_ns are not of the {num} steps in steps_us")
    for number, span in enumerate(said["spans"]):
        if len(span["places"]) not in (0, num):
            raise schema.FormError(f"spans[{number}].places are not of the {num} steps")


def same_step(ranks: Sequence[Measured]) -> list[Measured]:
    """Return the ranks' measurements with the positions of one step: the median over all ranks.

    Ranks that recorded different numbers of steps are returned unchanged.
    """
    num = len(ranks[0].steps_us)
    if len(ranks) < 2 or any(len(m.steps_us) != num for m in ranks):
        return [*ranks]
    longest = [max(m.steps_us[i] for m in ranks) for i in range(num)]
    typical = sorted(range(num), key=lambda i: longest[i])[(num - 1) // 2]
    return [m.at(typical) for m in ranks]


def _span(said: dict[str, Any]) -> MeasuredSpan:
    ops = tuple((op, us) for op, us in said["ops"])
    places = tuple(None if place is None else (place[0], place[1]) for place in said["places"])
    fields = {name: said[name] for name in _SPAN}
    return MeasuredSpan(**{**fields, "lane": Lane(said["lane"]), "ops": ops, "places": places})


def identity_of(program: Planned) -> dict[str, Any]:
    """Return the properties that a recording must share with a program to be shown next to it."""
    graph = next(iter(program.graphs))
    inputs = {
        info(n).name or n.name: describe(value(n)) for n in program.placeholders(graph, Role.INPUT)
    }
    return {
        "model": program.model_name,
        "training": program.is_training,
        "world": program.world_size,
        "parameters": sum(_numel(p.shape) for p in program.params.values()),
        "inputs": inputs,
        "plan": program.plan.to_dict(),
    }


def check_same(measured: Measured, program: Planned) -> None:
    """Check that a recording belongs to this program.

    Raises:
        RecordingError: it does not; the message lists every difference with both values.
    """
    found = _differences(measured.identity, identity_of(program))
    if found:
        raise RecordingError(
            f"the recording belongs to a program other than {program.model_name}: "
            + "; ".join(f"{what} is {a} there and {b} here" for what, a, b in found)
            + ". Record this one, or ask for the program that was recorded."
        )


def _differences(there: dict[str, Any], here: dict[str, Any], at: str = "") -> list[tuple]:
    found = []
    for key in dict.fromkeys([*there, *here]):
        a, b = there.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{at}{key}.")
        elif a != b:
            found.append((f"{at}{key}", "absent" if a is None else a, "absent" if b is None else b))
    return found


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
