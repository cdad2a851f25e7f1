"""CPU time per step of eight small models on one rank: zerofx, eager PyTorch, torch.compile.

    python -m benchmarks.one_process                                  # "aten" against eager
    python -m benchmarks.one_process --systems eager,aten,torch.compile,inductor --models mnist

Each system of a model has a process of its own, with one thread, which sleeps while another one
runs. They take turns, some steps each, with a turn of eager between any two. Each turn's CPU
seconds per step are divided by the mean of the eager turns before and after it, since the machine
drifts; the ratios are medians, with quartiles. The second eager process, "again", shows what the
machine adds. "eager kept heap" is eager PyTorch with the settings of glibc that zerofx makes
(`zerofx/process.py`). "auto" is measured after its swap. Losses of the first step must agree to
1e-4, where a model draws no random numbers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.pool import Group
from benchmarks.report import Column, finish
from benchmarks.small_models import SMALL
from benchmarks.systems import KEEP_HEAP

SYSTEMS = ("eager", "again", "eager kept heap", "aten", "auto", "inductor", "torch.compile")
DRAWS = ("vae", "mnist")  # random numbers of a compiled model are not those of an eager one
AGREEMENT, WARMUP, SWAP_LIMIT_S = 1e-4, 8, 600.0


class Job:
    """One system's model, optimizer and batch, in a process of its own."""

    def __init__(self, system: str, model: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model: Any = SMALL[model].build()
        self._args = SMALL[model].batch()
        if system == "torch.compile":
            self._model = torch.compile(self._model)
        elif not system.startswith(("eager", "again")):
            import zerofx  # imported here, so that the peers' processes do not import it

            self._model = zerofx.compile(self._model, {"kernels": system}, device="cpu")
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)

    def steps(self, count: int) -> tuple[float, float, float]:
        """Return the CPU and wall seconds of a step, and the last loss."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            loss = self._model(*self._args)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return cpu / count, wall / count, float(loss.detach())

    def swap(self, limit_s: float) -> None:
        """Train until "auto" has swapped its compiled regions in."""
        names, began = getattr(self._model, "zerofx", None), time.perf_counter()
        while names is not None and any(each.state for each in names.kernels):
            self.steps(1)
            if time.perf_counter() - began > limit_s:
                raise TimeoutError(f"no compiled regions after {limit_s:.0f} s: {names.kernels}")

    def turn(self, count: int) -> tuple[float, float, float]:
        """Return the same after an untimed step: the caches held another process's memory."""
        self.steps(1)
        return self.steps(count)


def run(name: str, systems: list[str], turns: int, seconds: float) -> list[dict[str, Any]]:
    """Return a line for each system of one model."""
    with ExitStack() as stack:
        groups = {}
        for system in systems:
            args, kept = {"system": system, "model": name}, "kept heap" in system
            groups[system] = stack.enter_context(
                Group(system, "benchmarks.one_process:Job", args, 1, KEEP_HEAP if kept else {})
            )
            groups[system].ready()
        return _by_turns(name, groups, turns, seconds)


def _by_turns(
    name: str, groups: dict[str, Group], turns: int, seconds: float
) -> list[dict[str, Any]]:
    """Let the processes take turns; return a line for each."""
    losses = {system: group.call("steps", count=1)[0][2] for system, group in groups.items()}
    expected = losses["eager"]
    if name not in DRAWS and any(
        abs(x - expected) > AGREEMENT * abs(expected) for x in losses.values()
    ):
        raise ValueError(f"{name}: the first losses are {losses}")
    for group in groups.values():
        group.call("swap", limit_s=SWAP_LIMIT_S)
        group.call("steps", count=WARMUP)
    count = max(round(seconds / groups["eager"].call("steps", count=2)[0][1]), 1)
    taken: dict[str, list[tuple[float, float]]] = {s: [] for s in groups}
    ratios: dict[str, list[float]] = {s: [] for s in groups}

    def turn_of(system: str) -> float:
        cpu, wall, _ = groups[system].call("turn", count=count)[0]
        taken[system].append((cpu, wall))
        return float(cpu)

    others = [s for s in groups if s != "eager"]
    before = turn_of("eager")
    for turn in range(turns):
        for k in range(len(others)):
            system = others[(turn + k) % len(others)]
            mine, after = turn_of(system), turn_of("eager")
            ratios[system].append(2 * mine / (before + after))
            ratios["eager"].append(after / before)
            before = after
    lines = []
    for system in groups:
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
    default = "eager,again,eager kept heap,aten"
    parser.add_argument("--systems", default=default, help=", ".join(SYSTEMS))
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
    lines: list[dict[str, Any]] = []
    for name in options.models.split(","):
        lines += run(name, systems, options.turns, options.seconds)
        for line in lines[-len(systems) :]:
            print(f"{name} {line['system']}: {line['ratio']:.3f}", flush=True)
    finish("one_process", COLUMNS, lines, options)


if __name__ == "__main__":
    main()
