"""Saves and loads of what lives on NVMe: from and to any tier, at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from far_cases import everything, made, tiers, train, unequal
from pool import Pool
from safetensors.torch import load_file
from snapshot_cases import everything as whole_of

import zerofx

EARLY = {"update": "in-backward"}
LEG = 2  # steps
# What runs a part of the training and hands it on: ranks, plan, tiers.
RELAY: list[tuple[int, dict[str, Any], tuple[str, str]]] = [
    (1, {}, ("none", "none")),
    (2, {}, ("nvme", "nvme")),
    (1, {"stage": 1}, ("nvme", "none")),
    (2, EARLY, ("nvme", "cpu")),
    (2, {}, ("cpu", "cpu")),
]


def run_leg(
    folder: str, plan: dict[str, Any], places: tuple[str, str], source: str | None, target: str
) -> tuple[Any, dict[str, Any]]:
    """Load, train on, save; return all state as loaded and as saved."""
    model, optimizer = made("mixed", "adamw", {**plan, **tiers(folder, *places)})
    first, loaded = 0, None
    if source is not None:
        with torch.no_grad():  # what is not loaded is wrong
            for param in model.parameters():
                param.mul_(3.0)
        first = zerofx.load(source, model, optimizer)["step"]
        loaded = whole_of(model, optimizer)
    train(model, optimizer, "mixed", first, first + LEG)
    zerofx.save(target, model, optimizer, extra={"step": first + LEG})
    return loaded, whole_of(model, optimizer)


def relay(pool: Pool, tmp_path: Path, legs: list[Any]) -> None:
    handed_on, source = None, None
    for number, (world, plan, places) in enumerate(legs):
        target = str(tmp_path / f"leg-{number}")
        results = pool.run(world, run_leg, str(tmp_path), plan, places, source, target)
        for loaded, saved in results:
            assert handed_on is None or not unequal(loaded, handed_on)
            assert not unequal(saved, results[0][1])
        handed_on, source = results[0][1], target


def test_handed_on_from_tier_to_tier(pool: Pool, tmp_path: Path) -> None:
    relay(pool, tmp_path, RELAY[:3])


@pytest.mark.slow
def test_handed_on_through_all_tiers_and_back(pool: Pool, tmp_path: Path) -> None:
    relay(pool, tmp_path, RELAY + RELAY[::-1])


def interrupted(folder: str, plan: dict[str, Any], places: tuple[str, str]) -> list[str]:
    """Return what differs between a run on the device and one that is taken up again on NVMe."""
    model, optimizer = made("gpt", "adamw", {k: v for k, v in plan.items() if k != "update"})
    train(model, optimizer, "gpt", 0, 4)
    expected = everything(model, optimizer)
    save = f"{folder}/save"
    away = {**plan, **tiers(folder, *places)}
    model, optimizer = made("gpt", "adamw", away)
    train(model, optimizer, "gpt", 0, 2)
    zerofx.save(save, model, optimizer)
    train(model, optimizer, "gpt", 2, 3)  # goes on, and then back
    zerofx.load(save, model, optimizer)
    train(model, optimizer, "gpt", 2, 4)
    found = unequal(everything(model, optimizer), expected)
    model, optimizer = made("gpt", "adamw", away)
    zerofx.load(save, model, optimizer)
    train(model, optimizer, "gpt", 2, 4)
    return found + unequal(everything(model, optimizer), expected)


def test_taken_up_again(tmp_path: Path) -> None:
    assert not interrupted(str(tmp_path), {}, ("nvme", "nvme"))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, EARLY, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("parameters", ["none", "cpu", "nvme"])
def test_taken_up_again_on_two_ranks(
    pool: Pool, tmp_path: Path, plan: dict[str, Any], parameters: str
) -> None:
    for found in pool.run(2, interrupted, str(tmp_path), plan, ("nvme", parameters)):
        assert not found


def weights_alone(folder: str) -> list[str]:
    """Full weights out of a model on NVMe and into another, by each of the ways there are."""
    model, optimizer = made("gpt", "adamw", tiers(folder))
    train(model, optimizer, "gpt", 0, 2)
    state, found = model.state_dict(), []
    other, again = made("gpt", "adamw", tiers(folder))
    other.load_state_dict(state)
    again.load_state_dict(optimizer.state_dict())
    zerofx.export(f"{folder}/weights.safetensors", model)
    exported = load_file(f"{folder}/weights.safetensors")
    # every rank reads, since values of a state_dict on NVMe are read by all ranks together
    found += unequal(exported, {k: v for k, v in state.items() if k in exported})
    assert len(exported) > 5
    ends = []
    for pair in ((model, optimizer), (other, again)):
        train(*pair, "gpt", 2, 4)
        ends.append(everything(*pair))
    return found + unequal(*ends)


def test_weights_alone(tmp_path: Path) -> None:
    assert not weights_alone(str(tmp_path))


@pytest.mark.slow
def test_weights_alone_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, weights_alone, str(tmp_path)):
        assert not found
