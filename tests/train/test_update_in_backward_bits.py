"""Plan(update="in-backward") leaves the bits of the ordinary step, whatever the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import CASES
from optim_cases import mixed_batch, mixed_groups, mixed_model, ours
from pool import Pool
from torch import Tensor
from update_cases import EARLY, FINE, Pair, rank_here, values

import zerofx

OPTIMIZERS = ["adamw", "amsgrad", "momentum", "lion", "lamb"]
STEPS = 4


def trained(name: str, plan: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor], list[Any]]:
    """Return losses, the model's state and the optimizer's after a few steps with a schedule."""
    model = zerofx.compile(mixed_model(), plan)
    optimizer = ours(name, mixed_groups(model))
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS + 1)
    losses = []
    for step in range(STEPS):
        loss = model(*mixed_batch(step, rank_here()))
        loss.backward()
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    states = [
        getattr(v, "to_local", lambda v=v: v)()
        for _, held in sorted(optimizer.state_dict()["state"].items())
        for _, v in sorted(held.items())
        if isinstance(v, Tensor)
    ]
    return losses, model.state_dict(), states


def differing(names: list[str], plan: dict[str, Any]) -> list[str]:
    """Return where training with updates in backward differs in a bit from stepping behind it."""
    found = []
    for name in names:
        step = trained(name, {**FINE, **plan})
        early = trained(name, {**EARLY, **plan})
        same = {
            "losses": all(map(torch.equal, step[0], early[0])),
            "model": all(torch.equal(v, early[1][k]) for k, v in step[1].items()),
            "states": len(step[2]) == len(early[2]) and all(map(torch.equal, step[2], early[2])),
        }
        assert len(step[2]) > 0
        found += [f"{name} {plan}: {what}" for what, is_same in same.items() if not is_same]
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank(stage: int) -> None:
    assert not differing(OPTIMIZERS, {"stage": stage})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks(pool: Pool, stage: int) -> None:
    names = {0: ["adamw", "lamb"], 1: ["momentum"], 2: ["amsgrad"], 3: ["adamw", "lion", "lamb"]}
    for found in pool.run(2, differing, names[stage], {"stage": stage}):
        assert not found


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [*({"stage": s} for s in range(4)),
     {"stage": 3, "precision": "bf16"}, {"stage": 2, "precision": "bf16"},
     {"stage": 3, "kernels": "inductor"}, {"stage": 3, "shard_axis_size": 2},
     {"stage": 3, "activations": "recompute"}],
    ids=str,
)  # fmt: skip
def test_two_ranks_everywhere(pool: Pool, plan: dict[str, Any]) -> None:
    for found in pool.run(2, differing, OPTIMIZERS, plan):
        assert not found


def test_a_shared_weight_is_updated_behind_its_last_use() -> None:
    """Where nothing is sharded, layers compute on the very memory that the update writes."""
    case = CASES["chain"]
    finals = []
    for update in ("step", "in-backward"):
        model = zerofx.compile(case.make(), {**FINE, "stage": 0, "update": update})
        optimizer = zerofx.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            args, kwargs = case.batch(step)
            model(*args, **kwargs).backward()
            optimizer.step()
            optimizer.zero_grad()
        finals.append(model.state_dict())
    assert all(torch.equal(v, finals[1][k]) for k, v in finals[0].items())


def alternate(plan: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = zerofx.compile(Pair(), {**FINE, "bucket_bytes": 0, "stage": 3, **plan})
    parts = [model.made, model.judge]
    optimizers = [zerofx.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    for step in range(6):
        for number, part in enumerate(parts):
            part.requires_grad_(number == step % 2)
        optimizers[step % 2].zero_grad()
        model(torch.full((2, 4), 0.1 * step)).backward()
        optimizers[step % 2].step()
    return values(model)


def test_two_parts_in_turn() -> None:
    step, early = alternate({}), alternate({"update": "in-backward"})
    assert all(torch.equal(v, early[k]) for k, v in step.items())
