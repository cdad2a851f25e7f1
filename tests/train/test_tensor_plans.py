"""Layers cut over ranks together with the plan's other fields: equal to one plain process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import ATEN, BATCH, SEQ, TOLERANCE, measure
from measure import MODELS as MEASURED
from pool import Pool
from tensor_models import MODELS, batch
from torch import Tensor

import zerofx
from zerofx.analysis.memory.memory import peak_bytes
from zerofx.errors import PlanError
from zerofx.passes.decide import budget_for

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr

Found = tuple[dict[str, Tensor], dict[str, Tensor]]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def run(plan: dict[str, Any] | None, kind: str, ignored: list[str], data: int = 1) -> Found:
    """Train 3 steps; return the whole parameters, and the last gradients of ignored ones.

    data: how many ranks' samples a step without a plan takes.
    """
    torch.manual_seed(0)
    model: Any = MODELS["blocks"]()
    if plan is not None:
        model = zerofx.compile(model, {"kernels": "aten", **plan})
    rank = model.zerofx.data_rank if plan is not None else 0
    left = {n: p for n, p in model.named_parameters() if any(x in n for x in ignored)}
    trained = [p for n, p in model.named_parameters() if n not in left]
    optimizer = getattr(zerofx.optim, kind)(trained, lr=1e-2, eps=1e-4)
    for step in range(3):
        for param in left.values():
            param.grad = None
        for micro in range(rank, rank + data):
            (model(**batch("blocks", seed=10 * step + micro)).loss / data).backward()
        optimizer.step()
        optimizer.zero_grad()
    grads = {n: p.grad for n, p in left.items() if p.grad is not None}
    return dict(model.state_dict()), grads


def check(found: Found, expected: Found) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key], value, rtol=0, atol=1e-5, msg=key)


HOST = {"optimizer": "cpu", "parameters": "cpu"}
IGNORED = {"ignored_params": ["blocks.0.fc1", "blocks.0.norm"]}


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"update": "in-backward", "offload": HOST | {"activations": "cpu"}}),
        (2, IGNORED),
        slow(2, {"update": "in-backward", "stage": 1}),
        slow(2, {"offload": {"optimizer": "cpu", "device_fraction": 0.5}, "stage": 2}),
        slow(2, {"activations": {"blocks.0": "offload"}}),
        slow(2, {"offload": {"activations": "nvme"}}),
        slow(2, {"offload": {"optimizer": "nvme", "parameters": "nvme"}}),
        slow(2, {"offload": {"optimizer": "nvme"}, "update": "in-backward"}),
        slow(2, {"memory_budget": "600KiB", "activations": "auto"}),
        slow(4, {"update": "in-backward"}),
        slow(4, {"update": "in-backward", "optimizer": "Lamb"}),
        slow(2, {"offload": {"optimizer": "nvme"}, "optimizer": "Lamb"}),
        slow(4, {"offload": HOST, "stage": 3}),
        slow(4, {"offload": {"optimizer": "nvme", "parameters": "nvme"}}),
        slow(4, {"memory_budget": "600KiB", "activations": "auto"}),
    ],
)
def test_plans_train_alike(pool: Pool, tmp_path: Path, ranks: int, plan: dict[str, Any]) -> None:
    plan = dict(plan)
    kind = plan.pop("optimizer", "AdamW")
    if "nvme" in plan.get("offload", {}).values():
        plan = plan | {"offload": plan["offload"] | {"path": str(tmp_path)}}
    ignored = plan.get("ignored_params", [])
    expected = run(None, kind, ignored, ranks // 2)
    cut = plan | {"parallel": {"tensor": 2}}
    for found in pool.run(ranks, run, cut, kind, ignored, timeout_s=400):
        check(found, expected)


def scaled(factor: float) -> list[tuple[dict[str, Tensor], float, int]]:
    """Train in fp16 with a loss scale that overflows at first."""
    plan = {"precision": {"compute": "fp16", "loss_scale": {"initial": factor}}, "kernels": "aten"}
    found = []
    for parallel in ({"tensor": 2}, "none"):
        torch.manual_seed(0)
        model: Any = zerofx.compile(MODELS["blocks"](), {**plan, "parallel": parallel})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model(**batch("blocks", seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scaler = model.loss_scale
        found.append((dict(model.state_dict()), scaler.scale, scaler.num_skipped))
    return found


def test_loss_scales_move_alike(pool: Pool) -> None:
    for mine, theirs in pool.run(2, scaled, 2.0**18):
        assert mine[1:] == theirs[1:] and mine[2] > 0
        for key, value in theirs[0].items():
            torch.testing.assert_close(mine[0][key], value, rtol=0, atol=1e-3, msg=key)


# -- memory ---------------------------------------------------------------------------------------
PARALLEL = {"tensor": 2}


@pytest.mark.parametrize("share", [slow(0.0), slow(0.5)])
def test_a_budget_is_kept_with_what_collectives_of_values_hold(pool: Pool, share: float) -> None:
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    program = zerofx.capture(MEASURED["gpt"](None), (tokens, tokens))
    plan = {**ATEN, "parallel": PARALLEL}
    most, least = (
        peak_bytes(zerofx.rewrite(program, {**plan, "activations": a}, 2))
        for a in ("keep", "recompute")
    )
    budget = budget_for(int(least + share * (most - least)))
    plan |= {"activations": "auto", "memory_budget": budget}
    for measured in pool.run(2, measure, "gpt", plan, timeout_s=400):
        assert measured.predicted_bytes <= budget
        assert measured.peak_bytes <= measured.predicted_bytes * (1 + TOLERANCE)


def test_what_stays_gathered_lies_as_its_parameters() -> None:
    program = zerofx.capture(MODELS["blocks"](), (), batch("blocks"))
    plan = {"stage": 3, "memory_budget": "600KiB", "activations": "auto", "parallel": PARALLEL}
    planned = zerofx.rewrite(program, plan, 4)
    assert any(d.choice == "keep gathered" for d in planned.decisions)


def test_what_does_not_go_together_is_refused() -> None:
    for field in ({"sparse_gradients": True}, {"cuda_graph": True}):
        with pytest.raises(PlanError, match=next(iter(field))):
            zerofx.Plan(parallel=PARALLEL, **field)
