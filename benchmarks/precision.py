"""Final loss with low precision and 8-bit states: the byte GPT on real text, and the fp32 run.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.precision

Every run has the same weights, data, optimizer and steps. The mean loss of the last steps, over all
ranks, is compared.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist

import zerofx
from benchmarks.report import Column, finish
from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.demo.text import Batches, load_text

BATCH, LAST = 4, 20
CONFIG = GPTConfig(layers=4, width=128, heads=4, seq=128)
# name -> (precision of the plan, bits of AdamW's states); the others are compared with the first
RUNS = {"fp32": ("fp32", 32), "bf16": ("bf16", 32), "8-bit states": ("fp32", 8),
        "fp16": ("fp16", 32)}  # fmt: skip


def train(name: str, steps: int, batches: Batches) -> dict[str, Any]:
    """Train one run; return its line of the table."""
    precision, bits = RUNS[name]
    torch.manual_seed(0)
    plan = zerofx.Plan(stage=3, precision=precision, kernels="inductor")
    model = zerofx.compile(GPT(CONFIG), plan, device="cpu")
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, state_bits=bits)
    losses, start = [], time.perf_counter()
    for step in range(steps):
        loss = model(*batches.at(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    last = torch.stack(losses[-LAST:]).mean()
    dist.all_reduce(last)
    scale = model.loss_scale
    return {
        "run": name,
        "loss": float(last) / dist.get_world_size(),
        "skipped": scale.num_skipped if scale is not None else None,
        "state_bytes": optimizer.state_bytes,
        "seconds": time.perf_counter() - start,
    }


COLUMNS = [
    Column("run", "run"),
    Column("loss", f"loss, mean of the last {LAST}", "{:.4f}"),
    Column("ratio", "of fp32's", "{:.5f}"),
    Column("skipped", "steps skipped", "{}"),
    Column("state_bytes", "state bytes per rank", "{:,}"),
    Column("seconds", "seconds, with compilation", "{:.0f}"),
]


def main() -> None:
    """Run the trainings that the command line selects; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    names = list(dict.fromkeys(["fp32", *options.runs.split(",")]))
    if unknown := set(names) - set(RUNS):
        parser.error(f"--runs: unknown {', '.join(sorted(unknown))}; known {', '.join(RUNS)}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text = load_text(1_000_000).train
    batches = Batches(text, BATCH, CONFIG.seq, dist.get_rank(), dist.get_world_size())
    lines = [train(name, options.steps, batches) for name in names]
    for line in lines:
        line["ratio"] = line["loss"] / lines[0]["loss"]
    if dist.get_rank() == 0:
        finish("precision", COLUMNS, lines, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
