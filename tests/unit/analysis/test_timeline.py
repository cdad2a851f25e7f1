"""Lanes that take one task after another: times, what stood still for what, the critical path."""

from __future__ import annotations

import itertools
import random

import pytest
from task_cases import task

from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.timeline import timeline

C, G, R, N, H = Lane.COMPUTE, Lane.GATHER, Lane.REDUCE, Lane.NVME, Lane.H2D


def test_a_transfer_beside_compute_is_hidden() -> None:
    found = timeline([task(0, G, 10), task(1, C, 30, 0), task(2, G, 20, 0), task(3, C, 5, 2)])
    assert [s.start_us for s in found.spans] == [0, 10, 10, 40]
    assert found.step_us == 45
    assert found.exposed_us[G] == 10
    assert found.idle == {"computes": 35, "waits: gather": 10}


def test_a_lane_takes_one_after_another() -> None:
    found = timeline([task(0, G, 10), task(1, G, 10), task(2, C, 1, 1)])
    assert found.spans[2].start_us == 20
    assert found.spans[1].waited_for == 0
    assert found.spans[1].idle_reason == ""
    assert found.spans[2].idle_reason == "waits for gather"


def test_what_stands_still_is_divided_along_the_chain() -> None:
    """A gather that waited for a copy, which waited for a read: each counts for its own part."""
    chain = [task(0, C, 4), task(1, N, 10), task(2, H, 3, 1), task(3, G, 2, 2), task(4, C, 1, 3)]
    found = timeline(chain)
    assert found.step_us == 16
    assert {k: us for k, us in found.exposed_us.items() if us} == {N: 6, H: 3, G: 2}
    assert found.exposed_communication_us == 2
    assert [s.task.index for s in found.critical_path()] == [1, 2, 3, 4]


def test_what_runs_on_behind_the_last_compute_is_exposed() -> None:
    found = timeline([task(0, C, 4), task(1, R, 10, 0)])
    assert found.exposed_us[R] == 10
    assert found.step_us == 14


@pytest.mark.parametrize("seed", range(20))
def test_random_tasks(seed: int) -> None:
    """Compute and idle add up to the step, and so does the critical path."""
    draw = random.Random(seed)
    lanes = [C, G, R, N]
    tasks = []
    for i in range(60):
        needs = draw.sample(range(i), min(i, draw.randrange(3)))
        tasks.append(task(i, draw.choice(lanes), draw.randrange(1, 20), *needs))
    found = timeline(tasks)
    assert sum(found.idle.values()) == pytest.approx(found.step_us)
    path = found.critical_path()
    assert sum(s.task.us for s in path) == pytest.approx(found.step_us)
    assert found.low_us <= found.step_us <= found.high_us
    for lane in lanes:
        mine = [s for s in found.spans if s.task.lane is lane]
        assert all(a.end_us <= b.start_us for a, b in itertools.pairwise(mine))
    for span in found.spans:
        assert all(found.spans[n].end_us <= span.start_us for n in span.task.needs)
    shown = found.to_dict()
    assert shown["spans"][3]["lane"] == tasks[3].lane.value
