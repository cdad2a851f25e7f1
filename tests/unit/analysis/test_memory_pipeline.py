"""Predicted and measured peaks of pipelines: of layers with large gradients, and of the opposite.

With one data rank a micro-batch's gradients are made beside p.grad; with several, beside a sum.
"""

from __future__ import annotations

from typing import Any

import pytest
from measure import ATEN, TOLERANCE, measure
from pool import Pool

from zerofx.ir.program import Loop

GRADIENTS = "broad, four blocks"  # of a block: 3 MiB; a micro-batch saves 1 MiB there
ACTIVATIONS = "gpt, large batch"  # 0.4 MiB; 1.5 MiB
ONE_BY_ONE = {"pipeline": 2, "micro_batches": 4}
GPIPE = {**ONE_BY_ONE, "schedule": "gpipe"}
ZERO_BUBBLE = {**ONE_BY_ONE, "schedule": "zero-bubble"}
INTERLEAVED = {**ONE_BY_ONE, "schedule": "interleaved", "interleave": 2}
TWICE = Loop(2)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "ranks", "stage", "parallel"),
    [
        (GRADIENTS, 2, 3, ONE_BY_ONE),
        slow(GRADIENTS, 2, 0, GPIPE),
        slow(GRADIENTS, 2, 1, ZERO_BUBBLE),
        slow(GRADIENTS, 2, 2, INTERLEAVED),
        slow(GRADIENTS, 4, 0, ONE_BY_ONE),
        slow(GRADIENTS, 4, 1, INTERLEAVED),
        slow(GRADIENTS, 4, 2, GPIPE),
        slow(GRADIENTS, 4, 3, ZERO_BUBBLE),
        slow(GRADIENTS, 4, 3, {**ONE_BY_ONE, "accumulate": "sharded"}),
        slow(GRADIENTS, 4, 2, {**ONE_BY_ONE, "pipeline": 4}),
        slow(GRADIENTS, 4, 3, {**GPIPE, "pipeline": 4}),
        slow(GRADIENTS, 4, 0, {**ZERO_BUBBLE, "pipeline": 4, "micro_batches": 4}),
        slow(ACTIVATIONS, 2, 2, ONE_BY_ONE),
        slow(ACTIVATIONS, 2, 3, GPIPE),
        slow(ACTIVATIONS, 2, 0, INTERLEAVED),
        slow(ACTIVATIONS, 4, 1, ZERO_BUBBLE),
        slow(ACTIVATIONS, 4, 3, {**ONE_BY_ONE, "pipeline": 4, "micro_batches": 8}),
    ],
    ids=str,
)
def test_the_peak_of_each_stage_is_the_predicted_one(
    pool: Pool, model: str, ranks: int, stage: int, parallel: dict[str, Any]
) -> None:
    plan = {**ATEN, "stage": stage, "parallel": parallel}
    for measured in pool.run(ranks, measure, model, plan):
        off = measured.predicted_bytes / measured.peak_bytes - 1
        assert abs(off) < TOLERANCE, (measured.predicted_bytes, measured.peak_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stage", "precision"),
    [(2, 3, "fp16"), (2, 2, "bf16"), (4, 1, "bf16"), (4, 3, "fp16")],
)
def test_adding_gradients_of_another_format_takes_no_copy(
    pool: Pool, ranks: int, stage: int, precision: str
) -> None:
    plan = {**ATEN, "stage": stage, "parallel": ONE_BY_ONE, "precision": precision}
    for measured in pool.run(ranks, measure, GRADIENTS, plan):
        off = measured.predicted_bytes / measured.peak_bytes - 1
        assert abs(off) < TOLERANCE, (measured.predicted_bytes, measured.peak_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), (4, 1)])
def test_gradients_of_earlier_calls_are_counted(pool: Pool, ranks: int, stage: int) -> None:
    plan = {**ATEN, "stage": stage, "parallel": ONE_BY_ONE}
    once = pool.run(ranks, measure, GRADIENTS, plan)
    twice = pool.run(ranks, measure, GRADIENTS, plan, "cpu", None, TWICE)
    for one, two in zip(once, twice, strict=True):
        assert abs(two.predicted_bytes / two.peak_bytes - 1) < TOLERANCE
        assert two.peak_bytes > 1.05 * one.peak_bytes
