"""A cover of the kill matrix (`tests/kills.py`, run whole by `make faults`)."""

from __future__ import annotations

import pickle
from pathlib import Path

import kills
import pytest
from kills import Point
from pool import Pool


@pytest.mark.parametrize("phase", ["compile", "background"])
def test_a_rank_is_killed(pool: Pool, tmp_path: Path, phase: str) -> None:
    """The survivor names it within seconds, and the last snapshot loads at any world."""
    chosen = [p for p in kills.points(seed=2) if p.phase == phase and p.rank == 1]
    (point,) = [p for p in chosen if p.plan == "stage 3, all on the host"]
    _, faults, seconds = kills.run(pool, [point], tmp_path)
    assert not faults and len(seconds) == 1


def test_the_matrix_covers_every_phase_rank_stage_and_tier() -> None:
    points = kills.points(seed=1)
    assert len(set(points)) == len(points) >= 150
    assert {(p.phase, p.rank) for p in points} == {(x, r) for x in kills.PHASES for r in (0, 1)}
    assert {p.plan for p in points} == set(kills.PLANS)


def test_other_values_and_older_snapshots_are_found() -> None:
    found = {"model": {"a": [1, 2]}, "step": 3}
    assert kills.difference(found, pickle.loads(pickle.dumps(found))) == ""
    assert kills.difference(found, {"model": {"a": [1, 3]}, "step": 3}) == "/model/a/1"
    assert kills.difference(found, {"model": {"a": [1]}, "step": 3}).startswith("other keys")
    assert "rank 1 50% into save" in str(Point("stage 0", "save", 1, 0.5))
