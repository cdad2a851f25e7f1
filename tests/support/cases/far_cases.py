"""Models of which something lives on NVMe, beside the same models on the device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from models import CASES
from optim_cases import mixed_batch, mixed_groups, mixed_model, ours
from torch import Tensor, nn
from training import loss_of
from update_cases import Pair

import zerofx

FINE = {"kernels": "aten", "bucket_bytes": 2000, "persist_below": 200}


def rank_here() -> int:
    return int(os.environ.get("RANK", "0"))


def tiers(folder: str, optimizer: str = "nvme", parameters: str = "nvme", **more: Any) -> Any:
    """Return a plan's offload; it has a path only where something lies there."""
    offload = {"optimizer": optimizer, "parameters": parameters, **more}
    if "nvme" in offload.values():
        offload["path"] = folder
    return {"offload": offload}


def far(folder: Any, case: str = "gpt", optimizer: str = "adamw", **plan: Any) -> tuple[Any, Any]:
    """Return (model, optimizer); all of it on NVMe unless the plan says where."""
    place = {} if "offload" in plan else tiers(str(folder))
    return made(case, optimizer, {**place, **plan})


_KNOWN: dict[str, dict[Any, Any]] = {}  # what was compiled, by case and plan


def made(case: str, optimizer: str, plan: dict[str, Any]) -> tuple[Any, Any]:
    """Return a compiled case, with what its like has compiled before, and its optimizer."""
    own = {"mixed": mixed_model, "half": _half_frozen}
    model = own[case]() if case in own else CASES[case].make()
    model = zerofx.compile(model, {**FINE, "stage": 3, **plan})
    model._programs.known = _KNOWN.setdefault(f"{case} {plan}", model._programs.known)
    model._engine.slots.poison = model._engine.host.poison = True
    groups = mixed_groups(model) if case == "mixed" else model.parameters()
    return model, ours(optimizer, groups)


def _half_frozen() -> nn.Module:
    torch.manual_seed(0)
    model = Pair()
    model.judge.requires_grad_(False)
    return model


def batch_loss(model: Any, case: str, step: int) -> Tensor:
    """Call the model on what this rank has of a step."""
    if case == "mixed":
        return model(*mixed_batch(step, rank_here()))
    if case == "half":
        return model(torch.full((2, 4), 0.1 * step + rank_here()))
    args, kwargs = CASES[case].batch(10 * step + rank_here())
    return loss_of(model(*args, **kwargs))


def train(model: Any, optimizer: Any, case: str, first: int = 0, last: int = 3) -> list[float]:
    """Step from `first` to `last`; return losses."""
    losses = []
    for step in range(first, last):
        loss = batch_loss(model, case, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@dataclass(frozen=True)
class Loop:
    """What the loop does, whatever the plan.

    clip: "function" or "optimizer": who clips.
    """

    optimizer: str = "adamw"
    accumulation: int = 1
    clip: str = ""
    steps: int = 3


def trained(case: str, plan: dict[str, Any], loop: Loop) -> dict[str, Any]:
    """Train, looking at nothing on the way; return losses, parameters and states by name."""
    model, optimizer = made(case, loop.optimizer, plan)
    if loop.clip == "optimizer":
        optimizer.max_grad_norm = 0.1
    found: dict[str, Any] = {}
    for step in range(loop.steps):
        for micro in range(loop.accumulation):
            loss = batch_loss(model, case, step * loop.accumulation + micro)
            loss.backward()
            found[f"loss {step}.{micro}"] = loss.detach()
        if loop.clip == "function":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            found[f"norm {step}"] = norm.clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | everything(model, optimizer)


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return parameters, buffers and this rank's states, by name."""
    found = dict(model.state_dict())
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            local = getattr(value, "to_local", lambda value=value: value)()
            found[f"{name}.{key}"] = local.clone()
    return found


def unequal(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of what differs in a bit."""
    both = found.keys() & expected.keys()
    return sorted(found.keys() ^ expected.keys()) + [
        k for k in both if not same(found, expected, k)
    ]


def same(found: dict[str, Any], expected: dict[str, Any], key: str) -> bool:
    a, b = found[key], expected[key]
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b
