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
from zerofx.comm import world as worlds
from zerofx.comm.differences import IF_RANK_0
from zerofx.errors import DesyncError

PLAN = {"stage": 3, "kernels": "aten", "bucket_bytes": 4096}


class MLP(nn.Module):
    def __init__(
        self, act: Callable[..., Any] = torch.relu, drop: float = 0.1, width: int = 16
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
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


def compiled(model: nn.Module, **fields: Any) -> str:
    with pytest.raises(DesyncError) as caught:
        zerofx.compile(model, dict(PLAN, **fields))
    return str(caught.value)


def other_width() -> str:
    return compiled(MLP(width=32 if is_odd() else 16))


def frozen_on_one_rank() -> str:
    model = MLP()
    model.down.bias.requires_grad_(not is_odd())
    return compiled(model)


def other_precision() -> str:
    return compiled(MLP(), precision="bf16" if is_odd() else "fp32")


def other_groups() -> str:
    model = MLP()
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest}] if is_odd() else [first, *rest]
    with pytest.raises(DesyncError) as caught:
        zerofx.compile(model, PLAN, optimizer=torch.optim.SGD(groups, lr=0.01))
    return str(caught.value)


def clipped_on_one_rank() -> str:
    model = zerofx.compile(MLP(), PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.randn(4, 8)).backward()
    with pytest.raises(DesyncError) as caught:
        if is_odd():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model(torch.randn(4, 8))
    return str(caught.value)


def in_eval_mode_on_one_rank() -> str:
    model = zerofx.compile(MLP(), PLAN)
    with pytest.raises(DesyncError) as caught, torch.set_grad_enabled(not is_odd()):
        model(torch.randn(4, 8))
    return str(caught.value)


def of_another_kind() -> str:
    model = zerofx.compile(MLP(), PLAN)
    half = torch.float64 if is_odd() else torch.float32
    return train_on(model, torch.randn(4, 8, dtype=half).float().to(half))


def train_on(model: Any, x: torch.Tensor) -> str:
    model.up.register_forward_pre_hook(lambda module, given: (given[0].float(),))
    with pytest.raises(DesyncError) as caught:
        model(x).backward()
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


# the body, what the message has of rank 1, what of rank 0, and what must be alike
DIFFERENCES = [
    (other_learning_rate, "lr=0.02", "lr=0.01", "step its optimizer"),
    (other_learning_rate_in_the_last_step, "lr=0.25", "lr=0.5", "step its optimizer"),
    (other_optimizer, "optimizer=AdamW", "optimizer=SGD", "the same class"),
    (other_optimizer_at_compile, "momentum=0.9", "momentum=0.0", "the same optimizer"),
    (
        other_accumulation,
        "with optimizer steps=1",
        "with optimizer steps=0",
        "after the same calls",
    ),
    (zeroed_on_one_rank, "adds to gradients=False", "adds to gradients=True", "zero_grad"),
    (
        other_activation,
        "aten.gelu.default(%), test_rank_differences.py:",
        "aten.relu.default(%), test_rank",
        "the same model in the same mode",
    ),
    (other_dropout, "0.5, True", "0.1, True", "the same model in the same mode"),
    (part_in_eval_mode, "aten", "aten.native_dropout", "the same model in the same mode"),
    (of_another_kind, "input x(f64[4, 8])", "input x(f32[4, 8])", "the same model"),
    (other_width, "up.weight=f32[32, 8] ", "up.weight=f32[16, 8].", "build the same model"),
    (frozen_on_one_rank, "down.bias=f32[8] frozen ", "down.bias=f32[8].", "build the same model"),
    (other_precision, "with plan.precision=bf16 ", "with plan.precision=fp32.", "the same plan"),
    (other_groups, "with param_groups=2 ", "with param_groups=1.", "the same parameter groups"),
    (clipped_on_one_rank, "clip_grad_norm_", "forward of MLP", "run clip_grad_norm_"),
    (in_eval_mode_on_one_rank, "inference of MLP", "forward of MLP", "torch.no_grad()"),
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
        for body, odd, common, rule in DIFFERENCES:
            message = found[body.__name__]
            mine, _, theirs = message.partition(" while rank 0 runs ")
            assert message.startswith("rank 1 is about to run"), (body.__name__, message)
            assert odd in f"{mine} " and common in theirs, (body.__name__, message)
            assert rule in message.rpartition(". Every rank must ")[2], (body.__name__, message)
            is_alone = body in (clipped_on_one_rank, in_eval_mode_on_one_rank)
            assert message.endswith(IF_RANK_0) == is_alone, (body.__name__, message)


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
