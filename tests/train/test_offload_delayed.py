"""Updates that run one step late, beside the next step: ZeRO-Offload's delayed parameter update."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from offload_cases import FINE, batch_loss
from pool import Pool
from torch import Tensor

import zerofx

STEPS = 5
DELAYED = {"update": "in-backward", "offload": {"optimizer": "cpu", "delayed": True}}
NEAR = {**DELAYED["offload"], "parameters": "cpu"}
PLANS: list[dict[str, Any]] = [
    {**DELAYED, "stage": 3},
    {**DELAYED, "stage": 3, "offload": NEAR},
    {**DELAYED, "stage": 2},
    {**DELAYED, "stage": 3, "precision": "bf16"},
    {**DELAYED, "stage": 3, "offload": {**NEAR, "device_fraction": 0.4}},
]


def made(plan: dict[str, Any]) -> tuple[Any, Any]:
    model = zerofx.compile(CASES["gpt"].make(), {**FINE, **plan})
    model._engine.slots.poison = model._engine.host.poison = True
    return model, zerofx.optim.AdamW(model.parameters(), lr=0.05)


def trained(plan: dict[str, Any], steps: int = STEPS) -> list[Tensor]:
    """Return the losses of the steps and the parameters behind them, rates falling on the way."""
    model, optimizer = made(plan)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    found = []
    for step in range(steps):
        loss = batch_loss(model, "gpt", step)
        loss.backward()
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return found + list(model.state_dict().values())


def one_step_late(plan: dict[str, Any], steps: int = STEPS) -> list[Tensor]:
    """Return the same from two plain models: gradients of the old one's parameters move the new."""
    plain = {k: v for k, v in plan.items() if k not in ("offload", "update")}
    model, optimizer = made(plain)
    late, _ = made(plain)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    found, before = [], model.state_dict()
    for step in range(steps):
        late.load_state_dict(before)
        before = model.state_dict()
        loss = batch_loss(late, "gpt", step)
        loss.backward()
        for param, other in zip(model.parameters(), late.parameters(), strict=True):
            param.grad = None if other.grad is None else other.grad.detach().clone()
        optimizer.step()
        rates.step()
        late.zero_grad()
        found.append(loss.detach().clone())
    return found + list(model.state_dict().values())


def check(plan: dict[str, Any]) -> bool:
    pairs = zip(trained(plan), one_step_late(plan), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("plan", PLANS[:-1], ids=range(len(PLANS) - 1))
def test_one_step_late_and_nothing_else(plan: dict[str, Any]) -> None:
    assert check(plan)


@pytest.mark.parametrize("plan", [PLANS[1], pytest.param(PLANS[2], marks=pytest.mark.slow)])
def test_two_ranks(pool: Pool, plan: dict[str, Any]) -> None:
    assert all(pool.run(2, check, plan))


def test_what_stays_on_the_device_is_updated_at_once() -> None:
    model, _ = made(PLANS[-1])
    homes = {b.home.value for b in model._engine.layout.buckets}
    assert homes == {"device", "host"}
    losses = [float(x) for x in trained(PLANS[-1])[:STEPS]]
    assert losses[0] == float(one_step_late(PLANS[0])[0]) and losses[-1] < losses[0]


def test_saves_and_copies_wait_for_what_is_under_way(tmp_path: Path) -> None:
    model, optimizer = made(PLANS[0])
    other, _ = made({k: v for k, v in PLANS[0].items() if k not in ("offload", "update")})
    for step in range(2):
        batch_loss(model, "gpt", step).backward()
        optimizer.step()
    assert not model._engine.store.ledger.pending.is_idle
    twin = copy.deepcopy(model)
    zerofx.save(tmp_path / "run", model, optimizer)
    zerofx.load(tmp_path / "run", other)
    expected = trained(PLANS[0], 2)  # another rate in the second step
    states = [m.state_dict() for m in (model, twin, other)]
    assert len(expected) == 2 + len(states[0])
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]) and torch.equal(value, states[2][name]), name


def test_an_update_that_fails_is_raised_by_the_next_step() -> None:
    model, optimizer = made(PLANS[0])
    real = optimizer.update

    def fails(*given: Any) -> None:
        raise ZeroDivisionError("in an update")

    optimizer.update = fails
    batch_loss(model, "gpt", 0).backward()
    optimizer.step()
    optimizer.update = real
    with pytest.raises(ZeroDivisionError, match="in an update"):
        batch_loss(model, "gpt", 1).backward()


def test_the_copies_that_gathers_read_are_predicted() -> None:
    model, optimizer = made(PLANS[1])
    batch_loss(model, "gpt", 0).backward()
    optimizer.step()
    plain = {**PLANS[1], "offload": {k: v for k, v in NEAR.items() if k != "delayed"}}
    before, _ = made(plain)
    batch_loss(before, "gpt", 0).backward()
    late, soon = (m.programs[0].memory().memory.host_bytes for m in (model, before))
    copies = sum(t.nbytes for t in model._engine.away._casts.values())
    assert late - soon == copies == sum(s.nbytes for s in model._engine.store.shards)
