"""Probes of the overhead of a compiled call: programs with almost no work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import zerofx
from zerofx import optim
from zerofx.ir.graphs import regions
from zerofx.ir.program import BACKWARD, FORWARD

BLOCKS = (2, 10)
WIDTH = 8
STEPS = 20
STEP = "step"


class Chain(nn.Module):
    """Blocks of one linear each, so that each is a region."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.sum()


class Calls:
    """Training steps of one chain: forward, backward and step are timed apart."""

    def __init__(self, blocks: int, world: int) -> None:
        torch.manual_seed(0)
        self._model = zerofx.compile(Chain(blocks), {"stage": 0, "kernels": "aten"}, device="cpu")
        self._optimizer = optim.AdamW(self._model.parameters())
        self._x = torch.ones(4, WIDTH)
        self._found: dict[str, list[float]] = {FORWARD: [], BACKWARD: [], STEP: []}
        self._world = world

    def measure(self) -> None:
        """Train some steps, and note the times of their parts."""
        for _ in range(STEPS):
            began = time.perf_counter()
            loss = self._model(self._x)
            called = time.perf_counter()
            loss.backward()
            differentiated = time.perf_counter()
            self._optimizer.step()
            stepped = time.perf_counter()
            self._optimizer.zero_grad()
            self._found[FORWARD].append(called - began)
            self._found[BACKWARD].append(differentiated - called)
            self._found[STEP].append(stepped - differentiated)

    def points(self) -> Iterator[tuple[str, float, float]]:
        """Yield (curve, x, us) for each measurement."""
        program = self._model.programs[0]
        for graph, found in self._found.items():
            parameters = len(list(self._model.parameters()))
            num = parameters if graph == STEP else len(regions(program.graph(graph)))
            yield f"call.{graph}.{self._world}", num, 1e6 * statistics.median(found)
