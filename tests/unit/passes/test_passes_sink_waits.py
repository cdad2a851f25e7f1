"""sink-waits: reductions waited for late, with a bounded number under way."""

from __future__ import annotations

import op_sets
import pytest
from oracle import differences, execute
from oracle_cases import Choice, captured_inference, expected, make_state
from passes_compact import before, order, run

from zerofx import ops
from zerofx.passes.sink_waits import SinkWaits

NAME = "sink-waits"
FINE = Choice(3, bucket_bytes=0, persist_below=0, prefetch=0)


def reductions(rows: list[str]) -> list[str]:
    return [r for r in rows if r.startswith(("region", "reduce", "wait reduce", "store"))]


def test_a_reduction_runs_beside_the_next_layer() -> None:
    program = before("chain", FINE, NAME)
    assert reductions(order(program, "backward"))[1:5] == [
        "region 1 layers.3", "reduce 4", "wait reduce 4", "store 4",
    ]  # fmt: skip
    after = run(program, SinkWaits(in_flight=1))
    assert reductions(order(after, "backward")) == [
        "region 0",
        "region 1 layers.3", "reduce 4",
        "region 2 layers.2", "wait reduce 4", "store 4", "reduce 3",
        "region 3 layers.1", "wait reduce 3", "store 3", "reduce 2",
        "region 4 layers.0", "wait reduce 2", "store 2", "reduce 1",
        "region 5 code", "wait reduce 1", "store 1", "reduce 0",
        "wait reduce 0", "store 0",
    ]  # fmt: skip
    assert order(after, "forward") == order(program, "forward")


@pytest.mark.parametrize("case", ["chain", "gpt", "adapters"])
@pytest.mark.parametrize("limit", [1, 2, 9])
def test_no_more_than_the_limit_under_way(case: str, limit: int) -> None:
    after = run(before(case, FINE, NAME), SinkWaits(in_flight=limit))
    most, now, waits = 0, 0, 0
    for node in after.graph("backward").nodes:
        now += node.target in op_sets.REDUCES
        is_wait = node.target is ops.wait and node.args[0].target in op_sets.REDUCES
        now -= is_wait
        waits += is_wait
        most = max(most, now)
    assert now == 0
    assert most == min(limit, waits)


@pytest.mark.parametrize("limit", [1, 3])
def test_bits_stay(limit: int) -> None:
    after = run(before("chain", FINE, NAME), SinkWaits(in_flight=limit))
    assert not differences(expected("chain", 2), execute([after] * 2, make_state("chain", 2)))


def test_inference_reduces_nothing() -> None:
    assert not SinkWaits().run(captured_inference("chain").planned().clone()).changed
