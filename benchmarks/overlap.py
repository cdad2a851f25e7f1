"""How much of an optimizer on the host hides behind the compute: one process, updates in backward.

    python -m benchmarks.overlap                      # 4x1024, batches 1 to 8, 8 rounds

A step whose gradients leave for the host, and whose parameters are updated there bucket by bucket
while backward goes on, is held against its three lanes, each measured alone: forward and backward
of the same model without offload; the update of all host shards; the copies of as many bytes in as
many pieces as a step moves. With everything hidden a step takes as long as its longest lane; `in
turn` is the sum of the lanes, where nothing is. All of it runs once in every round, in turn, on one
thread of compute and one of updates; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import zerofx
from benchmarks import sizes
from benchmarks.report import Column, finish, need_memory
from benchmarks.sizes import make_batches
from benchmarks.systems import SEED, flat_adamw
from zerofx.demo.gpt import GPT, GPTConfig
from zerofx.runtime.host_tier import D2H, H2D

TARGET = 1.15  # of the longest lane
NUM_MODELS, BYTES_PER_PARAM = 3, 24
WARMUP_STEPS = 2
LANES = ("compute", "update", "transfer")


class Training:
    """One model under one plan, whose forward and backward are timed apart from its step."""

    def __init__(self, config: GPTConfig, x: Tensor, y: Tensor, **plan: Any) -> None:
        torch.manual_seed(SEED)
        self.model = zerofx.compile(GPT(config), zerofx.Plan(stage=3, **plan), device="cpu")
        self._optimizer = flat_adamw(self.model)
        self._batch = x, y
        for _ in range(WARMUP_STEPS):
            self.run()
            self.step()

    def run(self) -> None:
        """Forward and backward."""
        self.model(*self._batch).backward()

    def step(self) -> None:
        """Update, unless backward has done it."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def drop(self) -> None:
        """Drop the gradients without an update."""
        self._optimizer.zero_grad()


def _two_places(nbytes: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)


def copies(model: zerofx.CompiledModule) -> Callable[[], None]:
    """Return a function that copies what a step of `model` copies between device and host."""
    moved = model.programs[0].memory().traffic.moved
    pieces: list[tuple[Tensor, Tensor]] = []
    for lane in (D2H, H2D):
        sent = moved[lane]
        nbytes = sent.sent_bytes // sent.calls
        pieces += [_two_places(nbytes) for _ in range(sent.calls)]

    def copy() -> None:
        for out, source in pieces:
            out.copy_(source)

    copy()  # its pages are there
    return copy


def seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(name: str, batch: int, rounds: int) -> dict[str, Any]:
    """Return the line of one size and batch."""
    config = sizes.SIZES[name].model
    x, y = make_batches(name, batch, rank=0, ranks=1).at(0)
    offload = {"optimizer": "cpu"}
    plain = Training(config, x, y)
    after = Training(config, x, y, offload=offload)
    within = Training(config, x, y, offload=offload, update="in-backward")
    copy = copies(within.model)
    found: dict[str, list[float]] = {key: [] for key in (*LANES, "after", "step")}

    def compute() -> None:
        found["compute"].append(seconds(plain.run))
        plain.drop()

    def in_turn() -> None:
        run, update = seconds(after.run), seconds(after.step)
        found["update"].append(update)
        found["after"].append(run + update)

    def transfer() -> None:
        found["transfer"].append(seconds(copy))

    def overlapped() -> None:
        found["step"].append(seconds(within.run) + seconds(within.step))

    parts = [compute, in_turn, transfer, overlapped]
    for number in range(rounds):
        first = number % len(parts)
        for part in parts[first:] + parts[:first]:
            part()
    return line(name, batch, found)


def line(name: str, batch: int, found: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians over rounds of each lane and of the ratios within a round."""
    each = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    longest = [max(one[lane] for lane in LANES) for one in each]
    in_turn = [sum(one[lane] for lane in LANES) for one in each]
    ratios = [one["step"] / most for one, most in zip(each, longest, strict=True)]
    ratio = statistics.median(ratios)
    milliseconds = {f"{key}_ms": statistics.median(v) * 1e3 for key, v in found.items()}
    turns = [total / most for total, most in zip(in_turn, longest, strict=True)]
    return {
        "size": name, "batch": batch, "ratio": ratio, "target": TARGET, "met": ratio <= TARGET,
        "low": min(ratios), "high": max(ratios), "in_turn": statistics.median(turns),
        **milliseconds, "rounds": found,
    }  # fmt: skip


COLUMNS = [
    Column("size", "size"),
    Column("batch", "batch"),
    Column("ratio", "step / longest lane", "{:.2f}"),
    Column("target", "target", "{:.2f}"),
    Column("met", "met"),
    Column("low", "lowest", "{:.2f}"),
    Column("high", "highest", "{:.2f}"),
    Column("in_turn", "in turn", "{:.2f}"),
    *(Column(f"{lane}_ms", f"{lane} ms", "{:.1f}") for lane in LANES),
    Column("after_ms", "step, update after ms", "{:.1f}"),
    Column("step_ms", "step, update within ms", "{:.1f}"),
]


def main() -> None:
    """Measure what the command line chooses, show it and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="4x1024", choices=list(sizes.SIZES))
    parser.add_argument("--batches", default="1,2,4,8", help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=8, help="a claim needs 8 or more")
    options = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        parser.error("this machine has one core: an update has nowhere to run beside the compute")
    torch.set_num_threads(1)
    need_memory(sizes.SIZES[options.size].num_params * BYTES_PER_PARAM * NUM_MODELS)
    batches = [int(batch) for batch in options.batches.split(",")]
    lines = [measure(options.size, batch, options.rounds) for batch in batches]
    finish("overlap", COLUMNS, lines, options)


if __name__ == "__main__":
    main()
