"""The soak (`make soak`) in small: two faults, and whether it sees what it looks for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pool import Died, Pool

sys.path.insert(0, str(Path(__file__).parents[1]))

import soak


def test_two_segments_go_on_from_each_other(pool: Pool, tmp_path: Path) -> None:
    steps = 0
    for fault, at in (("kill", 55), ("end", 5)):
        segment = soak.Segment(90, fault, 1, at, 0.0)
        answers = pool.run(2, soak.run_segment, str(tmp_path), segment, may_die=True)
        assert soak.check(answers, fault, 1) == []
        steps = max(a[1] for a in answers if not isinstance(a, Died))
    assert steps == 55
    losses, differing = soak.losses_of(tmp_path, 0)
    assert differing == []
    wanted = pool.run(2, soak.undisturbed, max(losses))[0]
    assert losses == {step: wanted[step - 1] for step in losses} and 54 in losses


def samples(**growing: float) -> list[dict[str, float]]:
    flat = {"rss_mib": 400.0, "descriptors": 20, "threads": 9, "disk_mib": 3.0}
    return [
        {"step": step} | {name: flat[name] + growing.get(name, 0) * step / 1000 for name in flat}
        for step in range(0, 2000, 25)
    ]


@pytest.mark.parametrize(
    ("answers", "fault", "said"),
    [
        ([("ended", 9, samples(), ""), ("ended", 9, samples(), "")], "none", ""),
        ([("ended", 9, samples(rss_mib=30), "")], "none", "rss_mib grew by"),
        ([("ended", 9, samples(threads=4), "")], "stop", "threads grew by"),
        ([("ended", 9, samples(descriptors=4), "")], "end", "descriptors grew by"),
        ([("ended", 9, samples(disk_mib=2), "")], "end", "disk_mib grew by"),
        ([Died(-9), ("error", 9, [], "rank 0 died")], "kill", ""),
        ([Died(-9), ("error", 9, [], "a rank died")], "kill", "does not name rank 0"),
        ([Died(-9), ("ended", 9, [], "")], "stop", "rank 0 died with -9"),
        ([("error", 9, [], "rank 0 hangs"), ("ended", 9, [], "")], "stop", "error at step 9"),
    ],
)
def test_what_it_looks_for_is_seen(answers: list[Any], fault: str, said: str) -> None:
    found = "; ".join(soak.check(answers, fault, 0))
    assert said in found if said else not found


def test_a_step_with_two_losses_is_seen(tmp_path: Path) -> None:
    rows = [[1, 0.5], [2, 0.25], [2, 0.125], [3, 0.1]]
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "losses-0.jsonl").write_text(text + "\n[4, 0.")
    assert soak.losses_of(tmp_path, 0) == ({1: 0.5, 2: 0.25, 3: 0.1}, [2])
