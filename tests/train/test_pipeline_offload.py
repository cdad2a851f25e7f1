"""Pipelines whose parameters and optimizer are on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from measure import ATEN, measure
from pool import Pool
from tensor_models import MODELS
from torch import Tensor, nn

import zerofx

STEPS, CALLS = 3, 2  # with two calls, gradients of the first one stand during the second
ONE_BY_ONE = {"pipeline": 2, "micro_batches": 4}
INTERLEAVED = {**ONE_BY_ONE, "schedule": "interleaved", "interleave": 2}
OPTIMIZER = {"optimizer": "cpu"}
BOTH = {"optimizer": "cpu", "parameters": "cpu"}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def samples(number: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    ids = torch.randint(0, 64, (8, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def train(name: str, plan: dict[str, Any]) -> dict[str, Tensor]:
    """Return the trained parameters."""
    model = zerofx.compile(make(name), {"kernels": "aten", **plan})
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    for step in range(STEPS):
        optimizer.zero_grad()
        for call in range(CALLS):
            model(**samples(step * CALLS + call, model.zerofx.data_rank)).loss.backward()
        optimizer.step()
    return dict(zerofx.full_state_dict(model, rank0_only=False))


def plain(name: str, data: int) -> dict[str, Tensor]:
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    for step in range(STEPS):
        optimizer.zero_grad()
        for call in range(CALLS):
            for rank in range(data):
                (model(**samples(step * CALLS + call, rank)).loss / data).backward()
        optimizer.step()
    return model.state_dict()


def assert_trained_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= 1e-5 * float(value.abs().max()), name


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "ranks", "stage", "parallel", "offload"),
    [
        ("llama", 2, 3, ONE_BY_ONE, BOTH),
        slow("gpt2", 2, 1, ONE_BY_ONE, OPTIMIZER),
        slow("gpt2", 4, 3, ONE_BY_ONE, BOTH),
        slow("llama", 4, 2, ONE_BY_ONE, OPTIMIZER),
        slow("gpt2", 2, 2, INTERLEAVED, OPTIMIZER),
        slow("llama", 2, 3, {**ONE_BY_ONE, "schedule": "gpipe"}, {"parameters": "cpu"}),
    ],
    ids=str,
)
def test_offloaded_pipelines_train_as_one_process(
    pool: Pool, name: str, ranks: int, stage: int, parallel: dict[str, Any], offload: dict[str, Any]
) -> None:
    expected = plain(name, ranks // 2)
    plan = {"stage": stage, "parallel": parallel, "offload": offload}
    for state in pool.run(ranks, train, name, plan):
        assert_trained_alike(state, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stage", "parallel", "offload"),
    [(2, 3, ONE_BY_ONE, BOTH), (4, 3, ONE_BY_ONE, BOTH), (2, 1, ONE_BY_ONE, OPTIMIZER)],
    ids=str,
)
def test_peaks_of_offloaded_pipelines_are_known(
    pool: Pool, ranks: int, stage: int, parallel: dict[str, Any], offload: dict[str, Any]
) -> None:
    plan = {**ATEN, "stage": stage, "parallel": parallel}
    whole = pool.run(ranks, measure, "broad", plan)
    for kept, away in zip(
        whole, pool.run(ranks, measure, "broad", {**plan, "offload": offload}), strict=True
    ):
        assert away.predicted_bytes == pytest.approx(away.peak_bytes, rel=0.05)
        assert away.host_bytes == pytest.approx(away.predicted_host_bytes, rel=0.05)
        assert away.peak_bytes < 0.8 * kept.peak_bytes
