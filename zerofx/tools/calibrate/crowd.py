"""A probe of what ranks side by side take from each other: steps of a small model, on each at once.

Alone in its caches, a product hardly notices another on the next core; the steps of a model, which
pass tens of megabytes through the caches, share what lies behind them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zerofx.tools.calibrate.probe import Probe, Work

LAYERS, WIDTH, ROWS = 4, 256, 512


class Block(nn.Module):
    """A norm and two products with a gelu between, and what came in added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def crowds(ranks: int) -> list[Probe]:
    """Return the forward and backward of a small model, one of so many at once."""
    return [Probe("crowd", ranks, 1, _step, calls=1)]


def _step() -> Work:
    model, x = nn.Sequential(*(Block() for _ in range(LAYERS))), torch.randn(ROWS, WIDTH)

    def work() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return work
