"""Text padded to the longest of each batch: the number of programs, and the cost of a step.

    python -m benchmarks.lengths                    # 300 steps of 100 lengths, under Inductor
    python -m benchmarks.lengths --kernels aten

In addition, steps of a few lengths are compared: with one program per length (`static`), or with
`torch.compile(dynamic=True)` (`compile`). The two take turns, and each counts the CPU time of its
process, which other work on the machine changes little. The ratio is the median over the turns. The
peak of a step at the longest text is compared with the prediction for a declared bound.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from benchmarks.report import Column, finish
from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.demo.measure import PeakMemory

DIMS = ("x.shape[1]", "y.shape[1]")  # of the texts, and of the targets


class Trainee:
    """A model with its optimizer; counts the programs that were compiled for it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self, ids: Tensor) -> float:
        """Train one step; return its CPU seconds."""
        begin = time.process_time()
        self.model(ids, ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - begin


def compiled(config: GPTConfig, **plan: Any) -> Trainee:
    """Return a compiled model of one process under a plan."""
    torch.manual_seed(0)
    return Trainee(zerofx.compile(GPT(config), plan))


def texts(config: GPTConfig, rows: int, length: int) -> Tensor:
    return torch.randint(0, config.vocab, (rows, length))


def count_programs(trainee: Trainee, batches: list[Tensor]) -> int:
    """Train on all batches; return how many programs were needed."""
    made: list[object] = []
    trainee.model._programs.on_bound = made.append
    for ids in batches:
        trainee.step(ids)
    return len(made)


def ratio(ours: Trainee, theirs: Trainee, batches: list[Tensor], turns: int) -> float:
    """Return the median ratio of CPU times of steps on the same batches, one after the other."""
    for ids in batches:  # compiles
        ours.step(ids)
        theirs.step(ids)
    found = []
    for turn in range(turns):
        for ids in batches:
            pair: list[Callable[[Tensor], float]] = [ours.step, theirs.step]
            taken = {each: each(ids) for each in (pair if turn % 2 else reversed(pair))}
            found.append(taken[pair[0]] / taken[pair[1]])
    return statistics.median(found)


def peak(config: GPTConfig, kernels: str, rows: int, longest: int) -> tuple[int, int]:
    """Return the peak of a step at the bound, and its prediction."""
    ids = texts(config, rows, longest)
    shorter = texts(config, rows, longest // 2)
    with PeakMemory(torch.device("cpu")) as memory:
        bounds = dict.fromkeys(DIMS, longest)
        trainee = compiled(config, kernels=kernels, dynamic=bounds)
        for _ in range(2):
            trainee.step(shorter)
        with memory.step():
            trainee.step(ids)
    (program,) = trainee.model.programs
    return memory.steps[0].high_bytes, program.memory().peak_bytes


COLUMNS = [
    Column("kernels", "kernels"),
    Column("programs", "programs"),
    Column("to_static", "x static", "{:.3f}"),
    Column("to_compile", "x torch.compile", "{:.3f}"),
    Column("peak_mib", "peak MiB", "{:.2f}"),
    Column("error", "predicted", "{:+.1%}"),
]


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", default="inductor", choices=["inductor", "aten"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lengths", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument(
        "--compared", type=int, default=4, help="number of lengths whose steps are compared"
    )
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    longest = options.lengths + 28
    config = GPTConfig(layers=options.layers, width=options.width, seq=longest)
    drawn = random.Random(0)
    torch.manual_seed(1)
    lengths = [*range(29, longest + 1)] * (options.steps // options.lengths)
    drawn.shuffle(lengths)
    batches = [texts(config, options.rows, length) for length in lengths]
    batches[-1] = batches[-1][: options.rows // 2 + 1].contiguous()
    ours = compiled(config, kernels=options.kernels)
    programs = count_programs(ours, batches)

    step = max(1, options.lengths // options.compared)
    some = [texts(config, options.rows, n) for n in range(longest, 28, -step)][: options.compared]
    to_static = to_compile = None
    if options.kernels == "aten":
        static = compiled(config, kernels="aten", dynamic="off", max_programs=options.compared)
        to_static = ratio(ours, static, some, options.turns)
    else:
        torch.manual_seed(0)
        theirs = Trainee(torch.compile(GPT(config), dynamic=True))  # type: ignore[arg-type]
        to_compile = ratio(ours, theirs, some, options.turns)
    high, predicted = peak(config, options.kernels, options.rows, longest)
    rows = [{
        "kernels": options.kernels,
        "programs": programs,
        "to_static": to_static,
        "to_compile": to_compile,
        "peak_mib": high / 2**20,
        "peak_bytes": high,
        "predicted_bytes": predicted,
        "error": predicted / high - 1,
    }]  # fmt: skip
    finish("lengths", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
