"""Micro-batches of a step: the gradients of earlier ones that exist while one of them runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from zerofx.errors import PlanError
from zerofx.ir.program import BACKWARD, Loop, Planned
from zerofx.ir.spec import Kind, kind_of
from zerofx.policy import reduction, schedules


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
    """One micro-batch of a step. reduces: its backward reduces; otherwise it runs under no_sync.

    has_earlier_calls: in a pipeline, p.grad has the gradients of an earlier call of the same step.
    They lie apart from those of this call's micro-batches until all of these are reduced.
    """

    before: Before = Before.NOTHING
    reduces: bool = True
    has_earlier_calls: bool = False

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

    accumulation: backwards per step that the loop calls. In a pipeline each of them is that of all
        micro-batches of a call. no_sync: all but the last of them run under it, which puts the
        reduction off at stage 1. (At stage 0 the sum lies in p.grad; at stages 2 and 3, and with an
        offloaded optimizer, whole gradients are never held, and every backward reduces. In a
        pipeline it changes nothing: each call reduces once.)

    Raises:
        PlanError: fewer than one backward; or several, although each updates the parameters.
    """
    if accumulation < 1:
        raise PlanError(
            f"accumulation is {accumulation}. A step has at least 1 backward. Raise accumulation."
        )
    if BACKWARD not in program.graphs:
        return (Micro(),)
    if accumulation > 1 and any(kind_of(n) is Kind.UPDATE for n in program.graph(BACKWARD).nodes):
        raise PlanError(
            f"accumulation is {accumulation}, but Plan(update='in-backward') updates the "
            "parameters inside every backward. Use update='step' to accumulate."
        )
    if program.stage.size > 1:
        return _of_pipeline(program, accumulation > 1)
    if accumulation == 1:
        return (Micro(),)
    layout = program.layout
    if not (no_sync and reduction.is_put_off(layout, program.plan)):
        return (Micro(Before.REDUCED),)
    if not reduction.sums_lie_apart(layout):  # then sums occupy the memory of reduced gradients
        return (Micro(Before.REDUCED),)
    first = Micro(Before.SUMS if accumulation > 2 else Before.NOTHING, reduces=False)
    return first, Micro(Before.SUMS)


def batches_per_call(program: Planned) -> int:
    """Return into how many micro-batches a pipeline cuts a call's batch; 1 without a pipeline."""
    if program.stage.size == 1 or not program.is_training:
        return 1
    parallel = program.plan.parallel
    return schedules.expected_micro_batches(parallel.micro_batches, parallel.pipeline)


def calls_of(program: Planned) -> int:
    """Return how many backwards the loop calls per step."""
    return max(1, program.loop.accumulation // batches_per_call(program))


def loop_of(program: Planned, calls: Loop) -> Loop:
    """Return the loop of a program whose model is called as `calls` says, one backward each.

    A pipeline's program counts micro-batches, of which a call has several.
    """
    return replace(calls, accumulation=calls.accumulation * batches_per_call(program))


def _of_pipeline(program: Planned, has_earlier_calls: bool) -> tuple[Micro, ...]:
    """Return the first micro-batch of a call, those between, and the last one."""
    puts_off = reduction.is_put_off(program.layout, program.plan)
    num = batches_per_call(program)
    before = Before.SUMS if puts_off else Before.REDUCED
    found = [Micro(Before.NOTHING, not puts_off or num == 1, has_earlier_calls)]
    if num > 2:
        found.append(Micro(before, not puts_off, has_earlier_calls))
    if num > 1:
        found.append(Micro(before, True, has_earlier_calls))
    return tuple(dict.fromkeys(found))
