"""Resuming: at another world size and stage, with every optimizer, with dropout, from any place."""

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
from torch import Tensor, nn

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


@pytest.mark.parametrize(("name", "optimizer"), [("gpt", "adamw"), ("convnet", "sgd")])
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


# -- every optimizer ------------------------------------------------------------------------------
class Odd(nn.Module):
    """Parameters without dimensions, without elements, frozen and unused, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.fc = nn.Linear(5, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("temporary", torch.zeros(2), persistent=False)
        self.note = "fresh"

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen(self.fc(x)) * self.scale).pow(2).mean() + self.empty.sum()

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


MADE: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def odd_run(name: str, plan: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = zerofx.compile(Odd(), {"kernels": "aten", **plan})
    groups = [
        {"params": [model.fc.weight, model.scale], "lr": 0.01},
        {"params": [model.fc.bias, model.empty, *model.frozen.parameters()]},
    ]
    return model, MADE[name](groups)


def odd_step(model: Any, optimizer: Any, step: int) -> None:
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).backward()
    optimizer.step()
    optimizer.zero_grad()


def save_odd(folder: str, plan: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name in MADE:
        model, optimizer = odd_run(name, plan)
        for step in range(2):
            odd_step(model, optimizer, step)
        with torch.no_grad():
            model.flags.logical_not_()
            model.count.add_(41)
        model._model.note = "trained"
        zerofx.save(f"{folder}/{name}", model, optimizer)
        saved = everything(model, optimizer)
        odd_step(model, optimizer, 2)
        found[name] = saved, everything(model, optimizer)
    return found


def load_odd(folder: str, plan: dict[str, Any], has_state: bool) -> dict[str, Any]:
    found = {}
    for name in MADE:
        model, optimizer = odd_run(name, plan)
        if has_state:  # filled in place, and options replaced
            odd_step(model, optimizer, 5)
            optimizer.param_groups[0]["lr"] = 7.0
        assert zerofx.load(f"{folder}/{name}", model, optimizer) == {}
        assert (model.note, int(model.count)) == ("trained", 41), name
        loaded = everything(model, optimizer)
        odd_step(model, optimizer, 2)
        found[name] = loaded, everything(model, optimizer)
    return found


@pytest.mark.parametrize(
    ("saved", "loaded", "has_state"),
    [(2, 1, False), (1, 2, True)],
)
def test_every_optimizer(
    pool: Pool, tmp_path: Path, saved: int, loaded: int, has_state: bool
) -> None:
    expected = pool.run(saved, save_odd, str(tmp_path), {"stage": 3})[0]
    for found in pool.run(loaded, load_odd, str(tmp_path), {"stage": 3}, has_state):
        for name in MADE:
            for mine, theirs in zip(found[name], expected[name], strict=True):
                assert_same(mine, theirs)


# -- what else is loaded from where ---------------------------------------------------------------
def scheduled(folder: str, resume: bool) -> list[float]:
    model, optimizer = compiled("gpt", {"stage": 2})
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    if resume:
        extra = zerofx.load(folder, model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        scaler.load_state_dict(extra["scaler"])
        assert torch.equal(extra["nested"][0]["tensor"], torch.arange(3))
        assert scaler.get_scale() == 256.0
    rates = []
    for step in range(4 if resume else 0, 8):
        train(model, optimizer, "gpt", step, step + 1)
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
        if step == 3:
            scaler.scale(torch.ones(()))  # it starts at its first use
            scaler.update(256.0)
            extra = {
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
                "nested": [{"tensor": torch.arange(3)}, (1, None)],
            }
            zerofx.save(folder, model, optimizer, extra)
    return rates[-4:] + [float(v.double().sum()) for v in model.state_dict().values()]


def test_schedulers_and_scalers_go_through_extra(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "save")
    assert pool.run(2, scheduled, folder, False) == pool.run(2, scheduled, folder, True)


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
