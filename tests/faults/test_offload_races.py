"""On CUDA the host runs ahead of the device: neither touches what a copy under way still uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from copy_races import Races
from offload_loops import IN_BACKWARD, LOOPS, Run

from zerofx.runtime.tiers import nvme_values
from zerofx.runtime.tiers.away_shards import AwayShards
from zerofx.runtime.tiers.host_tier import HostTier

BOTH = {"optimizer": "cpu", "parameters": "cpu"}
OPTIMIZER = {"optimizer": "cpu"}
FINE: dict[str, Any] = {"bucket_bytes": 0, "persist_below": 0}
PLANS: list[dict[str, Any]] = [
    {"stage": 3, "offload": {**BOTH, "activations": "cpu"}},
    {"stage": 3, "offload": BOTH, "precision": "bf16", "prefetch": 2},
    {"stage": 2, "offload": OPTIMIZER, "precision": "bf16"},
    {"stage": 3, "offload": {**OPTIMIZER, "device_fraction": 0.5}, "precision": "fp16"},
    {"stage": 3, "offload": BOTH, "precision": "bf16", "update": "in-backward"},
]


def races_in(plan: dict[str, Any], names: Any = None, case: str = "chain") -> list[str]:
    """Run the loops under a plan; return each race, with its loop."""
    table = IN_BACKWARD if plan.get("update") == "in-backward" else LOOPS
    known: dict[Any, Any] = {}
    found = []
    for name in names or table:
        optimizer, loop = table[name]
        ready = Run(case, {**FINE, **plan}, optimizer, known)
        loop(ready)  # no operator of a capture is to be watched
        known = ready.model._programs.known
        with Races() as races:
            run = Run(case, {**FINE, **plan}, optimizer, known)
            races.watch(run.model)
            loop(run)
            run.end()
        assert len(races.copies) > 10
        found += [f"{name}: {race}" for race in races.found]
    return found


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_nobody_touches_what_is_under_way(plan: dict[str, Any]) -> None:
    assert not races_in(plan)


def spilling(folder: Any) -> dict[str, Any]:
    offload = {"activations": "nvme", "path": str(folder)}
    return {"stage": 3, "offload": offload, "prefetch": 2}


def test_nobody_touches_what_goes_to_nvme_or_comes(tmp_path: Path) -> None:
    assert not races_in(spilling(tmp_path), ["plain", "two-live"])


def test_the_thread_waits_before_a_request(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(nvme_values, "_behind", lambda settled, submit: submit())
    found = races_in(spilling(tmp_path), ["plain"])
    assert any("nvme write reads what d2h copy" in line for line in found), found[:5]
    assert any("nvme read writes what h2d copy" in line for line in found), found[:5]


def forget(*args: Any) -> None:
    """Do not wait."""


BROKEN = [
    (AwayShards, "settle", PLANS[1], "accumulated", "host: aten.add_.Tensor reads what d2h"),
    (AwayShards, "settle_all", PLANS[0], "plain", "host: aten.clone.default reads what d2h"),
    (AwayShards, "settle_all", PLANS[0], "evaluated-between", "writes what h2d copy"),
    (AwayShards, "settle", PLANS[4], "plain", "update: aten._fused_adamw_.default writes what d2h"),
    (HostTier, "settle_place", PLANS[2], "plain", "host: aten.copy_.default writes what h2d"),
]


@pytest.mark.parametrize(("where", "what", "plan", "loop", "race"), BROKEN)
def test_each_wait_is_needed(
    monkeypatch: pytest.MonkeyPatch, where: Any, what: str, plan: Any, loop: str, race: str
) -> None:
    monkeypatch.setattr(where, what, forget)
    found = races_in(plan, [loop])
    assert any(race in line for line in found), found[:5]


def test_a_wait_that_the_compute_does_not_make_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from copy_races import TrackedLane

    monkeypatch.setattr(TrackedLane, "join", forget)
    found = races_in(PLANS[0], ["plain"])
    assert any("compute: aten." in line and "reads what h2d copy" in line for line in found)
