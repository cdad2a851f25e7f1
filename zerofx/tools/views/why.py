"""The reasons why values are kept, recomputed or gathered again, as text."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from zerofx.errors import PlanError
from zerofx.ir.program import Decision
from zerofx.ir.text import as_text
from zerofx.plan.fields import covers, nearest
from zerofx.plan.sizes import format_bytes

BUDGET = "memory_budget"


@dataclass(frozen=True)
class WhyView:
    """The decisions on the values of a name: print them, or take `to_dict()`."""

    name: str
    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        return as_text(self.lines())

    def lines(self) -> list[str]:
        """Return a line for each decision: size, choice, name, place, reason."""
        lines = [f"# why {self.name}"]
        for d in self.decisions:
            where = "  ".join(part for part in (d.module, d.line) if part and part != d.subject)
            what = f"{format_bytes(d.nbytes):>10}  {d.choice:<14} {d.subject:<24} {where}".rstrip()
            lines += [what, f"{'':<12}{d.why}"]
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "decisions": [dataclasses.asdict(d) for d in self.decisions]}


def explained(decisions: tuple[Decision, ...], name: str) -> tuple[Decision, ...]:
    """Return the decisions on a value, a module with its submodules, a bucket or a source line.

    Raises:
        PlanError: there is none.
    """
    found = tuple(
        d
        for d in decisions
        if name in (d.subject, d.line, d.choice)
        or covers(name, d.module)
        or covers(name, d.subject)
    )
    if not found:
        if not decisions:
            raise PlanError(
                f"--why {name}: there are no decisions, since the plan has no memory_budget. Set "
                "it (\"22GiB\"), with activations='auto' or a fraction for the activations."
            )
        known = sorted({k for d in decisions for k in (d.subject, d.module) if k})
        raise PlanError(f"--why {name}: there is no decision under this name{nearest(name, known)}")
    return found


def summary(decisions: tuple[Decision, ...]) -> list[str]:
    """Return the use of the budget: counts and bytes by choice, and the rest."""
    if not decisions:
        return []
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    spent = ""
    for d in decisions:
        if d.subject == BUDGET:
            spent = d.why
            continue
        count[d.choice] += 1
        size[d.choice] += d.nbytes
    lines = ["", f"under memory_budget: {spent}" if spent else "of the activations"]
    return lines + [
        f"  {format_bytes(size[choice]):>10}  {choice:<14} x{count[choice]}" for choice in count
    ]
