"""host_budget: one that is too small is refused before step 0, with the least that will do."""

from __future__ import annotations

from typing import Any

import pytest
from models import CASES

import zerofx
from zerofx.errors import BudgetError

FAR = {"path": "/nowhere"}  # on paper nothing is made there
PLACES: list[dict[str, Any]] = [
    {"optimizer": "cpu"},
    {"optimizer": "cpu", "parameters": "cpu", "activations": "cpu"},
    {"optimizer": "nvme", "parameters": "nvme", **FAR},
    {"optimizer": "nvme", "parameters": "cpu", "activations": "nvme", **FAR},
]


def on_host(offload: dict[str, Any], world: int, budget: int | None) -> int:
    """Return the bytes that a plan holds on the host, planned on paper."""
    args, kwargs = CASES["gpt"].batch(0)
    program = zerofx.capture(CASES["gpt"].make(), args, kwargs)
    plan = {"kernels": "aten", "offload": offload, "host_budget": budget}
    return zerofx.rewrite(program, plan, world).memory().memory.host_bytes


@pytest.mark.parametrize("offload", PLACES, ids=str)
def test_the_least_is_said_and_will_do(offload: dict[str, Any]) -> None:
    """Also where activations alone would exceed the budget: what is said counts all there is."""
    with pytest.raises(BudgetError) as caught:
        on_host(offload, 2, 1)
    least, text = caught.value.least_bytes, str(caught.value)
    assert f"({least} bytes) on the host per rank" in text and "Raise it to that" in text
    assert "but the budget is 1 B" in text
    assert on_host(offload, 2, least) == least
    with pytest.raises(BudgetError, match=f"{least} bytes"):
        on_host(offload, 2, least - 1)
