"""Small models with large linears, what tiling makes of them, and whether it is the same."""

from __future__ import annotations

from typing import Any

import torch
from oracle import State, execute
from torch import Tensor, nn

import zerofx
from zerofx.ir.program import Planned, Program
from zerofx.plan.plan import Plan


class Pair(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).mean()


def pair(tiling: Any, world: int = 2, model: nn.Module | None = None, **plan: Any) -> Planned:
    """Return the whole pipeline's program of a small MLP."""
    program = zerofx.capture(model or Pair(), (torch.randn(8, 64),), {})
    return zerofx.rewrite(program, Plan(tiling=tiling, **plan), world)


def assert_same(before: Program, after: Planned, state: State) -> None:
    """Hold results and gradients against those of the program without tiles."""
    expected, got = execute([before] * 2, state), execute([after] * 2, state)
    for a, b in zip(expected, got, strict=True):
        for key, value in a.results.items():
            torch.testing.assert_close(b.results[key], value, rtol=1e-5, atol=1e-6)
        for name, grad in a.gradients.items():
            torch.testing.assert_close(b.gradients[name], grad, rtol=1e-5, atol=1e-6)


class Normed(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up.weight.norm()
