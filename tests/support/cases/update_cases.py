"""What the tests of Plan(update="in-backward") share: its plans, small models, looks at values."""

from __future__ import annotations

import os
from typing import Any

import torch
from optim_cases import mixed_batch, mixed_groups, mixed_model, ours
from torch import Tensor, nn

import zerofx

FINE = {"kernels": "aten", "bucket_bytes": 2000, "persist_below": 200}
EARLY = {**FINE, "update": "in-backward"}


def rank_here() -> int:
    return int(os.environ.get("RANK", "0"))


def simple(plan: dict[str, Any] = EARLY, **options: Any) -> tuple[Any, Any, list[Tensor]]:
    """Return a compiled model, its AdamW and a batch."""
    model = zerofx.compile(mixed_model(), {"stage": 3, **plan})
    return model, ours("adamw", mixed_groups(model), **options), list(mixed_batch(0, 0))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def is_unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Pair(nn.Module):
    """Two parts, of which a loss trains one or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.made(x).tanh()).square().mean()
