"""Plan(update="in-backward") needs less memory, by what is predicted; its gradients are freed."""

from __future__ import annotations

import pytest
from measure import measure
from optim_cases import mixed_batch, mixed_groups, mixed_model, ours
from pool import Pool
from update_cases import EARLY

import zerofx

LARGE = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 1024}


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_the_peak_is_lower_by_the_gradients(stage: int) -> None:
    """It is at the end of backward with all of them, and at its beginning with those of a block."""
    step = measure("deep, one sample", {**LARGE, "stage": stage})
    early = measure("deep, one sample", {**LARGE, "stage": stage, "update": "in-backward"})
    assert step.peak_bytes - early.peak_bytes > 0.35 * step.shard_bytes


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_the_lower_peak_is_predicted(pool: Pool, stage: int) -> None:
    plan = {**LARGE, "stage": stage}
    for step, early in zip(
        pool.run(2, measure, "deep, one sample", plan),
        pool.run(2, measure, "deep, one sample", {**plan, "update": "in-backward"}),
        strict=True,
    ):
        saved = step.peak_bytes - early.peak_bytes
        expected = step.predicted_bytes - early.predicted_bytes
        assert saved > 0.2 * step.shard_bytes
        assert abs(saved - expected) < 0.02 * step.peak_bytes
        assert abs(early.predicted_bytes / early.peak_bytes - 1) < 0.02


def test_gradients_are_freed_between_backward_and_the_next() -> None:
    model = zerofx.compile(mixed_model(), {**EARLY, "stage": 3})
    optimizer = ours("adamw", mixed_groups(model))
    model(*mixed_batch(0, 0)).backward()
    held = model._engine.store.grads.shards.values()
    assert held and all(g.flat.untyped_storage().nbytes() == 0 for g in held)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
