"""Resuming: at another world size and stage, with dropout, weights alone, from any place."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import CASES
from pool import Pool
from snapshot_cases import OPTIMIZERS, assert_same, compiled, everything, train
from torch import nn

import zerofx

# What runs a part of the training and hands it on: ranks, plan.
RELAY: list[tuple[int, dict[str, Any]]] = [
    (2, {"stage": 3}),
    (1, {"stage": 1}),
    (2, {"stage": 0}),
    (3, {"stage": 2, "persist_below": "1KiB"}),
]
LEG = 2  # steps


def run_leg(
    name: str, plan: dict[str, Any], optimizer_name: str, source: str | None, target: str
) -> tuple[Any, dict[str, Any]]:
    """Load, train on, save; return all state as loaded and as saved."""
    # Another seed: what is not loaded is wrong.
    model, optimizer = compiled(name, plan, optimizer_name, seed=0 if source is None else 7)
    first, loaded = 0, None
    if source is not None:
        epoch = model._engine.store.epoch
        first = zerofx.load(source, model, optimizer)["step"]
        assert model._engine.store.epoch > epoch
        loaded = everything(model, optimizer)
    train(model, optimizer, name, first, first + LEG)
    zerofx.save(target, model, optimizer, extra={"step": first + LEG})
    return loaded, everything(model, optimizer)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [pytest.param("gpt", "adamw", marks=pytest.mark.slow), ("convnet", "sgd")],
)
def test_relay_over_worlds_and_stages(
    pool: Pool, tmp_path: Path, name: str, optimizer: str
) -> None:
    handed_on, source = None, None
    for number, (world, plan) in enumerate(RELAY if name == "gpt" else RELAY[:3]):
        target = str(tmp_path / f"leg-{number}")
        results = pool.run(world, run_leg, name, plan, optimizer, source, target)
        for loaded, saved in results:
            if handed_on is not None:
                assert_same(loaded, handed_on)
            assert_same(saved, results[0][1])
        handed_on, source = results[0][1], target
    model, theirs = CASES[name].make(), OPTIMIZERS[optimizer]
    plain = theirs(model.parameters())
    if name == "gpt":  # batch statistics see each rank's own sequence of micro-batches
        train(model, plain, name, 0, LEG * len(RELAY))
        assert distance(handed_on, model) <= 1e-6


def distance(found: Any, model: nn.Module) -> float:
    """Return how far the state lies from a plain model's, relative, over all parameters."""
    pairs = [(found[f"model.{n}"], p.detach()) for n, p in model.named_parameters()]
    gap = sum(float((a - b).norm()) ** 2 for a, b in pairs)
    return (gap / sum(float(b.norm()) ** 2 for _, b in pairs)) ** 0.5


# -- the same world: bit for bit, with everything random ------------------------------------------
def interrupted(folder: str, stop: bool) -> tuple[list[float], dict[str, Any], list[float]]:
    model, optimizer = compiled("gpt-dropout", {"stage": 3})
    rank = model._engine.world.rank
    random.seed(rank)  # ranks draw their own data
    np.random.seed(rank)
    if stop:
        train(model, optimizer, "gpt-dropout", 0, 2)
        random.gauss(0, 1)
        np.random.standard_normal()
        zerofx.save(folder, model, optimizer)
    else:
        torch.manual_seed(99)
        zerofx.load(folder, model, optimizer)
    losses = train(model, optimizer, "gpt-dropout", 2, 4)
    drawn = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand()]
    return losses, everything(model, optimizer), [*drawn, float(torch.rand(()))]


@pytest.mark.parametrize("world", [1, 2])
def test_dropout_and_generators_go_on_bit_for_bit(pool: Pool, tmp_path: Path, world: int) -> None:
    folder = str(tmp_path / "save")
    first = pool.run(world, interrupted, folder, True)
    second = pool.run(world, interrupted, folder, False)
    for (losses, state, drawn), (again, state_again, drawn_again) in zip(
        first, second, strict=True
    ):
        assert losses == again and drawn == drawn_again
        assert_same(state_again, state)
    if world == 2:
        assert first[0][2][:4] != first[1][2][:4] and first[0][2][4] == first[1][2][4]


