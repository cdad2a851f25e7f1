"""Several backwards a step: what earlier ones leave is predicted, as it is measured."""

from __future__ import annotations

import os
from typing import Any

import pytest
from measure import ATEN, TOLERANCE, measure
from pool import Pool

from zerofx.ir.program import Loop

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
ONCE, TWICE = Loop(), Loop(2)
PUT_OFF = Loop(2, no_sync=True)


def peaks(
    pool: Pool, world: int, plan: dict[str, Any], loop: Loop, model: str = "wide"
) -> list[int]:
    """Return each rank's measured peak; the predicted one is near it."""
    found = []
    for measured in pool.run(world, measure, model, {**ATEN, **plan}, "cpu", None, loop):
        off = measured.predicted_bytes / measured.peak_bytes - 1
        assert abs(off) < TOLERANCE, (measured.predicted_bytes, measured.peak_bytes)
        found.append(measured.peak_bytes)
    return found


@pytest.mark.parametrize("stage", [0, 1, 3, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_of_earlier_micro_batches_stand(pool: Pool, stage: int) -> None:
    once, twice = (max(peaks(pool, 2, {"stage": stage}, loop)) for loop in (ONCE, TWICE))
    assert twice > 1.05 * once


@pytest.mark.parametrize("stage", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (0, 3))])
def test_sums_of_no_sync_stand(pool: Pool, stage: int) -> None:
    reduced, put_off = (max(peaks(pool, 2, {"stage": stage}, loop)) for loop in (TWICE, PUT_OFF))
    assert (put_off > 1.02 * reduced) == (stage == 1)  # else no_sync changes nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "loop"),
    [
        ({"stage": 0}, Loop(3, no_sync=True)),
        ({"stage": 1}, Loop(3)),
        ({"stage": 3, "activations": "recompute", "tiling": {"blocks.*.mlp.up": 4}}, Loop(3)),
        ({"stage": 3, "precision": "bf16"}, Loop(3, no_sync=True)),
        ({"stage": 1, "precision": {"compute": "bf16", "reduce": "bf16"}}, Loop(3, no_sync=True)),
        ({"stage": 0, "precision": {"compute": "bf16", "reduce": "bf16"}}, Loop(3)),
    ],
    ids=str,
)
def test_three_micro_batches(pool: Pool, plan: dict[str, Any], loop: Loop) -> None:
    peaks(pool, 2, plan, loop, "gpt")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"stage": 1}, {"stage": 0}, {"stage": 3, "shard_axis_size": 2}])
def test_four_ranks(pool: Pool, plan: dict[str, Any]) -> None:
    for loop in (TWICE, PUT_OFF):
        peaks(pool, 4, plan, loop)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_one_rank(pool: Pool, stage: int) -> None:
    peaks(pool, 1, {"stage": stage}, TWICE)
