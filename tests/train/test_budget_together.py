"""One plan with everything on: recompute, offload, tiles, kept gathers, accumulation, clipping."""

from __future__ import annotations

import dataclasses
import os
from functools import cache
from typing import Any

import pytest
import torch
from measure import BATCH, MODELS, SEQ, measure
from models import CASES
from training import train_cell

import zerofx
from zerofx import ops
from zerofx.analysis.memory.memory import peak_bytes
from zerofx.hardware import Hardware, load_hardware
from zerofx.ir.program import Captured, Planned
from zerofx.passes.decide import budget_for

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
PLAN: dict[str, Any] = {
    "kernels": "aten", "stage": 3, "bucket_bytes": 0, "persist_below": 1024,
    "tiling": {"blocks.*.mlp.up": 4}, "activations": "auto", "offload": {"activations": "cpu"},
}  # fmt: skip


def machine() -> Hardware:
    """Return a machine on which small values may leave too, at a third of their copies' price."""
    base = load_hardware("cpu-gloo")
    return dataclasses.replace(base, offload_min_bytes=512, host_link_bytes_per_s=60e9)


def budgeted(program: Planned, share: float, accumulation: int = 1) -> dict[str, Any]:
    """Return the plan with a budget `share` of the way from the least to all that is kept.

    accumulation: backwards a step for which it is the least.
    """
    whole = zerofx.rewrite(program, {**PLAN, "activations": "keep", "offload": "none"}, 2)
    try:
        tight = {**PLAN, "memory_budget": 1}
        zerofx.rewrite(program, tight, 2, machine(), accumulation=accumulation)
    except zerofx.errors.BudgetError as error:
        least = error.least_bytes
    budget = int(least + share * (budget_for(peak_bytes(whole)) - least))
    return {**PLAN, "memory_budget": budget}


@cache
def captured(name: str) -> Captured:
    if name == "measured":
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
        return zerofx.capture(MODELS["gpt"](None), (tokens, tokens))
    args, kwargs = CASES[name].batch(0)
    return zerofx.capture(CASES[name].make(), args, kwargs)


@pytest.mark.slow
def test_the_plan_has_everything_in_it() -> None:
    after = zerofx.rewrite(captured("measured"), budgeted(captured("measured"), 0.3), 2, machine())
    choices = {d.choice for d in after.decisions}
    assert choices >= {"keep", "offload", "spend"}
    targets = {n.target for graph in after.graphs.values() for n in graph.graph.nodes}
    assert targets >= {ops.offload, ops.reload, ops.all_gather, ops.reduce_scatter, ops.release}
    tight = zerofx.rewrite(captured("measured"), budgeted(captured("measured"), 0.0), 2, machine())
    assert {d.choice for d in tight.decisions} >= {"recompute", "offload"}
    assert sum("tile" in b.label() for b in after.layout.buckets) == 16


@pytest.mark.parametrize("share", [0.05, pytest.param(0.5, marks=pytest.mark.slow)])
def test_trains_like_one_process(pool: Any, share: float) -> None:
    plan = budgeted(captured("gpt"), share, accumulation=2)
    options = {"accumulation": 2, "clip": 0.5, "machine": machine()}
    for report in pool.run(2, train_cell, "gpt", plan, options):
        assert report.loss <= 1e-6 and report.model <= 1e-6, report


@pytest.mark.slow
def test_two_live_forwards(pool: Any) -> None:
    for together, apart in pool.run(2, live, budgeted(captured("gpt"), 0.3)):
        assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


def live(plan: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of two losses, forwards first and then backwards, and one by one."""
    found = []
    for is_together in (True, False):
        model = zerofx.compile(CASES["gpt"].make(), plan, machine=machine())
        batches = [CASES["gpt"].batch(step) for step in (1, 2)]
        if is_together:
            losses = [model(*args, **kwargs) for args, kwargs in batches]
            for loss in losses:
                loss.backward()
        else:
            for args, kwargs in batches:
                model(*args, **kwargs).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([g.to_local().clone() if hasattr(g, "to_local") else g for g in grads])
    return found[0], found[1]


def test_bytes_are_as_predicted(pool: Any) -> None:
    """Of each lane, and at the device's peak, which stays under the budget."""
    plan = budgeted(captured("measured"), 0.2)
    for measured in pool.run(2, measure, "gpt", plan, "cpu", machine()):
        assert measured.sent == measured.predicted_sent
        assert measured.moved == measured.predicted_moved
        assert measured.peak_bytes <= plan["memory_budget"]
        assert abs(measured.predicted_bytes / measured.peak_bytes - 1) < 0.02
