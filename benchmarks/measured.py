"""A steady training step of one rank, measured: what its allocator saw, beside the prediction."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from zerofx.demo.measure import Peak, PeakMemory
from zerofx.machine import Machine

STEPS = 3
Forward = Callable[[nn.Module, int], Tensor]  # (model, number of the batch) -> the loss


@dataclass(frozen=True)
class Loop:
    """How a training loop goes through one step.

    accumulation: micro-batches a step. no_sync: all of them but the last one under no_sync.
    """

    accumulation: int = 1
    no_sync: bool = False

    def step(
        self, model: Any, optimizer: torch.optim.Optimizer, forward: Forward, number: int
    ) -> None:
        """Train one step."""
        for micro in range(self.accumulation):
            is_last = micro == self.accumulation - 1
            with model.no_sync() if self.no_sync and not is_last else nullcontext():
                forward(model, number * self.accumulation + micro).backward()
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True)
class Trained:
    """A model in its steady state, and the peak of the last step on the way there."""

    model: zerofx.CompiledModule
    peak: Peak


def train(
    build: Callable[[], nn.Module],
    forward: Forward,
    plan: dict[str, Any],
    device: str = "cpu",
    machine: Machine | None = None,
    loop: Loop | None = None,
    before_step: Callable[[zerofx.CompiledModule], object] | None = None,
) -> Trained:
    """Train for some steps with AdamW on this rank, and measure the last one.

    before_step: called before each step, so that counters can be read.
    """
    gc.collect()
    torch.manual_seed(0)
    on = torch.device(device)
    first = zerofx.compile(build(), plan, device=on, machine=machine)
    forward(first, 0)
    programs = first._programs.known
    del first
    with PeakMemory(on) as memory:  # sees the model from its first allocation on
        model = zerofx.compile(build(), plan, device=on, machine=machine)
        # else capture's operators would be profiled too, which is slow
        model._programs.known.update(programs)
        if plan.get("update") == "in-backward":
            optimizer: torch.optim.Optimizer = zerofx.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for number in range(STEPS):
            if before_step is not None:
                before_step(model)
            with memory.step():
                (loop or Loop()).step(model, optimizer, forward, number)
    return Trained(model, memory.steps[-1])
