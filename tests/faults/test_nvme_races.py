"""Copies on the device that follow updates over NVMe: nobody touches what is under way on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from test_offload_races import forget, races_in

from zerofx.runtime.tiers.away_shards import AwayShards
from zerofx.runtime.tiers.host_tier import HostTier

BF16 = {"stage": 3, "precision": "bf16"}
IN_BACKWARD = {"stage": 1, "precision": "bf16", "update": "in-backward"}
TILED = {"stage": 3, "tiling": {"blocks.*.mlp": 4}}


def away(plan: dict[str, Any], folder: Path | str) -> dict[str, Any]:
    return {**plan, "offload": {"optimizer": "nvme", "path": str(folder)}}


@pytest.mark.parametrize(
    ("plan", "loops"), [(BF16, ["evaluated-between", "written", "no-sync"]), (IN_BACKWARD, None)]
)
def test_nobody_touches_what_is_under_way(
    plan: dict[str, Any], loops: list[str] | None, tmp_path: Path
) -> None:
    assert not races_in(away(plan, tmp_path), loops)


# What is left out, and the race that is then found.
BROKEN = [
    (HostTier, "settle_place", BF16, "host: aten.copy_.default writes what h2d"),
    (HostTier, "settle_place", IN_BACKWARD, "update: aten.copy_.default writes what h2d"),
    (AwayShards, "_await_update", IN_BACKWARD, "compute: aten.addmm.default reads what h2d"),
]


@pytest.mark.parametrize(("where", "what", "plan", "race"), BROKEN)
def test_each_wait_is_needed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    where: Any,
    what: str,
    plan: dict[str, Any],
    race: str,
) -> None:
    monkeypatch.setattr(where, what, forget)
    found = races_in(away(plan, tmp_path), ["evaluated-between"])
    assert any(race in line for line in found), found[:5]


def tiled(folder: str, forgets: bool) -> list[str]:
    """Run where one place of the host holds several tiles, which travel one by one."""
    move = HostTier.move
    if forgets:  # of which place a part is

        def whole(
            tier: Any, out: Any, source: Any, lane: str, lent: Any = None, what: str = ""
        ) -> Any:
            return move(tier, out, source, lane, what=what)

        HostTier.move = whole  # type: ignore[method-assign]
    try:
        return races_in(away(TILED, folder), ["evaluated-between"], "gpt")
    finally:
        HostTier.move = move  # type: ignore[method-assign]


@pytest.mark.parametrize("forgets", [False, True])
def test_tiles_of_one_place(pool: Pool, tmp_path: Path, forgets: bool) -> None:
    for found in pool.run(2, tiled, str(tmp_path), forgets):
        assert any("writes what h2d" in line for line in found) == forgets, found[:5]
