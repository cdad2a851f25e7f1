"""Training with parameters and optimizer states on NVMe: the bits of the run without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from far_cases import Loop, tiers, trained, unequal
from offload_loops import is_exact, nearly_equal
from pool import Pool

Plan = dict[str, Any]
Tiers = tuple[str, str]  # of the optimizer, of the parameters
Cell = tuple[str, Plan, Loop, list[Tiers]]
EARLY: Plan = {"update": "in-backward"}
STATES, WIDE, ALL = ("nvme", "none"), ("nvme", "cpu"), ("nvme", "nvme")
FROZEN = ("cpu", "nvme")

ONE_RANK: list[Cell] = [
    ("gpt", {"activations": "recompute"}, Loop(accumulation=2, clip="function"), [ALL]),
    ("mixed", EARLY, Loop("amsgrad", steps=4), [WIDE]),
    ("mixed", {**EARLY, "precision": "bf16"}, Loop("lion", steps=4), [ALL]),
    ("adapters", {}, Loop("momentum"), [FROZEN]),
]
TWO_RANKS: list[Cell] = [
    ("gpt", {"stage": 1}, Loop(clip="optimizer"), [STATES]),
    ("mixed", {}, Loop("lamb", accumulation=2, steps=4), [ALL]),
    ("gpt", {"precision": "fp16"}, Loop(), [WIDE]),
]


def apart(found: dict[str, Any], expected: dict[str, Any], exact: bool) -> list[str]:
    """Return the names of what differs in a bit, or by more than rounding."""
    wrong = unequal(found, expected)
    if exact or found.keys() != expected.keys():
        return wrong
    return [name for name in wrong if not nearly_equal(found[name], expected[name])]


def differing(folder: str, cells: list[Cell]) -> list[str]:
    """Return where training differs in a bit from the same with everything on the device."""
    found = []
    for case, plan, loop, places in cells:
        more = plan.get("offload", {})
        expected = trained(case, {k: v for k, v in plan.items() if k != "offload"}, loop)
        for optimizer, parameters in places:
            away = trained(case, {**plan, **tiers(folder, optimizer, parameters, **more)}, loop)
            if wrong := apart(away, expected, is_exact(loop.clip == "optimizer")):
                found.append(f"{case} {optimizer, parameters} {plan} {loop}: {wrong[:6]}")
    return found


def test_one_rank(tmp_path: Path) -> None:
    assert not differing(str(tmp_path), ONE_RANK)


def test_two_ranks(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, differing, str(tmp_path), TWO_RANKS):
        assert not found


# -- all of it ------------------------------------------------------------------------------------
EVERYWHERE = [STATES, WIDE, ALL, FROZEN, ("none", "nvme")]
LOOPS = [Loop(), Loop(accumulation=2, clip="function"), Loop(clip="optimizer")]
KINDS = ["amsgrad", "momentum", "sgd", "lion", "lamb", "lamb-bert"]
PART: Plan = {"offload": {"device_fraction": 0.5}}
AWAY: Plan = {"activations": {"*": "offload"}}


def _plans() -> list[tuple[str, list[Cell]]]:
    found: list[tuple[str, list[Cell]]] = []
    for precision in ("fp32", "bf16", "fp16"):
        for stage in (1, 2, 3):
            plan, places = {"stage": stage, "precision": precision}, EVERYWHERE
            places = places if stage == 3 else [STATES]
            cells: list[Cell] = [("gpt", plan, loop, places) for loop in LOOPS]
            cells += [("mixed", plan, Loop(kind, steps=4), places[:3]) for kind in KINDS]
            found.append((f"{precision} stage {stage}", cells))
            if precision != "fp16":
                early = {**plan, **EARLY}
                cells = [("gpt", early, LOOPS[0], places)]
                cells += [("mixed", early, Loop(kind, steps=4), places[:3]) for kind in KINDS]
                found.append((f"{precision} stage {stage} in backward", cells))
    for name, plan in {
        "recompute": {"activations": "recompute"},
        "activations on the host": AWAY,
        "a part stays": PART,
        "a part stays, in backward": {**PART, **EARLY},
        "one bucket": {"bucket_bytes": "1MiB"},
        "no buckets": {"bucket_bytes": 0, "persist_below": 0},
        "far ahead": {"prefetch": 3},
        "inductor": {"kernels": "inductor"},
        "budget": {"memory_budget": "200KiB", "activations": "auto"},
    }.items():
        loops = LOOPS[:1] if "update" in plan else LOOPS
        places = [p for p in EVERYWHERE if name[:6] != "a part" or p[0] == "nvme"]
        cells = [("gpt", plan, loop, places) for loop in loops]
        found.append((name, [*cells, ("adapters", plan, Loop(), places)]))
    return found


PLANS = _plans()
# Every other on two ranks, and some on one.
ON_RANKS = [(world, *plan) for world in (1, 2) for plan in PLANS[:: 8 if world == 1 else 2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "name", "cells"), [pytest.param(*p, id=f"{p[1]}-{p[0]}") for p in ON_RANKS]
)
def test_everywhere(pool: Pool, tmp_path: Path, world: int, name: str, cells: list[Cell]) -> None:
    for found in pool.run(world, differing, str(tmp_path), cells, timeout_s=1500.0):
        assert not found
