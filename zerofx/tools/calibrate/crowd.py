"""A probe of how ranks of a node slow each other down: a small model's steps on all at once.

A product that fits the caches hardly slows another one down on the next core. The steps of a model
pass tens of megabytes through the caches and compete for memory.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor, nn

from zerofx.comm.world import World
from zerofx.tools.calibrate.probe import Probe, Work

LAYERS, WIDTH, ROWS = 4, 256, 512
STEPS = 2


class Block(nn.Module):
    """A norm, two products with a GELU between them, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Crowd:
    """The small model's step on all ranks at once, and right after it on rank 0 alone.

    A machine that others use is faster in one minute than in another, so that only times of the
    same moment can be compared.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._together = Probe("crowd", world.size, 1, pace_step, calls=STEPS)
        self._alone = Probe("crowd", 1, 1, pace_step, calls=STEPS)
        self._together.prepare()
        self._alone.prepare()

    def measure(self) -> None:
        """Note both; ranks that do not compute wait without using their core."""
        self._together.measure()
        if self._world.size == 1:
            return
        self._world.all_reduce(torch.zeros(1)).wait()
        if self._world.rank == 0:
            self._alone.measure()
        self._world.all_reduce(torch.zeros(1)).wait()

    def points(self) -> list[tuple[str, float, float]]:
        """Return how many times longer a step takes beside others; alone, its time in us."""
        if self._world.size == 1:
            return [("pace", 1.0, 1e6 * self._together.seconds)]
        if self._world.rank:
            return []
        pairs = zip(self._together.found_s, self._alone.found_s, strict=True)
        ratio = statistics.median(both / alone for both, alone in pairs)
        return [("crowd", 1.0, 1.0), ("crowd", float(self._world.size), ratio)]


def pace_step() -> Work:
    """Return the step of the small model."""
    model, x = nn.Sequential(*(Block() for _ in range(LAYERS))), torch.randn(ROWS, WIDTH)

    def work() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return work
