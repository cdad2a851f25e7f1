"""Two programs side by side: memory by category, bytes sent, and the lines that differ."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from zerofx.analysis.memory.storage import Category
from zerofx.analysis.time.forecast import Forecast
from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.traffic import traffic
from zerofx.ir.dump import dump_body
from zerofx.ir.program import Planned
from zerofx.plan.sizes import format_bytes
from zerofx.tools.room import room, shortened
from zerofx.tools.views.schedule import title
from zerofx.tools.views.timeline import format_us

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
        lines += [f"{name:<33} {a} -> {b}" for name, a, b in self._plan()]
        wide = room(NAMES, 36, 22)
        lines += ["", f"{'':<{wide}}{'-':>12}{'+':>12}{'change':>12}"]
        for name, a, b in self.numbers():
            head = f"{shortened(name.removesuffix(' us'), wide - 1):<{wide}}"
            lines.append(f"{head}{_shown(name, a):>12}{_shown(name, b):>12}{_change(a, b):>12}")
        return "\n".join([*lines, "", *self.changed_lines()])

    def _plan(self) -> list[tuple[str, Any, Any]]:
        left, right = self.left.plan.to_dict(), self.right.plan.to_dict()
        found = [(f"plan.{k}", v, right[k]) for k, v in left.items() if v != right[k]]
        if self.left.world_size != self.right.world_size:
            found.append(("world", self.left.world_size, self.right.world_size))
        return found

    def numbers(self) -> list[tuple[str, float, float]]:
        """Return (name, left, right) for every count that is not 0 in both."""
        columns: list[dict[str, float]] = [_numbers(p) for p in (self.left, self.right)]
        for column, forecast in zip(columns, self.predicted or (), strict=False):
            column.update(_times(forecast))
        rows = ((name, columns[0][name], columns[1][name]) for name in columns[0])
        return [row for row in rows if row[1] or row[2]]

    def changed_lines(self) -> list[str]:
        """Return the lines that differ between the dumps at level `regions`, with context."""
        left, right = (dump_body(p, "regions").splitlines() for p in (self.left, self.right))
        lines = list(difflib.unified_diff(left, right, lineterm="", n=2))[2:]
        return lines or ["(the same steps in the same order)"]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "left": title(self.left),
            "right": title(self.right),
            "plan": [{"field": k, "left": a, "right": b} for k, a, b in self._plan()],
            "numbers": [{"name": k, "left": a, "right": b} for k, a, b in self.numbers()],
            "lines": self.changed_lines(),
        }


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
