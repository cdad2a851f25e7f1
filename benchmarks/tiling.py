"""Tiling of a two-layer MLP at stage 3: the memory that it saves, and its cost.

    python -m benchmarks.tiling                          # hidden 8192, whole and in 4 and 16 tiles
    python -m benchmarks.tiling --hidden 32768 --width 1024

Working memory is the measured peak of a rank minus the shards and gradient shards that it holds at
that time: gathered parameters, full gradients, and the few activations. The step time is a median
of the measured steps, so its ratio is only a first impression.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from benchmarks.pool import Group
from benchmarks.report import Column, finish
from zerofx.analysis.memory.memory import memory as memory_of
from zerofx.analysis.memory.storage import Category
from zerofx.tools.demo.measure import PeakMemory

WARMUP_STEPS, MEASURED_STEPS = 2, 4
QUIET = {"KINETO_LOG_LEVEL": "99"}


class MLP(nn.Module):
    """Two linear layers with the hidden width between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).mean()


class Job:
    """Job of a worker: a short training under the profiler."""

    def __init__(self, width: int, hidden: int, tiles: int, batch: int) -> None:
        self._sizes, self._tiles, self._batch = (width, hidden), tiles, batch

    def run(self) -> dict[str, Any]:
        """Train a few steps; report the peak, the prediction and the step time."""
        torch.manual_seed(0)
        tiling = {"up": self._tiles, "down": self._tiles} if self._tiles > 1 else "off"
        seconds = []
        with PeakMemory(torch.device("cpu")) as memory:
            model = zerofx.compile(MLP(*self._sizes), {"kernels": "aten", "tiling": tiling})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(WARMUP_STEPS + MEASURED_STEPS):
                x = torch.randn(self._batch, self._sizes[0])
                begin = time.perf_counter()
                with memory.step():
                    loss = model(x)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                seconds.append(time.perf_counter() - begin)
        [program] = model.programs
        found = memory_of(program, optimizer_bytes=0)
        return {
            "shard_bytes": sum(
                s.nbytes
                for s in found.storages
                if s.birth <= found.peak_time <= s.death
                and (s.category is Category.PARAMETERS or s.name == "p.grad")
            ),
            "peak_bytes": max(p.high_bytes for p in memory.steps[WARMUP_STEPS:]),
            "predicted_bytes": found.peak_bytes,
            "largest_buffer_bytes": max(program.slot_bytes),
            "step_s": statistics.median(seconds[WARMUP_STEPS:]),
            "loss": float(loss.detach()),
        }


COLUMNS = [
    Column("tiles", "tiles"),
    Column("working_mib", "working MiB", "{:.1f}"),
    Column("times_k", "x k", "{:.2f}"),
    Column("largest_mib", "largest buffer MiB", "{:.1f}"),
    Column("error", "predicted", "{:+.1%}"),
    Column("step_s", "step s", "{:.3f}"),
]


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for tiles in options.tiles:
        args = {"width": options.width, "hidden": options.hidden, "tiles": tiles,
                "batch": options.batch}  # fmt: skip
        with Group("tiling", "benchmarks.tiling:Job", args, options.ranks, QUIET) as group:
            group.ready()
            answers = group.call("run")
        mine = {key: max(answer[key] for answer in answers) for key in answers[0]}
        working = mine["peak_bytes"] - mine["shard_bytes"]
        whole = rows[0]["working_bytes"] if rows else working
        rows.append({
            "tiles": tiles,
            "working_bytes": working,
            "working_mib": working / 2**20,
            "times_k": working * tiles / whole,
            "largest_mib": mine["largest_buffer_bytes"] / 2**20,
            "error": mine["predicted_bytes"] / mine["peak_bytes"] - 1,
            **mine,
        })  # fmt: skip
    finish("tiling", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
