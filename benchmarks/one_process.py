"""CPU time per step of eight small models in one process: zerofx, eager PyTorch, torch.compile.

    python -m benchmarks.one_process                                  # "aten" against eager
    python -m benchmarks.one_process --systems eager,aten,torch.compile,inductor --models mnist

All systems of a model are in one process, with one thread, and take turns, some steps each, with a
turn of eager between any two. Each turn's CPU seconds per step are divided by the mean of the
eager turns before and after it, since the machine drifts; the ratios are medians, with quartiles.
The second eager model, "again", shows what the machine adds. Losses of the first step must agree to
1e-4, where a model draws no random numbers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from torch import nn

import zerofx
from benchmarks.report import Column, finish
from benchmarks.small_models import SMALL

SYSTEMS = ("eager", "again", "aten", "inductor", "torch.compile")
DRAWS = ("vae", "mnist")  # random numbers of a compiled model are not those of an eager one
AGREEMENT, WARMUP = 1e-4, 3


class Trainee:
    """One system's model, optimizer and batch."""

    def __init__(self, system: str, plain: nn.Module, args: tuple[Any, ...]) -> None:
        self.model: Any = plain
        if system == "torch.compile":
            self.model = torch.compile(plain)
        elif system not in ("eager", "again"):
            self.model = zerofx.compile(plain, {"kernels": system}, device="cpu")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.args = args

    def steps(self, count: int) -> tuple[float, float, float]:
        """Return the CPU and wall seconds of a step, and the last loss."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            loss = self.model(*self.args)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return cpu / count, wall / count, float(loss.detach())


def run(name: str, systems: list[str], turns: int, seconds: float) -> list[dict[str, Any]]:
    """Return a line for each system of one model."""
    torch.manual_seed(0)
    plain, args = SMALL[name].build(), SMALL[name].batch()
    trainees = {s: Trainee(s, copy.deepcopy(plain), args) for s in systems}
    losses = {s: trainee.steps(1)[2] for s, trainee in trainees.items()}
    expected = losses["eager"]
    if name not in DRAWS and any(
        abs(x - expected) > AGREEMENT * abs(expected) for x in losses.values()
    ):
        raise ValueError(f"{name}: the first losses are {losses}")
    for trainee in trainees.values():
        trainee.steps(WARMUP)
    count = max(round(seconds / trainees["eager"].steps(2)[1]), 1)
    taken: dict[str, list[tuple[float, float]]] = {s: [] for s in systems}
    ratios: dict[str, list[float]] = {s: [] for s in systems}

    def turn_of(system: str) -> float:
        trainees[system].steps(1)  # the caches held another model
        taken[system].append(trainees[system].steps(count)[:2])
        return taken[system][-1][0]

    others = [s for s in systems if s != "eager"]
    before = turn_of("eager")
    for turn in range(turns):
        for k in range(len(others)):
            system = others[(turn + k) % len(others)]
            mine, after = turn_of(system), turn_of("eager")
            ratios[system].append(2 * mine / (before + after))
            ratios["eager"].append(after / before)
            before = after
    lines = []
    for system in systems:
        low, middle, high = statistics.quantiles(ratios[system], n=4)
        lines.append(
            {
                "model": name, "system": system, "steps": count,
                "cpu_ms": 1e3 * statistics.median(cpu for cpu, _ in taken[system]),
                "wall_ms": 1e3 * statistics.median(wall for _, wall in taken[system]),
                "low": low, "ratio": middle, "high": high,
            }
        )  # fmt: skip
    return lines


COLUMNS = [
    Column("model", "model"),
    Column("system", "system"),
    Column("cpu_ms", "CPU ms", "{:.1f}"),
    Column("wall_ms", "ms", "{:.1f}"),
    Column("ratio", "x eager", "{:.3f}"),
    Column("low", "from", "{:.3f}"),
    Column("high", "to", "{:.3f}"),
]


def main() -> None:
    """Measure what the command line chooses, show it and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", default="eager,again,aten", help=", ".join(SYSTEMS))
    parser.add_argument("--models", default=",".join(SMALL), help=", ".join(SMALL))
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=0.3, help="of eager steps in a turn")
    options = parser.parse_args()
    for name, known in (("systems", SYSTEMS), ("models", tuple(SMALL))):
        chosen = getattr(options, name).split(",")
        if not set(chosen) <= set(known):
            parser.error(f"--{name} {','.join(chosen)}: known are {', '.join(known)}")
    systems = options.systems.split(",")
    if "eager" not in systems or len(systems) == 1:
        parser.error(f"--systems {options.systems}: name eager, to which ratios are, and another")
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for name in options.models.split(","):
        lines += run(name, systems, options.turns, options.seconds)
        for line in lines[-len(systems) :]:
            print(f"{name} {line['system']}: {line['ratio']:.3f}", flush=True)
    finish("one_process", COLUMNS, lines, options)


if __name__ == "__main__":
    main()
