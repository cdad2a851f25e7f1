"""Training that goes on across folders of torch.distributed.checkpoint: zerofx and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from shard_cases import wholes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import zerofx

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "flat adamw": lambda p: zerofx.optim.AdamW(p, lr=1e-2),
    "flat sgd": lambda p: zerofx.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
}


class Net(nn.Module):
    """Matrices cut within rows, a convolution, tied weights, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 5, bias=False)  # a norm follows
        self.norm = nn.BatchNorm1d(3)
        self.up = nn.Linear(9, 33)
        self.again = nn.Linear(9, 33)
        self.again.weight = self.up.weight
        self.frozen = nn.Linear(33, 7).requires_grad_(False)
        self.down = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return self.down(self.frozen(self.up(y).tanh() + self.again(y))).pow(2).mean()


def make(kind: str, optimizer: str, scale: float = 1.0) -> tuple[Any, Any]:
    """Return (model, optimizer); a kind is "plain", "fsdp2" or "zerofx 3", with the stage."""
    torch.manual_seed(0)
    model: Any = Net()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(scale)
    if kind == "fsdp2":
        fully_shard(model)
    elif kind != "plain":
        model = zerofx.compile(model, {"stage": int(kind.split()[1]), "kernels": "aten"})
    return model, OPTIMIZERS[optimizer](model.parameters())


def step(model: Any, optimizer: Any, number: int) -> None:
    """Train on the same batch on every rank, so that the world size changes no gradient."""
    model(torch.randn(4, 2, 13, generator=torch.Generator().manual_seed(number))).backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: Any) -> dict[str, Tensor]:
    return {**wholes(model), **{n: b.clone() for n, b in model.named_buffers()}}


def train(kind: str, optimizer: str, first: int = 0, last: int = 3) -> dict[str, Tensor]:
    live = make(kind, optimizer)
    for number in range(first, last):
        step(*live, number)
    return state(live[0])


def pieces(model: Any, optimizer: Any, style: str) -> dict[str, Any]:
    """Return what a folder of either style holds: from `get_state_dict` or `sharded_state_dict`."""
    if style == "torch":
        held, states = get_state_dict(model, optimizer)
        return {"model": held, "optim": states}
    states = get_optimizer_state_dict(model, optimizer)
    return {"model": model.sharded_state_dict(), "optim": states}


def write(folder: str, kind: str, optimizers: list[str], style: str = "torch") -> None:
    """Train two steps with each optimizer and save both."""
    for number, optimizer in enumerate(optimizers):
        live = make(kind, optimizer)
        step(*live, 0)
        step(*live, 1)
        dcp.save(pieces(*live, style), checkpoint_id=f"{folder}/{number}")


def go_on(
    folder: str, kind: str, optimizers: list[str], style: str = "torch"
) -> list[dict[str, Tensor]]:
    """Load into other values and take the third step; return the states after it."""
    found = []
    for number, optimizer in enumerate(optimizers):
        model, live = make(kind, optimizer, scale=0.5)
        held = pieces(model, live, style)
        dcp.load(held, checkpoint_id=f"{folder}/{number}")
        if style == "torch":
            set_state_dict(
                model, live, model_state_dict=held["model"], optim_state_dict=held["optim"]
            )
        else:
            set_optimizer_state_dict(model, live, held["optim"])
        step(model, live, 2)
        found.append(state(model))
    return found
