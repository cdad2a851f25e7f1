"""prefetch-gathers: launches ahead of their waits, with no more in flight than asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_cases import Choice
from passes_compact import before, order, pass_named, run

from zerofx import ops
from zerofx.ir.program import Planned
from zerofx.passes.prefetch import PrefetchGathers

NAME = "prefetch-gathers"
FINE = Choice(3, bucket_bytes=0, persist_below=0)


def test_one_bucket_ahead() -> None:
    program = before("chain", FINE, NAME)
    after = run(program, PrefetchGathers(distance=1))
    assert order(after, "forward") == [
        "gather 0", "gather 1", "wait gather 0", "region 0 code", "region 1",
        "gather 2", "wait gather 1", "region 2 layers.0", "release 1",
        "gather 3", "wait gather 2", "region 3 layers.1", "release 2",
        "gather 4", "wait gather 3", "region 4 layers.2", "release 3",
        "wait gather 4", "region 5 layers.3", "release 4",
        "region 6", "release 0",
    ]  # fmt: skip


def test_two_ahead() -> None:
    after = run(before("chain", FINE, NAME), PrefetchGathers(distance=2))
    assert order(after, "forward")[:8] == [
        "gather 0", "gather 1", "gather 2", "wait gather 0", "region 0 code", "region 1",
        "gather 3", "wait gather 1",
    ]  # fmt: skip


def test_none_ahead_changes_nothing() -> None:
    for choice in (FINE, Choice(3), Choice(2)):
        program = before("chain", choice, NAME)
        assert not PrefetchGathers(distance=0).run(program.clone()).changed


def test_a_refresh_goes_with_the_next_gather_and_does_not_count() -> None:
    """Else the gather behind it would be launched where its wait stands, covered by nothing."""
    after = run(before("chain", Choice(3, bucket_bytes=0), NAME), PrefetchGathers(distance=1))
    assert order(after, "forward")[:9] == [
        "gather 0", "gather 1", "wait gather 0", "region 0 code", "region 1",
        "refresh 2", "gather 3", "wait gather 1", "wait refresh 2",
    ]  # fmt: skip


def test_a_refresh_before_all_gathers_stays() -> None:
    """Every parameter is small but the last layer's: the first thing read is resident."""
    program = before("convnet", Choice(3, bucket_bytes=0, persist_below=500), NAME)
    after = run(program, PrefetchGathers(distance=1))
    first = order(program, "forward").index("gather 1")
    assert order(program, "forward")[:2] == ["refresh 0", "wait refresh 0"]
    assert order(after, "forward")[: first + 1] == order(program, "forward")[: first + 1]


def test_refreshes_alone_are_launched_ahead_as_well() -> None:
    after = run(before("chain", Choice(2, bucket_bytes=1500), NAME), PrefetchGathers(distance=1))
    assert order(after, "forward") == [
        "refresh 0", "refresh 1", "wait refresh 0", "region 0 code", "region 1",
        "region 2 layers.0",
        "refresh 2", "wait refresh 1", "region 3 layers.1", "region 4 layers.2",
        "wait refresh 2", "region 5 layers.3", "region 6",
    ]  # fmt: skip


@pytest.mark.parametrize(("asked", "distance"), [("auto", 1), (0, 0), (3, 3)])
def test_the_plans_distance(asked: str | int, distance: int) -> None:
    assert pass_named(Choice(3, prefetch=asked), NAME) == PrefetchGathers(distance=distance)


def in_flight(program: Planned, graph: str) -> int:
    """Return the most all-gathers under way at once."""
    most, now = 0, 0
    for node in program.graph(graph).nodes:
        if node.target is ops.all_gather:
            now += 1
            most = max(most, now)
        elif node.target is ops.wait and node.args[0].target is ops.all_gather:
            now -= 1
    assert now == 0
    return most


SETTINGS = st.builds(
    Choice,
    stage=st.just(3),
    bucket_bytes=st.sampled_from([0, 1500, 6000]),
    persist_below=st.sampled_from([0, 100, 700]),
    activations=st.sampled_from(["keep", "recompute"]),
)


@settings(max_examples=16)
@given(st.sampled_from(["chain", "gpt", "adapters"]), SETTINGS, st.integers(0, 6))
def test_never_more_than_distance_plus_one_in_flight(
    case: str, choice: Choice, distance: int
) -> None:
    program = before(case, choice, NAME)
    after = run(program, PrefetchGathers(distance=distance))
    for name in after.graphs:
        assert in_flight(after, name) <= distance + 1
        moved = [row for row in order(after, name) if "wait" in row or "region" in row]
        stayed = [row for row in order(program, name) if "wait" in row or "region" in row]
        assert moved == stayed, "only launches move"
        launches = [row.split()[1] for row in order(after, name) if row.startswith("gather")]
        waits = [row.split()[2] for row in order(after, name) if row.startswith("wait gather")]
        assert launches == waits, "launched in the order of their waits"
