"""Two systems that take turns on the same ranks, step by step, and are compared in pairs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from zerofx.tools.demo.measure import PeakMemory

WARMUP = 3  # steps that are not measured


class Steps(Protocol):
    """One system's model and optimizer."""

    def step(self, number: int) -> float:
        """Train one step; return its loss."""
        ...


_S = TypeVar("_S", bound=Steps)


def join(rank: int, folder: str, job: str, world_size: int = 2) -> None:
    """Make this process one of the ranks over gloo, with one thread."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{job}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def compare(trainees: Mapping[str, Steps], turns: int, agreement: float) -> dict[str, float]:
    """Train both in turns; return the first one's median step (ms) and ratios to the second.

    Args:
        trainees: the measured system, then its peer, by name
        turns: measured steps of each
        agreement: the maximum relative difference of their losses

    Raises:
        ValueError: their losses differ by more.
    """
    ours, peer = trainees
    taken: dict[str, list[tuple[float, float]]] = {system: [] for system in trainees}
    for number in range(WARMUP + turns):
        losses = {}
        for system in trainees if number % 2 else reversed(list(trainees)):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            losses[system] = trainees[system].step(number)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if number >= WARMUP:
                taken[system].append((wall, cpu))
        if abs(losses[ours] - losses[peer]) > agreement * abs(losses[peer]):
            raise ValueError(f"step {number} has the losses {losses}")
    pairs = list(zip(taken[ours], taken[peer], strict=True))
    return {
        "wall_ms": 1e3 * statistics.median(a[0] for a, _ in pairs),
        "wall": statistics.median(a[0] / b[0] for a, b in pairs),
        "cpu": statistics.median(a[1] / b[1] for a, b in pairs),
    }


def peak_bytes(make: Callable[[], _S]) -> tuple[_S, int]:
    """Return the result of `make`, and the peak bytes of its first step after the warm-up."""
    with PeakMemory(torch.device("cpu")) as memory:
        trainee = make()
        for number in range(WARMUP):
            trainee.step(number)
        with memory.step():
            trainee.step(WARMUP)
    return trainee, memory.steps[0].high_bytes
