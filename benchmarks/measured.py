"""A steady training step of one rank, measured by its allocator, with the prediction."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerofx
from zerofx.hardware import Hardware
from zerofx.ir.program import Loop
from zerofx.layout.tiers import Tier
from zerofx.tools.demo.measure import Peak, PeakMemory

MEASURED = 2  # earlier steps create lasting states; the next step frees the rest
Forward = Callable[[nn.Module, int], Tensor]  # (model, number of the batch) -> the loss


def step(
    model: Any, optimizer: torch.optim.Optimizer, forward: Forward, number: int, loop: Loop
) -> None:
    """Train one step, of as many micro-batches as the loop has."""
    for micro in range(loop.accumulation):
        is_last = micro == loop.accumulation - 1
        with model.no_sync() if loop.no_sync and not is_last else nullcontext():
            forward(model, number * loop.accumulation + micro).backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Trained:
    """A model in its steady state, and the peak of one whole step there."""

    model: zerofx.CompiledModule
    optimizer: torch.optim.Optimizer
    peak: Peak

    @property
    def host_bytes(self) -> int:
        """Bytes on the host: places for values in transfer, and shards that live there."""
        engine = self.model._engine
        store, layout = engine.store, engine.store.layout
        found, owners = int(engine.host.nbytes), set()
        for bucket in layout.buckets:
            if bucket.home is not Tier.HOST:
                continue
            found += store.shards[bucket.index].nbytes
            block = store.grads.shards.get(layout.block_of[bucket.index])
            if block is not None:
                found += layout.part(block.flat, bucket.index).nbytes
            owners |= {bucket.tile.name} if bucket.tile is not None else set(bucket.names)
        states = [self.optimizer.state.get(store.params.get(name), {}) for name in owners]
        return found + sum(_local(v).nbytes for s in states for k, v in s.items() if k != "step")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(
    build: Callable[[], nn.Module],
    forward: Forward,
    plan: dict[str, Any],
    device: str = "cpu",
    machine: Hardware | None = None,
    loop: Loop | None = None,
    before_step: Callable[[zerofx.CompiledModule], object] | None = None,
) -> Trained:
    """Train some steps with AdamW on this rank, and measure one in the steady state.

    before_step: called before each step, so that counters can be read.
    """
    gc.collect()
    torch.manual_seed(0)
    on = torch.device(device)
    how = loop or Loop()
    first = zerofx.compile(build(), plan, device=on, machine=machine)
    forward(first, 0)
    if how.accumulation > 1:  # which may change the program
        step(first, torch.optim.SGD(first.parameters(), lr=0.0), forward, 0, how)
    programs = first._programs.known
    del first
    with PeakMemory(on) as memory:  # observes the model from its first allocation on
        model = zerofx.compile(build(), plan, device=on, machine=machine)
        # otherwise capture's operators would be profiled too, which is slow
        model._programs.known.update(programs)
        # states that torch's own optimizer creates on the host would count as a CPU device's
        is_away = plan.get("offload", {}).get("optimizer", "none") != "none"
        if plan.get("update") == "in-backward" or is_away:
            optimizer: torch.optim.Optimizer = zerofx.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for number in range(MEASURED + 2):
            if before_step is not None:
                before_step(model)
            with memory.step() if number == MEASURED else nullcontext():
                step(model, optimizer, forward, number, how)
    return Trained(model, optimizer, memory.steps[0])
