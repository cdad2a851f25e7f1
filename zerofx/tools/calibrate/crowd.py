"""A probe of how ranks of a node slow each other down: a small model's steps on all at once.

A product that fits the caches hardly slows another one down on the next core. The steps of a model
pass tens of megabytes through the caches and compete for memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zerofx.tools.calibrate.probe import Probe, Work

LAYERS, WIDTH, ROWS = 4, 256, 512


class Block(nn.Module):
    """A norm, two products with a GELU between them, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def crowds(ranks: int) -> list[Probe]:
    """Return the forward and backward of a small model, one of this many that run at once."""
    return [Probe("crowd", ranks, 1, _step, calls=1)]


def _step() -> Work:
    model, x = nn.Sequential(*(Block() for _ in range(LAYERS))), torch.randn(ROWS, WIDTH)

    def work() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return work
