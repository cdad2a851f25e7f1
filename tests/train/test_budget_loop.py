"""A budget holds whatever the loop turns out to be: gradients that add up, a second signature."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import pytest
import torch
from measure import ATEN, BATCH, MODELS, SEQ, TOLERANCE, measure
from pool import Pool
from torch import Tensor

import zerofx
from zerofx.analysis.memory.memory import memory, peak_bytes
from zerofx.errors import BudgetError
from zerofx.ir.program import Captured, Loop
from zerofx.ir.program import Pool as Slots
from zerofx.model.budget import ADDING, warn_of_slots
from zerofx.passes.decide import budget_for

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
LARGE = 16  # sequences: activations outweigh the gradients of one rank
AUTO = {**ATEN, "activations": "auto"}


def batch(size: int = BATCH) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(size * SEQ).view(size, SEQ) % 256
    return tokens, tokens


@cache
def captured(size: int = BATCH) -> Captured:
    return zerofx.capture(MODELS["broad"](None), batch(size))


def enough(stage: int, world: int, loop: Loop | None = None, size: int = BATCH) -> int:
    """Return the budget that is enough to keep everything, with one backward or in `loop`."""
    program = zerofx.rewrite(captured(size), {**ATEN, "stage": stage}, world)
    how = loop or Loop()
    peak = memory(program, accumulation=how.accumulation, no_sync=how.no_sync).peak_bytes
    return budget_for(peak)


@pytest.mark.parametrize(
    ("stage", "loop"),
    [(3, Loop(2)), *(pytest.param(1, Loop(2, n), marks=pytest.mark.slow) for n in (False, True))],
    ids=str,
)
def test_a_loop_that_accumulates_stays_under_the_budget(pool: Pool, stage: int, loop: Loop) -> None:
    """A budget just enough for one backward is not for two: there activations are given up."""
    name, size = ("broad", BATCH) if stage == 3 else ("broad, twice the batch", 2 * BATCH)
    budget = enough(stage, 2, size=size)
    assert enough(stage, 2, loop, size) > 1.03 * budget
    plan = {**AUTO, "stage": stage, "memory_budget": budget}
    for measured in pool.run(2, measure, name, plan, "cpu", None, loop):
        assert measured.peak_bytes <= budget
        assert abs(measured.predicted_bytes / measured.peak_bytes - 1) < TOLERANCE


def gradients(plan: dict[str, Any]) -> tuple[list[Tensor], list[Loop]]:
    """Return what two backwards leave, and for which loop each forward's program was compiled."""
    torch.manual_seed(0)
    model = zerofx.compile(MODELS["broad"](None), plan)
    loops = []
    for _ in range(2):
        model(*batch(LARGE)).backward()
        loops.append(model.programs[0].loop)
    return [p.grad for p in model.parameters() if p.grad is not None], loops


def test_gradients_are_the_same_bits() -> None:
    kept, loops = gradients(ATEN)
    assert loops == [Loop(), Loop()]  # without a budget there is nothing to watch
    solved, loops = gradients({**AUTO, "memory_budget": enough(3, 1, size=LARGE)})
    assert loops == [Loop(), ADDING]
    assert all(torch.equal(a, b) for a, b in zip(kept, solved, strict=True))