def generators_after(folder: str) -> list[float]:
    model, optimizer = compiled("gpt-dropout", {"stage": 3})
    zerofx.load(folder, model, optimizer)
    return [random.random(), np.random.rand(), float(torch.rand(()))]


def test_another_world_size_takes_rank_0s_generators(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "save")
    pool.run(2, interrupted, folder, True)
    (alone,) = pool.run(1, generators_after, folder)
    same = pool.run(2, generators_after, folder)
    assert alone == same[0] and alone != same[1]
    for drawn in pool.run(3, generators_after, folder):
        assert drawn == alone


# -- what else is loaded from where ---------------------------------------------------------------
def weights_only(folder: str) -> dict[str, Any]:
    model, _ = compiled("gpt", {"stage": 3}, seed=3)
    zerofx.load(folder, model)
    return dict(model.state_dict())


def test_weights_alone(tmp_path: Path, pool: Pool) -> None:
    model, optimizer = compiled("gpt", {"stage": 3})
    train(model, optimizer, "gpt", 0, 1)
    folder = tmp_path / "save"
    zerofx.save(folder, model, optimizer)
    for found in pool.run(2, weights_only, str(folder)):
        assert_same(found, dict(model.state_dict()))


def plain_round_trip() -> None:
    """state_dict() into an uncompiled model and back, and the optimizer's within one run."""
    model, optimizer = compiled("gpt", {"stage": 3})
    train(model, optimizer, "gpt", 0, 2)
    plain = CASES["gpt"].make(5)
    plain.load_state_dict(model.state_dict())
    other, theirs = compiled("gpt", {"stage": 1}, seed=5)
    other.load_state_dict(plain.state_dict())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors
    assert_same(everything(other, theirs), everything(model, optimizer))
    train(model, optimizer, "gpt", 2, 4)
    train(other, theirs, "gpt", 2, 4)
    assert_same(everything(other, theirs), everything(model, optimizer))


@pytest.mark.parametrize("world", [1, 2])
def test_plain_state_dicts(pool: Pool, world: int) -> None:
    pool.run(world, plain_round_trip)


def sharded_axis(folder: str, axis: int, has_saved: bool) -> dict[str, Any]:
    plan = {"stage": 3, "shard_axis_size": axis}
    model, optimizer = compiled("gpt", plan, seed=9 if has_saved else 0)
    if has_saved:
        zerofx.load(folder, model, optimizer)
    else:
        train(model, optimizer, "gpt", 0, 1)
        zerofx.save(folder, model, optimizer)
    return everything(model, optimizer)


@pytest.mark.slow
def test_shard_axis(pool: Pool, tmp_path: Path) -> None:
    folders = itertools.count()
    for one, other in ((2, 4), (4, 2), (1, 2)):
        folder = str(tmp_path / str(next(folders)))
        saved = pool.run(4, sharded_axis, folder, one, False)
        for found in pool.run(4, sharded_axis, folder, other, True):
            assert_same(found, saved[0])


@pytest.mark.gpu
def test_on_cuda(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 7):
        torch.manual_seed(seed)
        model = zerofx.compile(CASES["branches"].make(seed), {"kernels": "aten"}, device="cuda")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        if seed == 0:
            cuda_step(model, optimizer, 0)
            zerofx.save(tmp_path / "save", model, optimizer)
        else:
            zerofx.load(tmp_path / "save", model, optimizer)
        cuda_step(model, optimizer, 1)
        runs.append(everything(model, optimizer))
    assert_same(runs[1], runs[0])


def cuda_step(model: Any, optimizer: Any, step: int) -> None:
    args, kwargs = CASES["branches"].batch(step)
    model(*(a.cuda() for a in args), **kwargs)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
