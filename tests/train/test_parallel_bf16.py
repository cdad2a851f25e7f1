"""bf16 over tensor, pipeline and context: no further from fp64 than one plain process is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from tensor_models import MODELS, batch
from torch import Tensor, nn

import zerofx
from zerofx.plan.plan import Plan

STEPS = 5
Run = tuple[list[float], dict[str, Tensor]]


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def on_ranks(name: str, parallel: dict[str, Any]) -> Run:
    plan = {"precision": "bf16", "kernels": "aten", "outputs": "loss", "parallel": parallel}
    model = zerofx.compile(make(name), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(name, seed=step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(zerofx.full_state_dict(model, rank0_only=False))


def plain(name: str, dtype: torch.dtype) -> Run:
    """Train one plain process in a format, with weights of fp32 (or fp64) that the steps change."""
    model = make(name)
    whole = torch.float64 if dtype is torch.float64 else torch.float32
    weights = [p.detach().to(whole, copy=True) for p in model.parameters()]
    model.to(dtype)
    losses = []
    for step in range(STEPS):
        with torch.no_grad():
            for p, weight in zip(model.parameters(), weights, strict=True):
                p.copy_(weight)
                p.grad = None
        loss = model(**batch(name, seed=step)).loss
        loss.backward()
        for p, weight in zip(model.parameters(), weights, strict=True):
            assert p.grad is not None
            weight -= 0.1 * p.grad.to(whole)
        losses.append(float(loss.detach()))
    names = [n for n, _ in model.named_parameters()]
    return losses, dict(zip(names, weights, strict=True))


def errors(found: Run, exact: Run, start: dict[str, Tensor]) -> tuple[float, float]:
    """Return the largest error of a loss, and that of all parameters as a part of their way."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(found[0], exact[0], strict=True))
    off = sum(float((found[1][n].double() - p).square().sum()) for n, p in exact[1].items())
    way = sum(float((start[n].double() - p).square().sum()) for n, p in exact[1].items())
    return losses, (off / way) ** 0.5


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("llama", {"tensor": 2}),
        pytest.param("llama", {"tensor": 2, "sequence": True}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"tensor": 2, "sequence": True}, marks=pytest.mark.slow),
        pytest.param("llama", {"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {"context": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {"tensor": 2, "context": 2}, marks=pytest.mark.slow),
    ],
)
def test_bf16_is_as_exact_as_on_one_process(
    pool: Pool, name: str, parallel: dict[str, Any]
) -> None:
    start = {n: p.detach() for n, p in make(name).named_parameters()}
    exact, alone = plain(name, torch.float64), plain(name, torch.bfloat16)
    of_losses, of_params = errors(alone, exact, start)
    assert 1e-5 < of_losses < 0.05 and 1e-4 < of_params < 0.2
    ranks = Plan(parallel=parallel).parallel.num_shared
    for found in pool.run(ranks, on_ranks, name, parallel):
        mine = errors(found, exact, start)
        print(name, parallel, mine, (of_losses, of_params))
        assert mine[1] <= 1.5 * of_params
        assert mine[0] <= 1.5 * of_losses
