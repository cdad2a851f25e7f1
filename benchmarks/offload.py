"""Offload compared with that of other systems: step time and CPU seconds, in interleaved rounds.

    python -m benchmarks.offload                       # without the peers that need an environment
    python -m benchmarks.offload --deepspeed-python PATH --torchao-python PATH

benchmarks/peers.py describes how to create those environments. A peer without one, or that cannot
run on this machine, is left out with the reason. Everything runs on the CPU, with one thread per
rank. zerofx's device tier is a separate pool. DeepSpeed's states and shards are next to the memory
that it computes with. FSDP2's offload does nothing, because its shards are on the host anyway.

Before anything is timed, the losses of every system are compared with those of plain training in
one process, whose gradients are the mean over the ranks' batches. Ratios are taken within a round,
to FSDP2 without offload, and to DeepSpeed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks import peers, sizes, systems
from benchmarks.pool import Group, WorkerError
from benchmarks.report import Column, finish, need_memory
from benchmarks.sizes import SIZES, Size, make_batches
from benchmarks.step_time import (
    BYTES_PER_PARAM,
    COLUMNS,
    WARMUP_STEPS,
    Rounds,
    interleave,
    loss_error,
    result,
    start,
)
from benchmarks.systems import BASELINE, SEED, SYSTEMS, fused_adamw
from zerofx.tools.demo.gpt import GPT

LOSS_TOLERANCE = 1e-5  # relative to plain training
CHECK_STEPS = 5
DEEPSPEED = "deepspeed-offload"
TARGET = 1.0  # of FSDP2's step time, for everything that zerofx offloads
DEFAULT = [
    "zerofx-3-flat", "zerofx-3-host-states", "zerofx-3-host", "zerofx-3-host-in-backward",
    "fsdp2-offload", DEEPSPEED, "torchao-offload",
]  # fmt: skip


def plain_losses(name: str, batch: int, ranks: int, steps: int) -> list[list[float]]:
    """Train without any system; return the losses [rank][step]."""
    torch.manual_seed(SEED)
    model = GPT(SIZES[name].model)
    optimizer = fused_adamw(model)
    batches = [make_batches(name, batch, rank, ranks) for rank in range(ranks)]
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(steps):
        for rank in range(ranks):
            loss = model(*batches[rank].at(step))
            (loss / ranks).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check(system: str, name: str, mine: Rounds, plain: list[list[float]]) -> None:
    """Refuse a system whose losses differ from those of plain training."""
    error = loss_error(mine.losses, plain, SYSTEMS[system].communicates)
    if not error <= LOSS_TOLERANCE:
        raise SystemExit(
            f"{system} at {name}: losses differ from plain training's by {error:.1e} relative, "
            f"more than {LOSS_TOLERANCE:.0e}; its times would belong to a different training"
        )


class Field:
    """The systems of one run: the participants, their interpreters, and why others are left out."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.names = systems.chosen(options)
        self.ranks = options.ranks
        self.versions: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self._pythons: dict[str, str] = {}
        for package in peers.PACKAGES:
            self._find(package, vars(options).pop(f"{package}_python"))

    def _find(self, package: str, python: str | None) -> None:
        """Look for a peer; a result file contains its version, not its path."""
        theirs = [name for name in self.names if SYSTEMS[name].package == package]
        if not theirs:
            return
        if python is None:
            return self._leave_out(theirs, f"no --{package}-python")
        try:
            self.versions[package] = peers.version(python, package)
        except (OSError, subprocess.CalledProcessError) as e:
            return self._leave_out(theirs, f"{python} has no {package}: {e}")
        self._pythons[package] = python

    def _leave_out(self, names: list[str], reason: str) -> None:
        for name in names:
            self.names.remove(name)
            self.left_out[name] = reason
            print(f"{name} left out: {reason}", file=sys.stderr)

    def start(self, system: str, name: str, batch: int) -> tuple[Group, Rounds] | None:
        """Start a system; a peer that fails is left out of this size and all further ones."""
        package = SYSTEMS[system].package
        python = sys.executable if package is None else self._pythons[package]
        try:
            return start(system, name, batch, self.ranks, python)
        except WorkerError as e:
            if package is None:
                raise
            errors = [line for line in str(e).splitlines() if "Error: " in line]
            self._leave_out([system], errors[-1] if errors else str(e))
            return None


def measure(name: str, size: Size, field: Field, rounds: int) -> dict[str, Rounds]:
    """Start all systems, check their losses, and time them in interleaved rounds."""
    plain = plain_losses(name, size.batch, field.ranks, WARMUP_STEPS + 1 + CHECK_STEPS + 1)
    with ExitStack() as stack:
        groups, data = {}, {}
        for system in list(field.names):
            started = field.start(system, name, size.batch)
            if started is None:
                continue
            groups[system], data[system] = started
            stack.enter_context(groups[system])
            data[system].add_losses(groups[system].call("steps", count=CHECK_STEPS))
            check(system, name, data[system], plain)
        interleave(groups, data, size.steps, rounds)
    return data


def line(name: str, system: str, data: dict[str, Rounds]) -> dict[str, Any]:
    """Return one system's line: as in step_time, with ratios to DeepSpeed."""
    row = result(name, system, data[system], data[BASELINE])
    row["target"] = TARGET if system.startswith("zerofx-3-host") else None
    row["deepspeed_ratio"] = None
    if DEEPSPEED in data:
        pairs = zip(data[system].wall_s, data[DEEPSPEED].wall_s, strict=True)
        row["deepspeed_ratio"] = statistics.median(a / b for a, b in pairs)
    return row


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    systems.add_options(parser, DEFAULT)
    sizes.add_options(parser, "4x128,8x384")
    parser.add_argument("--rounds", type=int, default=8, help="a claim needs 8 or more")
    for package in peers.PACKAGES:
        parser.add_argument(f"--{package}-python", help=f"an interpreter that has {package}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    field, lines = Field(options), []
    for name, size in sizes.chosen(options).items():
        need_memory(size.num_params * BYTES_PER_PARAM * options.ranks * len(field.names))
        data = measure(name, size, field, options.rounds)
        lines += [line(name, system, data) for system in data]
    options.peers, options.left_out = field.versions, field.left_out
    finish("offload", _columns(), lines, options)


def _columns() -> list[Column]:
    """Return step_time's columns, with DeepSpeed's ratios instead of the baseline's name."""
    beside = Column("deepspeed_ratio", "of DeepSpeed's", "{:.2f}")
    return [beside if column.key == "baseline" else column for column in COLUMNS]


if __name__ == "__main__":
    main()
