"""Predicted and measured step times: six models, stages 0 to 3, one rank and two.

    zerofx doctor --calibrate --out mine.yaml
    python -m benchmarks.predicted --hardware mine.yaml              # 48 cells, 5 rounds
    python -m benchmarks.predicted --hardware mine.yaml --only gpt2 --kernels aten
    python -m benchmarks.predicted --hardware mine.yaml --axes tensor sequence context pipeline

The last command has the axes of `Plan.parallel` for two models at stages 1 and 3, on 2 ranks and,
with 2 data ranks, on 4. Where there are fewer cores than ranks, what counts is CPU seconds, all
ranks together: predicted as what all ranks compute, update and lose to transfers.

A shared machine is faster in one minute than in another, by up to a third. So the step that
calibration calls its pace is timed on all ranks before and after each cell's turn, and `paced` is
the ratio to a measured time that is divided by how much slower that step was than in the
calibration; for CPU seconds, by how much more CPU time it took.

All cells of a world run in one group of processes (gloo, one thread each) and take turns, so that a
temporary slowdown of the machine affects all of them. A cell's time is the median over rounds of
the slowest rank, with the batch already loaded. Predictions are made before anything is measured.
Two plans of one model count as correctly ordered if the plan predicted to be faster is faster,
among pairs that differ by more than 15 %. Page faults are counted: if the C library gives memory
back between steps and fetches it again, that takes time that no prediction includes.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.memory_cells import LAYERS, MANY, MODELS, captured
from benchmarks.pool import Group
from benchmarks.report import Column, finish
from zerofx.analysis.time.timeline import COMMUNICATION
from zerofx.hardware import load_hardware
from zerofx.tools.calibrate.crowd import pace_step

PROMISED = 0.15
STAGES, WORLDS = (0, 1, 2, 3), (1, 2)
MICRO_BATCHES = 4
AXES: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2, "micro_batches": MICRO_BATCHES},
}
WARMUP_STEPS = 3
QUIET = {"TRANSFORMERS_VERBOSITY": "error"}


@dataclass(frozen=True)
class Cell:
    """One plan of one model."""

    model: str
    stage: int
    world: int
    kernels: str
    axis: str = "data"
    samples: int = MANY

    def __str__(self) -> str:
        return f"{self.model}-{self.stage}-{self.world}-{self.kernels}-{self.axis}"

    @property
    def plan(self) -> dict[str, Any]:
        plan = {"stage": self.stage, "kernels": self.kernels}
        # a loop that reads only the loss says so: parts of the logits are then not gathered
        return plan | ({"parallel": AXES[self.axis], "outputs": "loss"} if AXES[self.axis] else {})

    @property
    def captured(self) -> int:
        """Samples that a program computes in one call: a micro-batch, in a pipeline."""
        return self.samples // MICRO_BATCHES if self.axis == "pipeline" else self.samples


class Job:
    """Job of a worker: steps of any of the cells that it has prepared."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._cells: dict[str, tuple[Any, Any, dict[str, Any]]] = {}
        self._pace = pace_step()

    def _pace_us(self) -> tuple[float, float]:
        """Time the step that calibration took as its pace, on all ranks at once: wall and CPU."""
        self._agreed(0)
        begin, used = time.perf_counter(), time.process_time()
        self._pace()
        return 1e6 * (time.perf_counter() - begin), 1e6 * (time.process_time() - used)

    def prepare(self, cell: dict[str, Any]) -> None:
        """Compile a cell and train it until it is in its steady state."""
        import torch

        import zerofx

        made = Cell(**cell)
        torch.manual_seed(0)
        model = zerofx.compile(MODELS[made.model].build(LAYERS), made.plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self._cells[str(made)] = model, optimizer, MODELS[made.model].batch(0, made.samples)
        self._steps(str(made), WARMUP_STEPS)

    def _steps(self, name: str, count: int) -> None:
        model, optimizer, batch = self._cells[name]
        for _ in range(count):
            found = model(**batch)
            loss = getattr(found, "loss", found)
            del found
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def steps(self, name: str, seconds: float) -> dict[str, Any]:
        """Train for about this long after an untimed step; return seconds per step."""
        first = self._pace_us()
        begin = time.perf_counter()
        self._steps(name, 1)  # the caches held another cell; this also synchronises the ranks
        one = time.perf_counter() - begin
        count = self._agreed(max(round(seconds / one), 1))
        before, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        self._steps(name, count)
        wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        faults = after.ru_minflt - before.ru_minflt
        pace = [statistics.mean(each) for each in zip(first, self._pace_us(), strict=True)]
        found = {"wall_s": wall / count, "cpu_s": cpu / count, "faults": faults / count}
        return found | {"pace_us": pace[0], "pace_cpu_us": pace[1]}

    def _agreed(self, count: int) -> int:
        """Return rank 0's count on every rank."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            return count
        held = torch.tensor(count)
        dist.broadcast(held, 0)
        return int(held)


def predict(cells: list[Cell], hardware: str) -> dict[str, dict[str, Any]]:
    """Return the prediction for each cell."""
    import zerofx

    found, described = {}, load_hardware(hardware)
    for cell in cells:
        outputs = cell.plan.get("outputs", "all")
        program = captured(cell.model, LAYERS, cell.captured, outputs)
        # more ranks than cores share them: as if each had one, since CPU seconds are compared
        node = replace(described, devices_per_node=max(cell.world, described.devices_per_node))
        view: Any = zerofx.predict(program, cell.plan, hardware=node, world_size=cell.world)
        forecast = view.forecast
        if cell.axis == "pipeline":
            busy = {f"stage {i}": us / 1e3 for i, us in enumerate(forecast.busy_us)}
            ranks = cell.world / len(busy)
        else:
            # a transfer's use of the cores is what compute loses to it
            lanes = forecast.timeline.busy_us.items()
            busy = {k.value: us / 1e3 for k, us in lanes if us and k not in COMMUNICATION}
            ranks = cell.world
        found[str(cell)] = {
            **{f"{k}_ms": us / 1e3 for k, us in asdict(forecast.step_us).items()},
            "busy_ms": busy,
            "all_busy_ms": ranks * sum(busy.values()),
            "pace_us": node.curves["pace"].at(cell.world),
        }
    return found


def measure(cells: list[Cell], rounds: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    """Time all cells of a world in interleaved rounds; return each round's result."""
    found: dict[str, list[dict[str, float]]] = {str(cell): [] for cell in cells}
    for world in sorted({cell.world for cell in cells}):
        mine = [cell for cell in cells if cell.world == world]
        with Group(f"world {world}", "benchmarks.predicted:Job", {}, world, QUIET) as group:
            group.ready()
            for cell in mine:
                group.call("prepare", cell=asdict(cell))
            for number in range(rounds):
                start = number % len(mine)
                for cell in mine[start:] + mine[:start]:
                    answers = group.call("steps", name=str(cell), seconds=seconds)
                    most = {k: max(a[k] for a in answers) for k in ("wall_s", "faults", "pace_us")}
                    cpu = sum(a["cpu_s"] for a in answers)
                    pace_cpu = statistics.mean(a["pace_cpu_us"] for a in answers)
                    found[str(cell)].append({**most, "cpu_s": cpu, "pace_cpu_us": pace_cpu})
    return found


def row(cell: Cell, said: dict[str, Any], rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return one cell's line: predicted, measured, their ratio, and whether it is in range."""
    walls = sorted(1e3 * r["wall_s"] for r in rounds)
    measured = statistics.median(walls)
    slower = [r["pace_us"] / said["pace_us"] for r in rounds]
    paced = statistics.median(r["wall_s"] / by for r, by in zip(rounds, slower, strict=True))
    # where ranks share cores, the pace takes longer by the clock, and somewhat more CPU time
    cpu_slower = [r["pace_cpu_us"] / said["pace_us"] for r in rounds]
    cpu = statistics.median(r["cpu_s"] / by for r, by in zip(rounds, cpu_slower, strict=True))
    return {
        **asdict(cell),
        **said,
        "measured_ms": measured,
        "least_ms": walls[0],
        "most_ms": walls[-1],
        "cpu_ms": 1e3 * statistics.median(r["cpu_s"] for r in rounds),
        "faults": statistics.median(r["faults"] for r in rounds),
        "ratio": said["middle_ms"] / measured,
        "slower": statistics.median(slower),
        "cpu_slower": statistics.median(cpu_slower),
        "cpu_ratio": said["all_busy_ms"] / (1e3 * statistics.median(r["cpu_s"] for r in rounds)),
        "paced": said["middle_ms"] / (1e3 * paced),
        "cpu_paced": said["all_busy_ms"] / (1e3 * cpu),
        "is_inside": said["low_ms"] <= measured <= said["high_ms"],
    }


def orders(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Return (pairs in the predicted order, pairs) of one model's plans that differ enough."""
    kept, pairs = 0, 0
    for a, b in itertools.combinations(rows, 2):
        if any(a[name] != b[name] for name in ("model", "kernels", "axis")):
            continue
        quick, slow = sorted((a, b), key=lambda r: r["measured_ms"])
        if slow["measured_ms"] > (1 + PROMISED) * quick["measured_ms"]:
            pairs += 1
            kept += quick["middle_ms"] < slow["middle_ms"]
    return kept, pairs


COLUMNS = [
    *(Column(name, name) for name in ("model", "stage", "world", "kernels", "axis")),
    Column("low_ms", "from ms", "{:.1f}"),
    Column("middle_ms", "predicted ms", "{:.1f}"),
    Column("high_ms", "to ms", "{:.1f}"),
    Column("measured_ms", "measured ms", "{:.1f}"),
    Column("cpu_ms", "CPU ms, all ranks", "{:.1f}"),
    Column("faults", "faults", "{:.0f}"),
    Column("ratio", "ratio", "{:.2f}"),
    Column("slower", "slower", "{:.2f}"),
    Column("paced", "paced", "{:.2f}"),
    Column("cpu_ratio", "of CPU", "{:.2f}"),
    Column("cpu_paced", "CPU, paced", "{:.2f}"),
    Column("is_inside", "inside"),
]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--hardware", required=True, help="a calibrated hardware file of this machine"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per cell and round")
    parser.add_argument("--kernels", default="inductor", choices=("inductor", "aten"))
    parser.add_argument("--only", default="", help="only cells with this text in their name")
    parser.add_argument("--axes", default=["data"], nargs="+", choices=[*AXES])
    options = parser.parse_args()
    cells = [
        Cell(model, stage, world, options.kernels, axis)
        for axis in options.axes
        for world in (WORLDS if axis == "data" else (2, 4))
        for model in (MODELS if axis == "data" else ("gpt2", "llama"))
        for stage in (STAGES if axis == "data" else (1, 3))
    ]
    cells = [cell for cell in cells if options.only in str(cell)]
    if load_hardware(options.hardware).curve("pace") is None:
        parser.error(f"--hardware {options.hardware} has no pace: calibrate again.")
    said = predict(cells, options.hardware)
    measured = measure(cells, options.rounds, options.seconds)
    rows = [row(cell, said[str(cell)], measured[str(cell)]) for cell in cells]
    kept, pairs = orders(rows)
    inside = sum(r["is_inside"] for r in rows)
    for name in ("ratio", "paced", "cpu_ratio", "cpu_paced"):
        close = sum(abs(r[name] - 1) <= PROMISED for r in rows)
        print(f"{name}: {close} of {len(rows)} within {PROMISED:.0%}")
    print(f"{inside} inside their range")
    print(f"{kept} of {pairs} pairs of plans that differ by more are in the predicted order")
    finish("predicted", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
