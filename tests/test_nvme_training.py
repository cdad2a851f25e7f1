"""Training with parameters and optimizer states on NVMe: the bits of the run without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from far_cases import Loop, tiers, trained, unequal
from pool import Pool

# case, (optimizer's tier, parameters' tier), plan, loop
Cell = tuple[str, tuple[str, str], dict[str, Any], Loop]
STEP, EARLY = {"update": "step"}, {"update": "in-backward"}

PAIRS: list[Cell] = [
    ("gpt", ("nvme", "none"), {"stage": 1}, Loop(clip="optimizer")),
    ("gpt", ("nvme", "nvme"), {"activations": "recompute"}, Loop(accumulation=2, clip="function")),
    ("mixed", ("nvme", "nvme"), {}, Loop("lamb", accumulation=2, steps=4)),
    ("mixed", ("nvme", "cpu"), EARLY, Loop("amsgrad", steps=4)),
    ("adapters", ("cpu", "nvme"), {}, Loop("momentum")),
    ("gpt", ("nvme", "cpu"), {"precision": "bf16"}, Loop("lion")),
]
ONE_RANK: list[Cell] = [
    ("mixed", ("nvme", "nvme"), {**EARLY, "precision": "bf16"}, Loop("lion", steps=4)),
    ("adapters", ("none", "nvme"), {}, Loop()),
]
TWO_RANKS: list[Cell] = [
    ("mixed", ("nvme", "none"), {"stage": 2, **EARLY}, Loop("lamb", steps=4)),
    ("gpt", ("nvme", "nvme"), {"precision": "fp16"}, Loop(clip="optimizer")),
]


def differing(folder: str, cells: list[Cell]) -> list[str]:
    """Return where training differs in a bit from the same with everything on the device."""
    found = []
    for case, (optimizer, parameters), plan, loop in cells:
        near = {k: v for k, v in plan.items() if k != "offload"}
        more = plan.get("offload", {})
        expected = trained(case, near, loop)
        away = trained(case, {**plan, **tiers(folder, optimizer, parameters, **more)}, loop)
        if wrong := unequal(away, expected):
            found.append(f"{case} {optimizer, parameters} {plan} {loop}: {wrong[:6]}")
    return found


def test_one_rank(tmp_path: Path) -> None:
    assert not differing(str(tmp_path), PAIRS + ONE_RANK)


def test_two_ranks(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, differing, str(tmp_path), PAIRS + TWO_RANKS):
        assert not found
