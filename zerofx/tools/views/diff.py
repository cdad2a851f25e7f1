"""Two programs side by side: memory by category, bytes sent, and the lines that differ.

With a pipeline on either side, the stages of both are compared, each with its counterpart.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zerofx.analysis.memory.storage import Category
from zerofx.analysis.time.forecast import Forecast
from zerofx.analysis.time.pipelines import PipelineForecast
from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.traffic import traffic
from zerofx.ir.dump import dump_body
from zerofx.ir.program import Planned
from zerofx.plan.sizes import format_bytes
from zerofx.tools.room import room, shortened
from zerofx.tools.views.schedule import title
from zerofx.tools.views.timeline import format_us
from zerofx.tools.words import counted

NAMES = 34  # columns of the names of counts


@dataclass(frozen=True)
class DiffView:
    """The difference between two programs of one model: print it, or take `to_dict()` for JSON.

    predicted: the prediction of each on some hardware, for times next to the bytes.
    """

    left: Planned
    right: Planned
    predicted: tuple[Forecast, Forecast] | None = None

    @classmethod
    def of(cls, left: Forecast, right: Forecast) -> DiffView:
        """Compare two programs by their predictions."""
        return cls(left.program, right.program, (left, right))

    def __str__(self) -> str:
        lines = [f"- {title(self.left)}", f"+ {title(self.right)}", ""]
        lines += _plan_lines(self.left, self.right)
        return "\n".join([*lines, "", *self.body()])

    def body(self) -> list[str]:
        """Return the counts and the lines that differ, as text."""
        return [*_table(self.numbers()), "", *self.changed_lines()]

    @cached_property
    def is_same(self) -> bool:
        """Whether both have the same counts and the same steps."""
        return self._changed == [] and all(a == b for _, a, b in self.numbers())

    def numbers(self) -> list[tuple[str, float, float]]:
        """Return (name, left, right) for every count that is not 0 in both."""
        columns: list[dict[str, float]] = [_numbers(p) for p in (self.left, self.right)]
        for column, forecast in zip(columns, self.predicted or (), strict=False):
            column.update(_times(forecast))
        rows = ((name, columns[0][name], columns[1][name]) for name in columns[0])
        return [row for row in rows if row[1] or row[2]]

    def changed_lines(self) -> list[str]:
        """Return the lines that differ between the dumps at level `regions`, with context."""
        return self._changed or ["(the same steps in the same order)"]

    @cached_property
    def _changed(self) -> list[str]:
        left, right = (dump_body(p, "regions").splitlines() for p in (self.left, self.right))
        return list(difflib.unified_diff(left, right, lineterm="", n=2))[2:]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "left": title(self.left),
            "right": title(self.right),
            "plan": _as_dicts("field", _plan(self.left, self.right)),
            "numbers": _as_dicts("name", self.numbers()),
            "lines": self.changed_lines(),
        }


@dataclass(frozen=True)
class PipelineDiff:
    """The difference between two plans of which one has a pipeline at least.

    left, right: the programs of all stages, in order; one without a pipeline. Stages are compared
    with those of the same number if there are as many. Else the fullest of each are compared.
    predicted: the predictions of both steps.
    """

    left: tuple[Planned, ...]
    right: tuple[Planned, ...]
    predicted: tuple[Forecast | PipelineForecast, Forecast | PipelineForecast] | None = None

    @classmethod
    def of(
        cls, left: Forecast | PipelineForecast, right: Forecast | PipelineForecast
    ) -> PipelineDiff:
        """Compare two steps by their predictions."""
        before, after = (tuple(f.program for f in _each(found)) for found in (left, right))
        return cls(before, after, (left, right))

    @cached_property
    def stages(self) -> tuple[tuple[int, int, DiffView], ...]:
        """The stages that are compared: the number of each, and their difference."""
        if len(self.left) == len(self.right):
            pairs = [(i, i) for i in range(len(self.left))]
        else:
            pairs = [(_fullest(self.left), _fullest(self.right))]
        return tuple((a, b, self._view(a, b)) for a, b in pairs)

    def _view(self, before: int, after: int) -> DiffView:
        times = None
        if self.predicted is not None:
            left, right = map(_each, self.predicted)
            times = left[before], right[after]
        return DiffView(self.left[before], self.right[after], times)

    def numbers(self) -> list[tuple[str, float, float]]:
        """Return (name, left, right) of the whole step, and the peak of each stage."""
        left, right = self._totals()
        return [(name, left.get(name, 0), right.get(name, 0)) for name in left | right]

    def _totals(self) -> tuple[dict[str, float], dict[str, float]]:
        each: list[dict[str, float]] = []
        for programs in (self.left, self.right):
            peaks = [p.memory().peak_bytes for p in programs]
            found: dict[str, float] = {"stages": len(programs), "peak bytes": max(peaks)}
            if len(programs) > 1:
                found |= {f"stage {i}: peak bytes": peak for i, peak in enumerate(peaks)}
            each.append(found)
        for totals, forecast in zip(each, self.predicted or (), strict=False):
            totals["step us"] = forecast.step_us.middle
            waits_us = forecast.idle_us.middle if isinstance(forecast, PipelineForecast) else 0.0
            totals["waits for other stages us"] = waits_us
        return each[0], each[1]

    def __str__(self) -> str:
        left, right = self.left[0], self.right[0]
        lines = [f"- {_whole(self.left)}", f"+ {_whole(self.right)}", ""]
        lines += [*_plan_lines(left, right), "", *_table(self.numbers())]
        alike = [before for before, _, view in self.stages if view.is_same]
        for before, after, view in self.stages:
            if not view.is_same:
                other = f", and stage {after} of the other" if before != after else ""
                lines += ["", f"pipeline stage {before}{other}", *view.body()]
        if alike:
            lines += ["", f"the same steps, bytes and times: stage {', '.join(map(str, alike))}"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "left": _whole(self.left),
            "right": _whole(self.right),
            "plan": _as_dicts("field", _plan(self.left[0], self.right[0])),
            "numbers": _as_dicts("name", self.numbers()),
            "stages": [
                {"left_stage": a, "right_stage": b, **view.to_dict()} for a, b, view in self.stages
            ],
        }


def _whole(programs: Sequence[Planned]) -> str:
    """Return the title of all stages together."""
    count = len(programs)
    return title(programs[0]) + (f", {counted(count, 'pipeline stage')}" if count > 1 else "")


def _each(found: Forecast | PipelineForecast) -> tuple[Forecast, ...]:
    return found.stages if isinstance(found, PipelineForecast) else (found,)


def _fullest(programs: Sequence[Planned]) -> int:
    return max(range(len(programs)), key=lambda i: programs[i].memory().peak_bytes)


def _plan(left: Planned, right: Planned) -> list[tuple[str, Any, Any]]:
    """Return what differs between two plans, and their worlds."""
    ours, theirs = left.plan.to_dict(), right.plan.to_dict()
    found = [(f"plan.{k}", v, theirs[k]) for k, v in ours.items() if v != theirs[k]]
    if left.world_size != right.world_size:
        found.append(("world", left.world_size, right.world_size))
    return found


def _plan_lines(left: Planned, right: Planned) -> list[str]:
    return [f"{name:<33} {a} -> {b}" for name, a, b in _plan(left, right)]


def _table(numbers: Sequence[tuple[str, float, float]]) -> list[str]:
    wide = room(NAMES, 36, 22)
    lines = [f"{'':<{wide}}{'-':>12}{'+':>12}{'change':>12}"]
    for name, a, b in numbers:
        head = f"{shortened(name.removesuffix(' us'), wide - 1):<{wide}}"
        lines.append(f"{head}{_shown(name, a):>12}{_shown(name, b):>12}{_change(a, b):>12}")
    return lines


def _as_dicts(what: str, rows: Sequence[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    return [{what: name, "left": a, "right": b} for name, a, b in rows]


def _times(forecast: Forecast) -> dict[str, float]:
    """Return the times of a step; of each lane its busy time, and how long compute waits for it."""
    timeline = forecast.timeline
    found = {"step us": timeline.step_us}
    found["exposed communication us"] = timeline.exposed_communication_us
    for lane in Lane:
        found[f"{lane.value} busy us"] = timeline.busy_us[lane]
        if lane is not Lane.COMPUTE:
            found[f"{lane.value} exposed us"] = timeline.exposed_us[lane]
    return found


def _numbers(program: Planned) -> dict[str, float]:
    report, sent = program.memory().memory, traffic(program)
    held = report.by_category(report.peak_time)
    found: dict[str, float] = {"peak bytes": report.peak_bytes}
    found |= {f"{c.value} bytes at the peak": held[c] for c in Category}
    found |= {f"{kind} bytes sent": s.sent_bytes for kind, s in sent.kinds.items()}
    found |= {f"{kind} calls": s.calls for kind, s in sent.kinds.items()}
    found |= {f"{lane} bytes copied": s.sent_bytes for lane, s in sent.moved.items()}
    found["nodes"] = sum(len(gm.graph.nodes) for gm in program.graphs.values())
    return found


def _shown(name: str, value: float) -> str:
    if name.endswith(" us"):
        return format_us(value)
    return format_bytes(int(value)) if "bytes" in name else str(value)


def _change(left: float, right: float) -> str:
    if left == right:
        return "="
    return f"{right / left - 1:+.1%}" if left else "new"
