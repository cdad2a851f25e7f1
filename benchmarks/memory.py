"""Peak live tensor bytes of a rank, as counted by torch's allocator, with the prediction.

    python -m benchmarks.memory               # stages 0 to 3, bf16 and recompute against FSDP2
    python -m benchmarks.memory --sizes 4x128 --systems zerofx-3,zerofx-3-bf16,zerofx-3-recompute

The measured peak comes with two bounds (see zerofx.tools.demo.measure). They differ by blocks that
a gloo thread freed unobserved. Ratios compare our upper bound with the lower one of FSDP2 in the
same format, checkpointed if we recompute. Between steps means after zero_grad.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks import sizes, systems
from benchmarks.pool import Group
from benchmarks.report import Column, finish
from benchmarks.sizes import SIZES, make_batches
from benchmarks.systems import SYSTEMS, Trainer
from zerofx.tools.demo.measure import PeakMemory

WARMUP_STEPS, MEASURED_STEPS = 2, 3
DEFAULT = [
    "zerofx-3", "zerofx-3-bf16", "zerofx-3-recompute", "zerofx-3-bf16-recompute",
    "zerofx-2", "zerofx-1", "zerofx-0",
]  # fmt: skip
QUIET = {"KINETO_LOG_LEVEL": "99"}


class Job:
    """Job of a worker: a short training under the profiler."""

    def __init__(self, system: str, size: str, batch: int) -> None:
        self._system, self._size, self._batch = system, size, batch

    def run(self) -> dict[str, Any]:
        """Train a few steps from the start; report the peaks and the prediction."""
        with PeakMemory(torch.device("cpu")) as memory:
            trainer = Trainer(self._system, SIZES[self._size].model)
            batches = make_batches(self._size, self._batch, trainer.rank, trainer.ranks)
            for step in range(WARMUP_STEPS):
                trainer.step(*batches.at(step))
            for step in range(WARMUP_STEPS, WARMUP_STEPS + MEASURED_STEPS):
                with memory.step():
                    trainer.step(*batches.at(step))
        programs = getattr(trainer.model, "programs", None)  # FSDP2 predicts nothing
        return {
            "low_bytes": min(peak.low_bytes for peak in memory.steps),
            "high_bytes": min(peak.high_bytes for peak in memory.steps),
            "left_low_bytes": min(peak.left_low_bytes for peak in memory.steps),
            "left_high_bytes": min(peak.left_high_bytes for peak in memory.steps),
            "predicted_bytes": programs[0].memory(basis="compiled").peak_bytes
            if programs
            else None,
        }


def measure(name: str, batch: int, system: str, ranks: int) -> dict[str, Any]:
    """Return the highest of the ranks' results."""
    args = {"system": system, "size": name, "batch": batch}
    env = SYSTEMS[system].env | QUIET
    with Group(system, "benchmarks.memory:Job", args, ranks, env) as group:
        group.ready()
        answers = group.call("run")
    return {
        key: None if answers[0][key] is None else max(answer[key] for answer in answers)
        for key in answers[0]
    }


def result(
    name: str, system: str, mine: dict[str, Any], baseline: dict[str, Any]
) -> dict[str, Any]:
    """Return one system's line."""
    predicted, measured = mine["predicted_bytes"], mine["high_bytes"]
    return {
        "size": name,
        "system": system,
        "predicted_mib": predicted and predicted / 2**20,
        "measured_mib": measured / 2**20,
        "spread": measured / mine["low_bytes"] - 1,
        "error": predicted and predicted / measured - 1,
        "ratio": measured / baseline["low_bytes"],
        "left_mib": mine["left_high_bytes"] / 2**20,
        "left_ratio": mine["left_high_bytes"] / baseline["left_low_bytes"],
        **mine,
    }


COLUMNS = [
    Column("size", "size"),
    Column("system", "system"),
    Column("predicted_mib", "predicted MiB", "{:.2f}"),
    Column("measured_mib", "measured MiB", "{:.2f}"),
    Column("error", "prediction's error", "{:+.1%}"),
    Column("ratio", "measured / fsdp2", "{:.2f}"),
    Column("left_mib", "between steps MiB", "{:.2f}"),
    Column("left_ratio", "between steps / fsdp2", "{:.2f}"),
    Column("spread", "uncertain", "{:.1%}"),
]


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    systems.add_options(parser, DEFAULT)
    sizes.add_options(parser, "4x32,4x128,8x384,4x1024")
    parser.add_argument("--quick", action="store_true", help="only the smallest size")
    options = parser.parse_args()
    lines = []
    wanted = list(sizes.chosen(options).items())
    for name, size in wanted[:1] if options.quick else wanted:
        data = {
            system: measure(name, size.batch, system, options.ranks)
            for system in systems.chosen(options)
        }
        lines += [
            result(name, system, mine, data[SYSTEMS[system].baseline])
            for system, mine in data.items()
        ]
    finish("memory", COLUMNS, lines, options)


if __name__ == "__main__":
    main()
