"""Models whose layers are recognised in the graph alone train as one plain process does."""

from __future__ import annotations

from typing import Any

import pytest
from pool import Pool
from test_tensor_parallel import compare, plain, train


@pytest.mark.parametrize(
    ("name", "ranks", "plan"),
    [
        ("pairs", 2, {"stage": 3, "parallel": {"tensor": 2}}),
        pytest.param(
            "nano", 4, {"stage": 1, "parallel": {"tensor": 2, "sequence": True}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "neox", 4, {"stage": 0, "parallel": {"tensor": 4}}, marks=pytest.mark.slow
        ),
        pytest.param(
            "gated", 2, {"stage": 3, "parallel": {"tensor": 2}}, marks=pytest.mark.slow
        ),
        pytest.param(
            "turned", 2, {"stage": 3, "parallel": {"tensor": 2}}, marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_odd_names_train_alike(pool: Pool, name: str, ranks: int, plan: dict[str, Any]) -> None:
    expected = plain(name, "sgd", ranks // plan["parallel"]["tensor"])
    for found in pool.run(ranks, train, name, "sgd", plan):
        compare(found, expected, 2e-6)
