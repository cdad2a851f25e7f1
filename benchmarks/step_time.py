"""Step time and CPU seconds compared with FSDP2 and DDP, as ratios from interleaved rounds.

    python -m benchmarks.step_time            # every size, 8 rounds
    python -m benchmarks.step_time --quick --sizes 4x128 --systems zerofx-3,ddp

Every system has its own processes (gloo, one thread each), which sleep while another runs its
round. A ratio is taken within a round, to FSDP2 in the same round (in the same precision); the
table shows medians over rounds. On one host zerofx's ranks copy from each other's memory, and their
heap is kept: "zerofx-3-gloo" sends over gloo as the peers do, and "-heap" is a peer whose heap is
kept too. Before a system counts, its losses are compared with FSDP2's, step by step.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks import sizes, systems
from benchmarks.pool import Group
from benchmarks.report import Column, as_named, finish, need_memory
from benchmarks.sizes import SIZES, Size, make_batches
from benchmarks.systems import SYSTEMS, Trainer

AGREEMENT = 0.15  # CPU-seconds ratio within this of the step-time ratio
BYTES_PER_PARAM = 24  # weights, gradients, two states, gathered copies: a bound for one rank
NUM_BATCHES = 16  # created before the clock starts, then used in turn
WARMUP_STEPS = 2
QUICK_ROUNDS, QUICK_PART = 3, 3
DEFAULT = ["zerofx-3", "zerofx-0", "ddp", "nocomm", "zerofx-3-gloo", "fsdp2-heap", "ddp-heap"]
# targets for stage 3, as a fraction of FSDP2's step time
TARGETS = {
    "zerofx-3": {"4x32": 0.20, "4x128": 0.57, "8x384": 0.72, "4x1024": 0.50},
    "zerofx-3-bf16": {"8x384": 0.85},
}


class Job:
    """Job of a worker: rounds of steps of one system at one size."""

    def __init__(self, system: str, size: str, batch: int) -> None:
        self._trainer = Trainer(system, SIZES[size].model)
        batches = make_batches(size, batch, self._trainer.rank, self._trainer.ranks)
        self._batches = [batches.at(step) for step in range(NUM_BATCHES)]
        self._done = 0

    def steps(self, count: int) -> dict[str, Any]:
        """Run `count` steps after an untimed one; report seconds, page faults and all losses."""
        losses = [self._step()]  # the caches held another system; this also synchronises the ranks
        faults = _faults()
        cpu, wall = time.process_time(), time.perf_counter()
        losses += [self._step() for _ in range(count)]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"wall_s": wall, "cpu_s": cpu, "faults": _faults() - faults, "losses": losses}

    def _step(self) -> float:
        batch = self._batches[self._done % NUM_BATCHES]
        self._done += 1
        return self._trainer.step(*batch)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@dataclass
class Rounds:
    """All rounds of one system at one size, per step: seconds, CPU seconds, page faults."""

    wall_s: list[float]
    cpu_s: list[float]
    faults: list[float]
    losses: list[list[float]]  # [rank][step]

    def add(self, answers: list[dict[str, Any]], steps: int) -> None:
        """Add a round: the slowest rank's time, the sum of the ranks' CPU seconds."""
        self.wall_s.append(max(a["wall_s"] for a in answers) / steps)
        self.cpu_s.append(sum(a["cpu_s"] for a in answers) / steps)
        self.faults.append(sum(a["faults"] for a in answers) / steps / len(answers))
        self.add_losses(answers)

    def add_losses(self, answers: list[dict[str, Any]]) -> None:
        """Add only the losses, of warm-up steps."""
        for kept, answer in zip(self.losses, answers, strict=True):
            kept.extend(answer["losses"])


def start(
    system: str, name: str, batch: int, ranks: int, python: str = sys.executable
) -> tuple[Group, Rounds]:
    """Start the processes of a system, wait until they can train, and warm them up."""
    args = {"system": system, "size": name, "batch": batch}
    group = Group(system, "benchmarks.step_time:Job", args, ranks, SYSTEMS[system].env, python)
    rounds = Rounds([], [], [], [[] for _ in range(ranks)])
    try:
        group.ready()
        rounds.add_losses(group.call("steps", count=WARMUP_STEPS))
    except BaseException:
        group.close()
        raise
    return group, rounds


def interleave(groups: dict[str, Group], data: dict[str, Rounds], steps: int, rounds: int) -> None:
    """Run all systems in turn, `rounds` times, starting with the next one each time."""
    names = list(groups)
    for number in range(rounds):
        first = number % len(names)
        for system in names[first:] + names[:first]:
            data[system].add(groups[system].call("steps", count=steps), steps)


def measure(name: str, size: Size, names: list[str], rounds: int, ranks: int) -> dict[str, Rounds]:
    """Start all systems and time them in interleaved rounds."""
    with ExitStack() as stack:
        groups, data = {}, {}
        for system in names:
            groups[system], data[system] = start(system, name, size.batch, ranks)
            stack.enter_context(groups[system])
        interleave(groups, data, size.steps, rounds)
    return data


def loss_error(
    mine: list[list[float]], baseline: list[list[float]], communicates: bool = True
) -> float:
    """Return the largest relative difference of any rank's loss at any step; both [rank][step].

    Without communication, the ranks train separately, so only their first loss can agree.
    """
    last = None if communicates else 1
    return max(
        abs(a - b) / abs(b)
        for my_rank, its_rank in zip(mine, baseline, strict=True)
        for a, b in zip(my_rank[:last], its_rank[:last], strict=True)
    )


def result(name: str, system: str, mine: Rounds, baseline: Rounds) -> dict[str, Any]:
    """Return one system's line; refuse one whose losses differ from its baseline's."""
    kind = SYSTEMS[system]
    error = loss_error(mine.losses, baseline.losses, kind.communicates)
    if not error <= kind.loss_tolerance:
        raise SystemExit(
            f"{system} at {name}: losses differ from {kind.baseline}'s by {error:.1e} relative, "
            f"more than {kind.loss_tolerance:.0e}; its times would belong to a different training"
        )
    times = [a / b for a, b in zip(mine.wall_s, baseline.wall_s, strict=True)]
    cpus = [a / b for a, b in zip(mine.cpu_s, baseline.cpu_s, strict=True)]
    time_ratio, cpu_ratio = statistics.median(times), statistics.median(cpus)
    return {
        "size": name,
        "system": system,
        "time_ratio": time_ratio,
        "cpu_ratio": cpu_ratio,
        "agree": abs(cpu_ratio / time_ratio - 1) <= AGREEMENT,
        "low": min(times),
        "high": max(times),
        "step_ms": statistics.median(mine.wall_s) * 1e3,
        "cpu_ms": statistics.median(mine.cpu_s) * 1e3,
        "faults": statistics.median(mine.faults),
        "loss_error": error,
        "target": TARGETS.get(system, {}).get(name),
        "baseline": kind.baseline,
        "rounds": {"wall_s": mine.wall_s, "cpu_s": mine.cpu_s, "faults": mine.faults},
    }


COLUMNS = [
    *as_named("size", "system"),
    Column("baseline", "against"),
    Column("time_ratio", "time ratio", "{:.2f}"),
    Column("target", "target", "{:.2f}"),
    Column("cpu_ratio", "CPU s ratio", "{:.2f}"),
    Column("agree", "CPU s and time agree"),
    Column("low", "lowest", "{:.2f}"),
    Column("high", "highest", "{:.2f}"),
    Column("step_ms", "step ms", "{:.1f}"),
    Column("cpu_ms", "CPU ms, all ranks", "{:.1f}"),
    Column("faults", "faults / step", "{:.0f}"),
    Column("loss_error", "loss error", "{:.0e}"),
]


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    systems.add_options(parser, DEFAULT)
    sizes.add_options(parser, ",".join(SIZES))
    parser.add_argument("--rounds", type=int, default=8, help="a claim needs 8 or more")
    parser.add_argument("--quick", action="store_true", help="3 short rounds, for a look only")
    options = parser.parse_args()
    names, lines = systems.chosen(options), []
    if options.quick:
        options.rounds = QUICK_ROUNDS
    for name, size in sizes.chosen(options).items():
        need_memory(size.num_params * BYTES_PER_PARAM * options.ranks * len(names))
        if options.quick:
            size = Size(size.model, size.batch, max(1, size.steps // QUICK_PART))
        data = measure(name, size, names, options.rounds, options.ranks)
        lines += [result(name, s, mine, data[SYSTEMS[s].baseline]) for s, mine in data.items()]
    finish("step_time", COLUMNS, lines, options)


if __name__ == "__main__":
    main()
