"""Micro-batches of a step: the gradients of earlier ones that exist while one of them runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zerofx.errors import PlanError
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import Kind, kind_of
from zerofx.policy import reduction


class Before(str, Enum):
    """The gradients of earlier micro-batches that exist when one begins.

    REDUCED: the content of p.grad, to which the backward adds. SUMS: whole gradients, which no_sync
    has summed on this rank and which are not reduced yet.
    """

    NOTHING = "nothing"
    REDUCED = "reduced gradients"
    SUMS = "sums of no_sync"


@dataclass(frozen=True)
class Micro:
    """One micro-batch of a step. reduces: its backward reduces; otherwise it runs under no_sync."""

    before: Before = Before.NOTHING
    reduces: bool = True

    @property
    def packs_apart(self) -> bool:
        """Whether gradients that could be packed into p.grad are packed into separate memory."""
        return self.before is not Before.NOTHING or not self.reduces

    def __str__(self) -> str:
        if not self.packs_apart:
            return "gradients come again"
        found = f"{self.before.value} of earlier micro-batches stand"
        return found if self.reduces else f"{found}, and this one is not reduced"


def micros(program: Planned, accumulation: int = 1, no_sync: bool = False) -> tuple[Micro, ...]:
    """Return the micro-batches of a step that may have the highest peak.

    accumulation: backwards a step. no_sync: all but the last of them run under it, which puts the
        reduction off at stage 1, and in a pipeline that sums whole gradients. (At stage 0 the sum
        lies in p.grad; elsewhere at stages 2 and 3, and with an offloaded optimizer, whole
        gradients are never held, and every backward reduces.)

    Raises:
        PlanError: fewer than one backward; or several, although each updates the parameters.
    """
    if accumulation < 1:
        raise PlanError(
            f"accumulation is {accumulation}. A step has at least 1 backward. Raise accumulation."
        )
    if accumulation == 1 or BACKWARD not in program.graphs:
        return (Micro(),)
    if any(kind_of(n) is Kind.UPDATE for n in program.graph(BACKWARD).nodes):
        raise PlanError(
            f"accumulation is {accumulation}, but Plan(update='in-backward') updates the "
            "parameters inside every backward. Use update='step' to accumulate"
        )
    layout = program.layout
    if not (no_sync and reduction.is_put_off(layout, program.plan)):
        return (Micro(Before.REDUCED),)
    if not reduction.sums_lie_apart(layout):  # then sums occupy the memory of reduced gradients
        return (Micro(Before.REDUCED),)
    first = Micro(Before.SUMS if accumulation > 2 else Before.NOTHING, reduces=False)
    return first, Micro(Before.SUMS)
