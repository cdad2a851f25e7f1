"""The solver under a memory budget: a segment's options, the choice over segments, the result."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zerofx
from zerofx import ops
from zerofx.analysis.memory.memory import memory
from zerofx.analysis.recompute import options as of_segments
from zerofx.analysis.recompute import tradeoffs
from zerofx.analysis.recompute.activations import halve
from zerofx.analysis.recompute.options import Option, Trade, hull, options
from zerofx.analysis.recompute.segments import find_segments
from zerofx.analysis.recompute.solve import solve
from zerofx.analysis.time.prices import Roofline
from zerofx.capture import capture
from zerofx.errors import BudgetError, PlanError
from zerofx.hardware import load_hardware
from zerofx.ir.graphs import regions as regions_of
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.program import Planned, Program
from zerofx.passes.decide import budget_bytes, budget_for
from zerofx.tools.demo.gpt import GPT, GPTConfig

CPU = Roofline(load_hardware("cpu-box"), compiled=False)


def gpt(layers: int = 4, dropout: float = 0.0) -> Planned:
    config = GPTConfig(layers=layers, width=64, heads=4, seq=64, dropout=dropout)
    tokens = torch.zeros(4, 64, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = GPT(config)
    return capture(model, (tokens, tokens))


PLAN = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}


def planned(program: Planned, **fields: Any) -> Planned:
    return zerofx.rewrite(program, {**PLAN, **fields}, 2)


# -- the choice over segments -------------------------------------------------------------------
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_choice_is_the_best_of_all(data: st.DataObject) -> None:
    """Every combination of few options is tried: none that suffices is quicker."""
    sizes = st.integers(0, 60)
    given_up, time_us = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        freed = sorted({0, *data.draw(st.lists(sizes, max_size=3))})
        given_up.append(freed)
        time_us.append([float(data.draw(sizes)) if f else 0.0 for f in freed])
    need = [0, *(data.draw(st.integers(0, 80)) for _ in given_up)]
    found = solve(given_up, time_us, need)
    enough = []
    for picked in itertools.product(*(range(len(g)) for g in given_up)):
        freed = [g[o] for g, o in zip(given_up, picked, strict=True)]
        if all(sum(freed[:j]) >= n for j, n in enumerate(need)):
            enough.append(sum(t[o] for t, o in zip(time_us, picked, strict=True)))
    if not enough:
        assert found is None
        return
    assert found is not None
    freed = [g[o] for g, o in zip(given_up, found, strict=True)]
    assert all(sum(freed[:j]) >= n for j, n in enumerate(need))
    assert sum(t[o] for t, o in zip(time_us, found, strict=True)) == min(enough)


# -- the options of a segment -------------------------------------------------------------------
class Chain(nn.Module):
    """Few values, so that every subset of them can be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.ones(*s)) for s in ((8, 32), (32, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return ((torch.tanh(x @ self.up).exp() * torch.sigmoid(x).repeat(1, 4)) @ self.down).sum()


def trade_of(program: Program) -> Trade:
    """Return the segment that keeps most values."""
    found = find_segments(halve(program.clone()).parts)
    return Trade(max(found, key=lambda s: len(s.needed)), CPU.node_us)


def best_of_all_subsets(trade: Trade) -> list[Option]:
    places = [i for i, ok in enumerate(trade.is_tensor) if ok and i not in trade.leaving]
    assert len(places) <= 14
    return [
        trade.evaluate(kept)
        for n in range(len(places) + 1)
        for kept in itertools.combinations(places, n)
    ]


def test_no_subset_beats_the_options_found() -> None:
    trade = trade_of(capture(Chain(), (torch.zeros(4, 8),)))
    found = options(trade)
    assert len(found) > 2 and found[0].saved_bytes == trade.all_kept().saved_bytes
    every = best_of_all_subsets(trade)
    assert found[-1].saved_bytes == min(o.saved_bytes for o in every)
    for option in found:
        quickest = min(o.recompute_us for o in every if o.saved_bytes <= option.saved_bytes)
        assert option.recompute_us <= quickest * 1.001 + 1e-3


def test_many_alike_layers_share_few_options() -> None:
    """Each is one more kind of region to compile; any number of bytes is a mix of two of them."""
    found = options(trade_of(gpt(2)))
    thin = hull(found)
    assert thin[0] is found[0] and thin[-1] is found[-1] and len(thin) < len(found)
    for a, b in itertools.pairwise(thin):
        for option in found:
            if a.saved_bytes > option.saved_bytes > b.saved_bytes:
                share = (a.saved_bytes - option.saved_bytes) / (a.saved_bytes - b.saved_bytes)
                assert option.time_us >= a.time_us + share * (b.time_us - a.time_us)
    program = gpt(8)
    most, least = (
        memory(planned(program, activations=a)).peak_bytes for a in ("keep", "recompute")
    )
    after = planned(program, activations="auto", memory_budget=(most + least) // 2)
    regions = {
        tuple(str(n.target) for n in nodes)
        for key, nodes in regions_of(after.graph("backward")).items()
        if info(nodes[0]).unit.startswith("blocks")
    }
    assert len(regions) <= 5, len(regions)


def test_without_scipy_options_are_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    trade = trade_of(gpt(2))
    exact = options(trade)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    found = options(trade)
    assert len(found) > 3
    assert found[0].saved_bytes == exact[0].saved_bytes
    assert found[-1].saved_bytes <= exact[-1].saved_bytes * 1.25
    program, tight = gpt(2), planned(gpt(2), activations="recompute")
    budget = memory(tight).peak_bytes + 50_000
    assert memory(planned(program, activations="auto", memory_budget=budget)).peak_bytes <= budget


def test_identical_layers_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []

    def counted(trade: Trade) -> list[Option]:
        solved.append(trade.segment.unit)
        return options(trade)

    monkeypatch.setattr(tradeoffs, "options", counted)
    counts = []
    for layers in (4, 12):
        solved.clear()
        tradeoffs.Tradeoffs(gpt(layers), CPU)
        counts.append(len(solved))
    assert counts[0] == counts[1]


def test_equal_segments_of_other_programs_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []
    limited = of_segments.limited

    def counted(trade: Trade, levels: int) -> list[Option]:
        solved.append(trade)
        return limited(trade, levels)

    monkeypatch.setattr(of_segments, "_KNOWN", OrderedDict())
    monkeypatch.setattr(of_segments, "limited", counted)
    first, second = trade_of(gpt(2)), trade_of(gpt(2))
    found = options(first)
    taken = list(found)
    found.clear()  # the caller's own list
    assert options(second) == taken and len(solved) == 1
    dearer = Trade(first.segment, lambda node: 2 * CPU.node_us(node))
    assert [o.saved_bytes for o in options(dearer)] and len(solved) == 2
    monkeypatch.setattr(of_segments, "_MOST_KNOWN", 1)
    options(first, 4)
    assert len(of_segments._KNOWN) == 1 and len(solved) == 3
    assert options(first) == taken and len(solved) == 4


# -- under a budget -----------------------------------------------------------------------------
def test_every_budget_down_to_the_least_is_met() -> None:
    program = gpt()
    most = memory(planned(program)).peak_bytes
    with pytest.raises(
        BudgetError, match=r"memory_budget: GPT needs .* at that peak are"
    ) as refusal:
        planned(program, activations="auto", memory_budget=most // 4)
    least = refusal.value.least_bytes
    assert f"({least} bytes)" in str(refusal.value)
    assert least <= budget_for(memory(planned(program, activations="recompute")).peak_bytes)
    recomputed = []
    for step in range(5):
        budget = least + (most - least) * step // 4
        after = planned(program, activations="auto", memory_budget=budget)
        assert memory(after).peak_bytes <= budget_bytes(after.plan) < budget
        recomputed.append(sum(info(n).recomputed for n in after.graph("backward").nodes))
    assert recomputed[0] > recomputed[2] > recomputed[-1]
    with pytest.raises(PlanError, match="Raise the budget"):
        planned(program, activations="auto", memory_budget=least - 1)


@pytest.mark.parametrize(
    ("accumulation", "plan", "advice"),
    [
        (1, {"stage": 3}, "use more ranks, or keep optimizer states on the host (OFFLOAD)"),
        (
            1, {"stage": 1},
            "use a higher stage (at most 3), use more ranks, or keep optimizer states on the host "
            "(OFFLOAD)",
        ),
        (1, {"stage": 3, "offload": {"optimizer": "cpu"}}, "or use more ranks"),
        (1, {"stage": 0}, "or use a stage from 1 to 3 on several ranks"),
        (2, {"stage": 3}, "use more ranks, or keep optimizer states on the host (OFFLOAD)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_the_advice_fits_the_plan(
    accumulation: int, plan: dict[str, Any], advice: str, activations: str
) -> None:
    fields = {"activations": activations, "memory_budget": 1, "kernels": "aten", **plan}
    with pytest.raises(BudgetError) as refused:
        zerofx.rewrite(gpt(1), fields, 2, accumulation=accumulation)
    found = str(refused.value)
    more = "" if activations == "auto" else "set activations='auto', "
    advice = advice.replace("OFFLOAD", "offload={'optimizer': 'cpu'}")
    advice = f"raise the budget to that value, {more}{advice}."
    if accumulation > 1:
        first = "If the loop does not accumulate, call optimizer.zero_grad() before the forward."
        assert found.endswith(f" {first} Otherwise {advice}")
    else:
        assert found.endswith(f". R{advice[1:]}")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_activations_may_leave_for_the_host(device: str) -> None:
    """Where the plan has a host tier the solver uses it, where it is quicker, within its budget."""
    link_gbs = 900e9 if device == "cuda" else 22e9  # so quick that a small model's copies hide
    machine = dataclasses.replace(
        load_hardware({"cpu": "cpu-gloo", "cuda": "cuda-nccl"}[device]), offload_min_bytes=4096,
        persist_below_bytes=0, bucket_bytes=0, host_link_bytes_per_s=link_gbs, prefetch=1,
        dense_flops_per_s=69e9, memory_bytes_per_s=22e9,
    )  # fmt: skip
    program = gpt()
    most, least = (
        memory(zerofx.rewrite(program, {**PLAN, "activations": a}, 2, machine)).peak_bytes
        for a in ("keep", "recompute")
    )
    plan = {
        **PLAN, "activations": "auto", "memory_budget": (most + least) // 2,
        "offload": {"activations": "cpu"},
    }  # fmt: skip
    after = zerofx.rewrite(program, plan, 2, machine)
    assert memory(after).peak_bytes <= plan["memory_budget"]
    gone = [d for d in after.decisions if d.choice == "offload"]
    on_host = sum(d.nbytes for d in gone)
    assert gone and all("copies to the host" in d.why for d in gone)
    copied = [n for n in after.graph("forward").nodes if n.target is ops.offload]
    assert on_host == sum(nbytes(value(n.args[0])) for n in copied)
    tight = zerofx.rewrite(program, {**plan, "host_budget": on_host - 1}, 2, machine)
    assert sum(d.nbytes for d in tight.decisions if d.choice == "offload") < on_host
    assert memory(tight).peak_bytes <= plan["memory_budget"]


def test_what_was_drawn_is_never_drawn_again() -> None:
    program = gpt(2, dropout=0.1)
    least = memory(planned(program, activations="recompute")).peak_bytes
    after = planned(program, activations="auto", memory_budget=budget_for(least))
    again = [n for n in after.graph("backward").nodes if info(n).recomputed]
    assert again and not any(info(n).is_random for n in again)
    kept = [d for d in after.decisions if "drawn at random" in d.why]
    assert kept and all(d.choice == "keep" for d in kept)


def test_each_decision_has_its_reason() -> None:
    program = gpt()
    most, least = (
        memory(planned(program, activations=a)).peak_bytes for a in ("keep", "recompute")
    )
    after = planned(program, activations="auto", memory_budget=(most + least) // 2)
    view = after.memory()
    choices = {d.choice for d in after.decisions}
    assert choices >= {"keep", "recompute", "spend"}
    assert all(d.why and d.nbytes >= 0 for d in after.decisions)
    text = str(view.why("blocks.0.mlp"))
    assert "recompute" in text and "blocks.0.mlp" in text and "gpt.py:" in text
    assert "under memory_budget: the peak is" in str(view)
    with pytest.raises(PlanError, match=r"--why blocks\.o: there is no decision .*'blocks"):
        view.why("blocks.o")
    with pytest.raises(PlanError, match="no memory_budget"):
        planned(program).memory().why("blocks.0")


def test_updates_in_backward_are_counted_before_a_budget_is_spent() -> None:
    """What they free is room: a budget that they fit is met, though the ordinary step is not."""
    program, plan = gpt(), {"activations": "recompute", "prefetch": 0}
    ordinary, freed = (
        memory(planned(program, update=u, **plan)).peak_bytes for u in ("step", "in-backward")
    )
    assert freed < ordinary
    budget = budget_for(freed)
    after = planned(program, update="in-backward", memory_budget=budget, **plan)
    assert memory(after).peak_bytes <= budget
    with pytest.raises(BudgetError):
        planned(program, memory_budget=budget, **plan)


def test_prefetch_gives_way_before_a_budget_is_refused() -> None:
    """The machine's distance shrinks where nothing else is left; a plan's own does not."""
    program = gpt()
    far, near = (
        budget_for(memory(planned(program, activations="recompute", prefetch=d)).peak_bytes)
        for d in (2, 0)
    )
    assert near < far
    after = planned(program, activations="recompute", memory_budget=near)
    assert "prefetch-gathers{distance=0}" in [e.pass_spec for e in after.history]
    with pytest.raises(PlanError, match="memory_budget"):
        planned(program, activations="recompute", prefetch=2, memory_budget=near)
