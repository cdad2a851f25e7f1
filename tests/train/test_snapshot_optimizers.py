"""Resuming with every optimizer of torch, with parameters of odd forms, schedulers and scalers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from snapshot_cases import assert_same, compiled, everything, train
from torch import Tensor, nn

import zerofx


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
        model.note = "trained"
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


# -- schedulers and scalers -----------------------------------------------------------------------
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
