"""What ranks side by side take from each other: steps of a small model, on one and on each at once.

Alone in its caches, a product hardly notices another on the next core; the steps of a model, which
pass tens of megabytes through the caches, share what lies behind them.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.calibrate.probe import Probe, Work
from zerofx.runtime.world import World

LAYERS, WIDTH, ROWS = 4, 256, 512
STEPS = 3


class Block(nn.Module):
    """A norm and two products with a gelu between, and what came in added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Crowd:
    """Steps of a model of rank 0 while the others wait, and while they do the same."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps = Probe("crowd", world.size, 0, _step, calls=STEPS)
        self._steps.prepare()
        self._found: list[float] = []

    def measure(self) -> None:
        """Note how many times longer the steps take beside those of the other ranks."""
        alone_s = self._steps.run() if self._world.rank == 0 else 0.0
        self._world.all_reduce(torch.zeros(1)).wait()
        together_s = self._steps.run()
        if alone_s:
            self._found.append(together_s / alone_s)

    def points(self) -> list[list[Any]]:
        """Return (curve, x, value) of what rank 0 found."""
        return [["crowd", 1, 1.0], ["crowd", self._world.size, statistics.median(self._found)]]


def _step() -> Work:
    model, x = nn.Sequential(*(Block() for _ in range(LAYERS))), torch.randn(ROWS, WIDTH)

    def work() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return work