def test_programs_that_fit_stay(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zerofx")
    _, loops = gradients({**AUTO, "memory_budget": enough(3, 1, ADDING, LARGE)})
    assert loops == [Loop(), ADDING]
    made = [r for r in caplog.records if ": program " in r.getMessage()]
    assert len(made) == 1  # progress lines may name a program too, on a slow machine


def test_a_budget_that_no_program_meets_in_such_a_loop_is_refused() -> None:
    """Before the forward that would exceed it, with the least that is enough."""
    with pytest.raises(BudgetError) as once:
        zerofx.rewrite(captured(), {**AUTO, "memory_budget": 1}, 1)
    with pytest.raises(BudgetError, match="earlier micro-batches held") as twice:
        zerofx.rewrite(captured(), {**AUTO, "memory_budget": 1}, 1, accumulation=2)
    assert twice.value.least_bytes > once.value.least_bytes
    model = zerofx.compile(MODELS["broad"](None), {**AUTO, "memory_budget": once.value.least_bytes})
    for _ in range(2):
        model(*batch()).backward()
        model.zero_grad()
    model(*batch()).backward()
    with pytest.raises(BudgetError, match=f"{twice.value.least_bytes} bytes.*held"):
        model(*batch())
    model.zero_grad()
    model(*batch()).backward()


# -- a second signature -------------------------------------------------------------------------
def two_signatures(budget: int, sizes: tuple[int, int]) -> tuple[list[int], list[int], list[str]]:
    """Return the first program's peak before and behind the second's, slots, and what was said."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerofx").addHandler(handler)
    plan = {**AUTO, "memory_budget": budget, "dynamic": "off"}
    model = zerofx.compile(MODELS["broad"](None), plan)
    peaks = []
    for size in sizes:
        model(*batch(size)).backward()
        model.zero_grad()
        peaks.append(model.programs[0].memory(keeps_results=True).peak_bytes)
    logging.getLogger("zerofx").removeHandler(handler)
    return peaks, list(model._engine.slots.sizes), [t for t in told if "memory_budget" in t]


def test_slots_of_a_second_program_are_counted(pool: Pool) -> None:
    """The first is tight, and has one gather at a time; the second has room for more.

    Slots are numbered by their size, so that those of both match, and the first stays within the
    budget.
    """
    with pytest.raises(BudgetError) as refused:
        zerofx.rewrite(captured(4 * BATCH), {**AUTO, "memory_budget": 1}, 2)
    budget = refused.value.least_bytes
    alone = peak_bytes(zerofx.rewrite(captured(4 * BATCH), {**AUTO, "memory_budget": budget}, 2))
    for (before, behind), slots, told in pool.run(2, two_signatures, budget, (4 * BATCH, BATCH)):
        assert before == alone <= behind <= budget
        assert not told and len(slots) > 1


def test_slots_that_exceed_the_budget_are_told(caplog: pytest.LogCaptureFixture) -> None:
    program = zerofx.rewrite(captured(), {**AUTO, "memory_budget": enough(3, 2)}, 2)
    warn_of_slots([program])
    assert not [r for r in caplog.records if r.name == "zerofx"]
    program.pool = Slots((2**28, *program.slot_bytes[1:]))
    warn_of_slots([program])
    [line] = [record.getMessage() for record in caplog.records if record.name == "zerofx"]
    assert f"({peak_bytes(program)} bytes)" in line and "a later program" in line


# -- gradients that are left over from a step -----------------------------------------------------
def between() -> int:
    """Return a budget for a forward beside gradients, but too small for a backward beside them."""
    return int(0.985 * enough(3, 1, ADDING, LARGE))


def stepped(how: str, budget: int) -> tuple[list[Loop], list[float]]:
    """Train with zero_grad() before or behind the forward, or evaluate while gradients are held."""
    torch.manual_seed(0)
    model = zerofx.compile(MODELS["broad"](None), {**AUTO, "memory_budget": budget})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loops, losses = [], []
    for _ in range(3):
        if how != "behind":
            optimizer.zero_grad()
        loss = model(*batch(LARGE))
        if how == "behind":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loops.append(model.programs[0].loop)
        losses.append(loss.item())
        if how == "evaluating":
            with torch.no_grad():
                model(*batch(LARGE))
    return loops, losses


@pytest.mark.parametrize("how", ["behind", "evaluating"])
def test_gradients_of_a_step_that_has_ended_are_no_accumulation(how: str) -> None:
    """Many loops call zero_grad() between forward and backward."""
    loops, losses = stepped(how, between())
    assert loops == [Loop(), Loop(), Loop()]
    assert losses == stepped("before", between())[1]


def test_gradients_that_are_never_dropped_are_added_to() -> None:
    model = zerofx.compile(MODELS["broad"](None), {**AUTO, "memory_budget": between()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loops = []
    for _ in range(3):
        model(*batch(LARGE)).backward()
        optimizer.step()
        loops.append(model.programs[0].loop)
    assert loops == [Loop(), Loop(), ADDING]
