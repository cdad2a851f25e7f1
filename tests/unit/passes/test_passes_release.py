"""release: each gathered copy dropped after its last reader."""

from __future__ import annotations

import pytest
from models import OWN
from oracle_cases import Choice
from passes_compact import before, order, run

from zerofx import ops
from zerofx.ir.graphs import users_after_views
from zerofx.passes.release import Release

FINE = Choice(3, bucket_bytes=0, persist_below=0)


def test_behind_the_last_region_that_reads() -> None:
    program = before("chain", FINE, "release")
    after = run(program, Release())
    assert order(after, "forward") == [
        "gather 0", "wait gather 0", "region 0 code", "region 1",
        "gather 1", "wait gather 1", "region 2 layers.0", "release 1",
        "gather 2", "wait gather 2", "region 3 layers.1", "release 2",
        "gather 3", "wait gather 3", "region 4 layers.2", "release 3",
        "gather 4", "wait gather 4", "region 5 layers.3", "release 4",
        "region 6", "release 0",
    ]  # fmt: skip
    without = [row for row in order(after, "backward") if not row.startswith("release")]
    assert without == order(program, "backward"), "nothing else moved"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_resident_is_never_released(stage: int) -> None:
    assert not Release().run(before("chain", Choice(stage), "release")).changed


@pytest.mark.parametrize("case", OWN)
def test_every_gather_is_released_once_and_nothing_reads_it_afterwards(case: str) -> None:
    after = run(before(case, Choice(3, activations="recompute"), "release"), Release())
    for gm in after.graphs.values():
        position = {n: i for i, n in enumerate(gm.graph.nodes)}
        for wait in [n for n in gm.graph.nodes if n.target is ops.wait]:
            if wait.args[0].target is ops.all_gather:
                releases = [u for u in wait.users if u.target is ops.release]
                assert len(releases) == 1
                readers = [r for r in users_after_views(wait) if r is not releases[0]]
                assert all(position[r] < position[releases[0]] for r in readers)
