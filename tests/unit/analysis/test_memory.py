"""Predicted memory and traffic against what torch's allocator and the world's counters say."""

from __future__ import annotations

import os
from typing import Any

import pytest
from measure import ATEN, TOLERANCE, Measured, measure

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr


def check(measured: Measured) -> None:
    off = measured.predicted_bytes / measured.peak_bytes - 1
    assert abs(off) < TOLERANCE, f"predicted {measured.predicted_bytes}, was {measured.peak_bytes}"
    assert measured.sent == measured.predicted_sent


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["gpt", "convs"])
def test_one_rank(name: str, stage: int) -> None:
    check(measure(name, {"stage": stage, **ATEN}))


def test_one_rank_in_bf16() -> None:
    check(measure("gpt", {"stage": 3, "precision": "bf16", **ATEN}))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", {"stage": 0}),
        ("gpt", {"stage": 1}),
        ("gpt", {"stage": 2}),
        ("gpt", {"stage": 3}),
        ("gpt", {"stage": 3, "activations": "recompute"}),
        ("gpt", {"stage": 3, "memory_budget": "12800KiB"}),
        ("gpt", {"stage": 3, "bucket_bytes": "1MiB", "prefetch": 2}),
        ("convs", {"stage": 0}),
        ("convs", {"stage": 3}),
        ("gpt", {"stage": 3, "precision": "bf16"}),
        *(
            pytest.param("gpt", plan, marks=pytest.mark.slow)
            for plan in (
                {"stage": 0, "precision": "bf16"},
                {"stage": 2, "precision": "bf16"},
                {"stage": 3, "precision": {"compute": "bf16", "reduce": "bf16"}},
            )
        ),
    ],
    ids=str,
)
def test_two_ranks(pool: Any, name: str, plan: dict[str, Any]) -> None:
    for measured in pool.run(2, measure, name, {**ATEN, **plan}):
        check(measured)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_each_stage(pool: Any, stage: int) -> None:
    """2 Psi elements for stages 0 to 2, 3 Psi for stage 3, of which a ring sends (w - 1) / w.

    At stage 3 without what backward does not read: here the position embedding.
    """
    world = 2
    for measured in pool.run(world, measure, "gpt", {**ATEN, "stage": stage, "persist_below": 0}):
        numel = 2 * measured.padded_numel + measured.regathered_numel
        sent_bytes = sum(nbytes for _, nbytes in measured.sent.values())
        assert sent_bytes == 4 * numel * (world - 1) / world
        assert measured.sent == measured.predicted_sent
        assert (measured.regathered_numel > 0.9 * measured.padded_numel) == (stage == 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "shard_axis_size": 2}],
    ids=str,
)
def test_four_ranks(pool: Any, plan: dict[str, Any]) -> None:
    for measured in pool.run(4, measure, "gpt", {**ATEN, **plan}):
        check(measured)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_as_compiled_by_inductor(pool: Any, stage: int) -> None:
    """The generated wrappers say what regions allocate; ATen's liveness alone is further off."""
    plan = {**ATEN, "kernels": "inductor", "stage": stage}
    for measured in pool.run(2, measure, "gpt", plan, timeout_s=300.0):
        check(measured)


@pytest.mark.slow
def test_results_that_the_loop_drops(pool: Any) -> None:
    """A loop that keeps only the loss frees the logits after forward."""
    pytest.importorskip("transformers")
    for measured in pool.run(2, measure, "hf-gpt2", {**ATEN, "stage": 3}):
        assert measured.predicted_bytes > measured.peak_bytes
        off = measured.predicted_loss_only_bytes / measured.peak_bytes - 1
        assert abs(off) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 3])
def test_on_cuda(stage: int) -> None:
    measured = measure("gpt", {"stage": stage, **ATEN}, "cuda:0")
    assert abs(measured.predicted_bytes / measured.peak_bytes - 1) < 0.05
