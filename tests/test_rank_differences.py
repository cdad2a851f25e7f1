"""Ranks that would train differently, without an error in eager PyTorch: differences are named."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from test_world_hosts import spread
from torch import nn

import zerofx
from zerofx.errors import DesyncError
from zerofx.runtime import world as worlds

PLAN = {"stage": 3, "kernels": "aten", "bucket_bytes": 4096}


class MLP(nn.Module):
    def __init__(self, act: Callable[..., Any] = torch.relu, drop: float = 0.1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.act = nn.Dropout(drop), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.act(self.up(x)))).square().mean()


def is_odd() -> bool:
    return os.environ["RANK"] == "1"


def train(model: Any, optimizer: Any, steps: int = 3, rows: int = 4) -> str:
    """Train; return what was raised."""
    try:
        for _ in range(steps):
            model(torch.randn(rows, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.state_dict()
    except DesyncError as error:
        return str(error)
    return ""


def other_learning_rate() -> str:
    model = zerofx.compile(MLP(), PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 if is_odd() else 0.01)
    return train(model, optimizer)


def other_learning_rate_in_the_last_step() -> str:
    model = zerofx.compile(MLP(), PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    assert not train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"].fill_(0.25 if is_odd() else 0.5)
    return train(model, optimizer, 1)


def other_optimizer() -> str:
    model = zerofx.compile(MLP(), dict(PLAN, stage=1))
    kind = zerofx.optim.AdamW if is_odd() else torch.optim.SGD
    return train(model, kind(model.parameters(), lr=0.01))


def other_optimizer_at_compile() -> str:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9 if is_odd() else 0.0)
    with pytest.raises(DesyncError) as caught:
        zerofx.compile(model, PLAN, optimizer=optimizer)
    return str(caught.value)


def other_accumulation() -> str:
    model = zerofx.compile(MLP(), PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        for batch in range(4):
            model(torch.randn(4, 8)).backward()
            if is_odd() or batch % 2:
                optimizer.step()
                optimizer.zero_grad()
    except DesyncError as error:
        return str(error)
    return ""


def zeroed_on_one_rank() -> str:
    model = zerofx.compile(MLP(), PLAN)
    try:
        for _ in range(2):
            model(torch.randn(4, 8)).backward()
            if is_odd():
                model.zero_grad()
    except DesyncError as error:
        return str(error)
    return ""


def other_activation() -> str:
    model = zerofx.compile(MLP(torch.nn.functional.gelu if is_odd() else torch.relu), PLAN)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.01))


def other_dropout() -> str:
    model = zerofx.compile(MLP(drop=0.5 if is_odd() else 0.1), PLAN)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.01))


def part_in_eval_mode() -> str:
    model = zerofx.compile(MLP(), PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert not train(model, optimizer, 1)
    model.drop.train(not is_odd())
    return train(model, optimizer)


DIFFERENCES = [
    (other_learning_rate, "lr=0.02", "lr=0.01"),
    (other_learning_rate_in_the_last_step, "lr=0.25", "lr=0.5"),
    (other_optimizer, "optimizer=AdamW", "optimizer=SGD"),
    (other_optimizer_at_compile, "momentum=0.9", "momentum=0.0"),
    (other_accumulation, "optimizer steps=1", "optimizer"),
    (zeroed_on_one_rank, "adds to gradients=False", "adds to gradients=True"),
    (
        other_activation,
        "aten.gelu.default(%), test_rank_differences.py:",
        "aten.relu.default(%), test_rank",
    ),
    (other_dropout, "0.5, True", "0.1, True"),
    (part_in_eval_mode, "aten", "aten.native_dropout"),
]


def every_difference(per_host: int | None) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        if per_host is not None:
            connect = worlds.World.connect
            patch.setattr("zerofx.api.World.connect", lambda *args: spread(per_host, connect, args))
        return {body.__name__: body() for body, *_ in DIFFERENCES}


@pytest.mark.parametrize("per_host", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_trains_differently_is_named(pool: Pool, per_host: int | None) -> None:
    for found in pool.run(2, every_difference, per_host):
        for body, odd, common in DIFFERENCES:
            message = found[body.__name__]
            mine, _, theirs = message.partition(" while rank 0 runs ")
            assert message.startswith("rank 1 is about to run"), (body.__name__, message)
            assert odd in mine and common in theirs, (body.__name__, message)


def what_may_differ() -> list[str]:
    torch.manual_seed(int(os.environ["RANK"]))
    model = zerofx.compile(MLP(), PLAN)
    model.whose = os.environ["RANK"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=is_odd(), fused=not is_odd())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found = []
    for rows in (3, 5 if is_odd() else 4, 1 if is_odd() else 2):
        found.append(train(model, optimizer, 2, rows))
        schedule.step()
    return found


def test_seeds_lengths_and_the_manner_of_stepping_may_differ(pool: Pool) -> None:
    assert pool.run(2, what_may_differ) == [["", "", ""]] * 2


def test_one_rank_keeps_no_log_of_its_steps() -> None:
    model = zerofx.compile(nn.Linear(3, 3), {"kernels": "aten"}, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert model._engine.world.steps.take() == ""
