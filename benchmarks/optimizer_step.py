"""CPU seconds of one optimizer step: zerofx.optim and torch's fused AdamW, in one process.

    python -m benchmarks.optimizer_step

Both step the same parameters of one compiled GPT, in turn; each round starts with the other one.
The ratios are medians over rounds of the two times in a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import zerofx
from benchmarks.report import Column, finish
from zerofx.tools.demo.gpt import GPT, GPTConfig

SIZES = {"4x128": (4, 128), "6x256": (6, 256), "6x512": (6, 512)}
CLIP = 1.0
Step = Callable[[], None]


def make_steps(layers: int, width: int, clips: bool) -> tuple[int, dict[str, Step]]:
    """Return the elements of a model, and a step of each system over them."""
    torch.manual_seed(0)
    config = GPTConfig(layers=layers, width=width, heads=4, seq=16)
    model = zerofx.compile(GPT(config), zerofx.Plan(stage=3, kernels="aten"), device="cpu")
    tokens = torch.randint(0, config.vocab, (1, config.seq))
    model(tokens, tokens).backward()
    params = list(model.parameters())
    mine = zerofx.optim.AdamW(params, lr=1e-9, max_grad_norm=CLIP if clips else None)
    peer = torch.optim.AdamW(params, lr=1e-9, fused=True)

    def step_peer() -> None:
        if clips:
            torch.nn.utils.clip_grad_norm_(params, CLIP)
        peer.step()

    return sum(p.numel() for p in params), {"zerofx": mine.step, "torch fused": step_peer}


def cpu_s(step: Step, repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - start) / repeats


def measure(name: str, clips: bool, rounds: int) -> list[dict[str, Any]]:
    """Return one line per system."""
    numel, steps = make_steps(*SIZES[name], clips)
    for step in steps.values():
        cpu_s(step, 2)
    repeats = max(1, 40_000_000 // numel)
    times: dict[str, list[float]] = {system: [] for system in steps}
    for number in range(rounds):
        order = list(steps) if number % 2 else list(reversed(steps))
        for system in order:
            times[system].append(cpu_s(steps[system], repeats))
    lines = []
    for system, mine in times.items():
        ratios = [a / b for a, b in zip(mine, times["torch fused"], strict=True)]
        lines.append({
            "size": name, "clips": clips, "numel": numel, "system": system,
            "ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios),
            "step_ms": statistics.median(mine) * 1e3, "rounds": mine,
        })  # fmt: skip
    return lines


COLUMNS = [
    Column("size", "size"),
    Column("numel", "elements", "{:,}"),
    Column("clips", "clips"),
    Column("system", "system"),
    Column("ratio", "CPU s / torch fused", "{:.2f}"),
    Column("low", "lowest", "{:.2f}"),
    Column("high", "highest", "{:.2f}"),
    Column("step_ms", "CPU ms", "{:.2f}"),
]


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=12, help="a claim needs 8 or more")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        line
        for name in options.sizes.split(",")
        for clips in (False, True)
        for line in measure(name, clips, options.rounds)
    ]
    finish("optimizer_step", COLUMNS, lines, options)


if __name__ == "__main__":
    main()
