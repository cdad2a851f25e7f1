"""keep-gathered: what the budget lets stay from forward to backward."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from oracle import differences, execute
from oracle_cases import Choice, expected, make_state
from passes_compact import before, final, order, run
from torch import nn

import zerofx
from zerofx import ops
from zerofx.analysis.memory.memory import peak_bytes
from zerofx.errors import BudgetError, PlanError
from zerofx.ir.meta import Role, info
from zerofx.ir.program import Planned
from zerofx.passes.assign_slots import AssignSlots
from zerofx.passes.keep_gathered import KeepGathered

NAME = "keep-gathered"
FINE = Choice(3, bucket_bytes=0, persist_below=0)


def strict_peak(case: str, choice: Choice) -> int:
    return peak_bytes(final(case, choice))


def kept(program: Planned) -> list[str]:
    return [
        s.name
        for s in program.outputs["forward"]
        if s.role is Role.SAVED and s.name.startswith("gathered_")
    ]


def test_without_a_budget_nothing_is_kept() -> None:
    assert not KeepGathered().run(before("chain", FINE, NAME)).changed


def test_plenty_keeps_all_in_the_order_of_need() -> None:
    after = run(before("chain", FINE, NAME), KeepGathered(budget_bytes=1 << 30))
    assert kept(after) == [f"gathered_{b}" for b in (0, 4, 3, 2, 1)]
    assert not any(r.startswith(("gather", "release")) for r in order(after, "backward"))
    assert not any(r.startswith("release") for r in order(after, "forward"))
    held = [n for n in after.placeholders("backward", Role.SAVED) if info(n).name in kept(after)]
    views = [n for n in after.graph("backward").nodes if n.target is ops.param_view]
    assert {v.args[0] for v in views} == set(held)


def test_a_budget_below_the_least_is_refused_with_the_least() -> None:
    tight = strict_peak("chain", FINE)
    with pytest.raises(
        PlanError, match=rf"needs .* \({tight} bytes\) per rank at stage 3 and world"
    ):
        run(before("chain", FINE, NAME), KeepGathered(budget_bytes=tight - 1))


def test_some_room_keeps_the_last_of_forward() -> None:
    tight = strict_peak("chain", FINE)
    counts = set()
    for extra in (0, 400, 800, 1600, 3200):
        after = run(before("chain", FINE, NAME), KeepGathered(budget_bytes=tight + extra))
        names = kept(after)
        assert names == [f"gathered_{b}" for b in (0, 4, 3, 2, 1)][: len(names)]
        counts.add(len(names))
    assert len(counts) > 2, counts


@pytest.mark.parametrize("case", ["gpt", "adapters", "chain"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_final_program_stays_under_the_budget(case: str, prefetch: int) -> None:
    choice = Choice(3, prefetch=prefetch)
    program = before(case, choice, NAME)
    tight = strict_peak(case, choice)
    for extra in (0, 2000, 13_000, 26_000):
        after = run(run(program, KeepGathered(budget_bytes=tight + extra)), AssignSlots())
        assert peak_bytes(after) <= tight + extra


@pytest.mark.parametrize("case", ["chain", "gpt-dropout"])
def test_bits_stay(case: str) -> None:
    tight = strict_peak(case, FINE)
    for extra in (1000, 1 << 20):
        after = run(before(case, FINE, NAME), KeepGathered(budget_bytes=tight + extra))
        assert not differences(expected(case, 2), execute([after] * 2, make_state(case, 2)))


def test_the_least_budget_counts_slots_that_some_kept_buckets_spare() -> None:
    """With neither none nor all of its buckets kept such a model needs least."""
    widths = [16, 32, 64, 256, 1024, 1024, 512, 128, 32, 16]
    layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
    call = zerofx.capture(nn.Sequential(*layers), (torch.zeros(256, widths[0]),))
    plan = {"stage": 3, "kernels": "aten", "activations": "auto"}
    with pytest.raises(BudgetError) as refused:
        zerofx.rewrite(call, {**plan, "memory_budget": 1}, 2)
    least = refused.value.least_bytes
    for factor in (1.0, 1.01, 1.05):
        budget = int(factor * least)
        found = peak_bytes(zerofx.rewrite(call, {**plan, "memory_budget": budget}, 2))
        assert 0.998 * least <= found <= budget
