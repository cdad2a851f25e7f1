"""Budget of a model's programs: the training loop as observed after compilation, and shared slots.

A budget is solved at a signature's first call. Two facts become known only later: that the loop
accumulates, and that another program needs larger slots.

A loop accumulates if a forward finds gradients of an earlier backward, unless an optimizer has
stepped since: such a loop calls zero_grad() between forward and backward. Gradients then lie beside
the forward alone. If the program exceeds its budget even so, or a backward finds them still, the
loop counts as one that accumulates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import zip_longest

from zerofx.analysis.memory.memory import memory
from zerofx.analysis.memory.micro import calls_of, loop_of
from zerofx.analysis.memory.storage import forward_slots
from zerofx.ir.program import FORWARD, Loop, Planned, Pool
from zerofx.model.allocations import compiled_regions
from zerofx.passes.decide import budget_bytes
from zerofx.plan.plan import Plan
from zerofx.plan.sizes import format_bytes
from zerofx.runtime.engine import Engine

log = logging.getLogger("zerofx")
ADDING, SUMMING = Loop(2), Loop(3, no_sync=True)  # more micro-batches hold no more memory


def can_accumulate(plan: Plan) -> bool:
    """Return whether a loop with several backwards per step could exceed the plan's budget."""
    return plan.memory_budget is not None and plan.update == "step"


def loop_so_far(engine: Engine, known: Loop) -> Loop:
    """Return the loop as observed by a forward that begins now, including what is known."""
    gradients = engine.gradients
    if known.no_sync or gradients.no_sync or gradients.holds_sums:
        return SUMMING
    return ADDING if known.accumulation > 1 or engine.store.grads.are_shown else known


def are_left_over(engine: Engine, plan: Plan) -> bool:
    """Return whether gradients that a forward finds are those of a step that has ended.

    A call of a pipeline runs its backwards too, so that nothing can drop them in between.
    """
    gradients = engine.gradients
    has_stepped = engine.store.ledger.steps_begun > gradients.steps_before
    return has_stepped and not gradients.has_added and plan.parallel.pipeline == 1


def fits(program: Planned) -> bool:
    """Return whether a training program stays within its budget in its loop."""
    budget = program.plan.memory_budget
    return budget is None or _peak_bytes(program) <= budget


def fits_beside_gradients(program: Planned) -> bool:
    """Return whether a forward stays within its budget while gradients of another step are held."""
    budget = program.plan.memory_budget
    if budget is None:
        return True
    found = memory(program, compiled=compiled_regions(program), accumulation=2)
    return max(found.curve[: len(program.graph(FORWARD).nodes)]) <= budget


def holds_in(program: Planned, calls: Loop) -> bool:
    """Return whether a program stays within its budget in a loop of so many calls.

    If so, it is the program's loop from now on.
    """
    if calls_of(program) >= calls.accumulation:
        return True
    before, program.loop = program.loop, loop_of(program, calls)
    if not fits(program):
        program.loop = before
        return False
    return True


def _peak_bytes(program: Planned) -> int:
    """Return a rank's peak memory in bytes, with the regions as they were compiled."""
    return memory(program, compiled=compiled_regions(program)).peak_bytes


def slots_of(program: Planned) -> Pool:
    """Return the slots that one program needs."""
    return Pool(program.slot_bytes, forward_slots(program))


def joined(pools: Iterable[Pool]) -> Pool:
    """Return slots large enough for each of these pools, one program at a time."""
    sizes: list[int] = []
    stay: frozenset[int] = frozenset()
    for pool in pools:
        sizes = list(map(max, zip_longest(sizes, pool.sizes, fillvalue=0)))
        stay |= pool.stay
    return Pool(tuple(sizes), stay)


def excess_bytes(program: Planned) -> int:
    """Return by how many bytes a training program, its regions compiled, exceeds its budget.

    The budget is solved with regions run op by op. The rest is only known once Inductor has
    compiled them.
    """
    budget = budget_bytes(program.plan)
    if budget is None or not program.is_training or program.plan.kernels == "aten":
        return 0
    return max(0, _peak_bytes(program) - budget)


def margin_for(program: Planned, excess: int) -> int:
    """Return the margin to leave in the budget, so that the solver finds a smaller program."""
    budget = budget_bytes(program.plan)
    assert budget is not None
    return budget - memory(program).peak_bytes + excess


def warn_of_regions(program: Planned) -> None:
    """Warn if no choice keeps the compiled regions within the budget."""
    if program.plan.kernels != "aten":
        _warn(
            program, "compiled by Inductor,", "Raise the budget to it, or use kernels='aten', "
            "which keeps it to the byte.",
        )  # fmt: skip


def warn_of_slots(programs: Iterable[Planned]) -> None:
    """Warn if an earlier program exceeds its budget with the slots of a later one."""
    for program in programs:
        _warn(
            program, "with the slots that a later program of the model needs,", "Pad inputs to "
            "fewer shapes, so that one program serves them, or raise the budget to it.",
        )  # fmt: skip


def _warn(program: Planned, why: str, way_out: str) -> None:
    budget = program.plan.memory_budget
    if budget is None or not program.is_training:
        return
    peak = _peak_bytes(program)
    if peak > budget:
        log.warning(
            "memory_budget: %s %s takes %s (%d bytes) per rank of a budget of %s. %s",
            why, program.model_name, format_bytes(peak), peak, format_bytes(budget), way_out,
        )  # fmt: skip
