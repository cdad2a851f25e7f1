"""Plans that a search finds compile and train, as one plain process does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from pool import Pool
from tensor_models import MODELS
from torch import Tensor, nn

import zerofx
from zerofx.tools.predict import predict
from zerofx.tools.search.view import SearchView
from zerofx.tools.targets import Target

STEPS, COUNT = 3, 4  # samples of a step of both ranks
GIVEN = {
    "offload": "none", "tiling": "off", "update": "step", "prefetch": "auto", "bucket_bytes": None,
    "activations": "keep", "kernels": "aten", "precision": "fp32",
}  # fmt: skip


def make() -> nn.Module:
    torch.manual_seed(0)
    return MODELS["llama"]()


def ids(step: int, rank: int, count: int) -> dict[str, Tensor]:
    """Return the samples of a step of a data rank that has `count` of them."""
    drawn = torch.randint(0, 64, (COUNT, 8), generator=torch.Generator().manual_seed(step))
    own = drawn[rank * count : (rank + 1) * count]
    return {"input_ids": own, "labels": own}


@functools.cache
def found() -> SearchView:
    target = Target("llama", make(), (), ids(0, 0, COUNT // 2))
    return zerofx.search(target, hardware="cpu-box", world_size=2, global_samples=COUNT, plan=GIVEN)


def train(plan: dict[str, Any], samples: int, accumulation: int) -> tuple[list[float], Any]:
    model = zerofx.compile(make(), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_one_call = model.zerofx.plan.parallel.pipeline > 1
    losses = []
    for step in range(STEPS):
        own = ids(step, model.zerofx.data_rank, samples * accumulation)
        parts = [own] if is_one_call else [
            {k: v[i : i + samples] for k, v in own.items()}
            for i in range(0, samples * accumulation, samples)
        ]  # fmt: skip
        total = 0.0
        for part in parts:
            loss = model(**part).loss / len(parts)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, dict(zerofx.full_state_dict(model, rank0_only=False))


@pytest.mark.parametrize(
    "family",
    [
        "tensor",
        pytest.param("pipeline", marks=pytest.mark.slow),
        pytest.param("context", marks=pytest.mark.slow),
        pytest.param("ZeRO alone", marks=pytest.mark.slow),
    ],
)
def test_the_best_plan_of_each_family_trains(pool: Pool, family: str) -> None:
    view = found()
    (verdict,) = [v for v in view.found.verdicts if v.name == family]
    assert verdict.best is not None
    choice = verdict.best.choice
    plan = choice.plan.to_dict()
    ran = pool.run(2, train, plan, choice.samples, choice.accumulation)

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for step in range(STEPS):
        loss = model(**ids(step, 0, COUNT)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    losses = torch.tensor([mine for mine, _ in ran]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=0)
    for key, theirs in model.state_dict().items():
        torch.testing.assert_close(ran[0][1][key], theirs, rtol=0, atol=1e-5, msg=key)

    target = Target("llama", make(), (), ids(0, 0, choice.samples))
    if choice.plan.parallel.pipeline > 1 or choice.accumulation == 1:
        held = predict(target, choice.plan, hardware="cpu-box", world_size=2)
        assert held.peak_bytes == verdict.best.peak_bytes
