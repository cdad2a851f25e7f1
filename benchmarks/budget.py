"""Step time and peak under memory budgets, from everything needed down to the least, and FSDP2.

    python -m benchmarks.budget               # GPT of 8 layers x 384, and a Llama; 8 budgets each
    python -m benchmarks.budget --quick --models gpt

Every run of zerofx (`activations="auto"`) is compared with FSDP2, by itself and with
`torch.utils.checkpoint` on every block. Peaks are live tensor bytes of the highest rank. The upper
bound counts blocks that a gloo thread freed unobserved until their addresses are used again (see
zerofx.tools.demo.measure). Times are medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from contextlib import ExitStack
from typing import Any

from benchmarks.budget_job import MODELS, tokens_of
from benchmarks.pool import Group
from benchmarks.report import Column, finish

RANKS, BUDGETS, ROUNDS, STEPS = 2, 8, 8, 2
PEERS = ("fsdp2", "fsdp2-checkpoint")
QUIET = {"KINETO_LOG_LEVEL": "99"}
JOB = "benchmarks.budget_job:Job"


def budgets_of(model: str, count: int) -> list[int]:
    """Return budgets in equal steps, from the need of keeping everything to the least possible."""
    import zerofx
    from zerofx.analysis.memory.memory import peak_bytes
    from zerofx.errors import BudgetError
    from zerofx.passes.decide import budget_for

    program = zerofx.capture(MODELS[model][0]()[0], tokens_of(model, 0, 0))
    most = budget_for(peak_bytes(zerofx.rewrite(program, {"stage": 3}, RANKS)))
    try:
        zerofx.rewrite(program, {"stage": 3, "activations": "auto", "memory_budget": 1}, RANKS)
    except BudgetError as error:
        least = error.least_bytes
    return [most - (most - least) * i // (count - 1) for i in range(count)]


def _named(model: str, budgets: list[int]) -> dict[str, dict[str, Any]]:
    """Return the arguments of every run, by its name."""
    runs = {p: {"model": model, "system": p, "budget": None} for p in PEERS}
    for budget in budgets:
        runs[f"zerofx {budget / 2**20:.1f} MiB"] = {
            "model": model, "system": "zerofx", "budget": budget,
        }  # fmt: skip
    return runs


def measure_peaks(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each run's peak, the highest of its ranks."""
    found = {}
    for name, args in runs.items():
        with Group(name, JOB, args | {"measures": True}, RANKS, QUIET) as group:
            group.ready()
            answers = group.call("peaks")
            found[name] = {
                k: None if answers[0][k] is None else max(a[k] for a in answers) for k in answers[0]
            }
    return found


def measure_times(runs: dict[str, dict[str, Any]], rounds: int) -> dict[str, dict[str, list[Any]]]:
    """Return each run's seconds and CPU seconds per step, by round, and the ranks' losses."""
    data: dict[str, dict[str, list[Any]]] = {
        name: {"wall_s": [], "cpu_s": [], "losses": []} for name in runs
    }
    with ExitStack() as stack:
        groups = {}
        for name, args in runs.items():
            group = Group(name, JOB, args | {"measures": False}, RANKS, {})
            groups[name] = stack.enter_context(group)
            group.ready()
            data[name]["losses"] += (a["losses"] for a in group.call("steps", count=2))
        names = list(runs)
        for number in range(rounds):
            start = number % len(names)
            for name in names[start:] + names[:start]:
                answers = groups[name].call("steps", count=STEPS)
                data[name]["wall_s"].append(max(a["wall_s"] for a in answers) / STEPS)
                data[name]["cpu_s"].append(sum(a["cpu_s"] for a in answers) / STEPS)
                data[name]["losses"] += (a["losses"] for a in answers)
    return data


def lines_of(model: str, rounds: int, count: int) -> list[dict[str, Any]]:
    """Return the table's lines for one model."""
    runs = _named(model, budgets_of(model, count))
    peaks, times = measure_peaks(runs), measure_times(runs, rounds)
    peer = times["fsdp2-checkpoint"]
    lines = []
    for name, args in runs.items():
        mine, budget = times[name], args["budget"]
        flat = itertools.chain.from_iterable
        pairs = zip(flat(mine["losses"]), flat(peer["losses"]), strict=True)
        ratios = [
            statistics.median(a / b for a, b in zip(mine[k], peer[k], strict=True))
            for k in ("wall_s", "cpu_s")
        ]
        lines.append({
            "model": model,
            "run": name,
            "budget_mib": budget and budget / 2**20,
            "measured_mib": peaks[name]["low_bytes"] / 2**20,
            "of_budget": budget and peaks[name]["low_bytes"] / budget,
            "spread": peaks[name]["high_bytes"] / peaks[name]["low_bytes"] - 1,
            "error": peaks[name]["predicted_bytes"]
            and peaks[name]["predicted_bytes"] / peaks[name]["low_bytes"] - 1,
            "time_ratio": ratios[0],
            "cpu_ratio": ratios[1],
            "step_ms": statistics.median(mine["wall_s"]) * 1e3,
            "loss_error": max(abs(a - b) / abs(b) for a, b in pairs),
            **peaks[name],
            "rounds": {k: mine[k] for k in ("wall_s", "cpu_s")},
        })  # fmt: skip
    return lines


COLUMNS = [
    Column("model", "model"),
    Column("run", "run"),
    Column("measured_mib", "measured MiB", "{:.2f}"),
    Column("of_budget", "of budget", "{:.3f}"),
    Column("spread", "uncertain", "{:.1%}"),
    Column("error", "prediction's error", "{:+.1%}"),
    Column("time_ratio", "time / checkpointed", "{:.2f}"),
    Column("cpu_ratio", "CPU-s / checkpointed", "{:.2f}"),
    Column("step_ms", "step ms", "{:.0f}"),
    Column("loss_error", "loss differs by", "{:.0e}"),
]


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="gpt,llama", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--budgets",
        type=int,
        default=BUDGETS,
        help="number of budgets, from the largest to the least possible",
    )
    parser.add_argument("--quick", action="store_true", help="3 budgets, 2 rounds")
    options = parser.parse_args()
    rounds, count = (2, 3) if options.quick else (options.rounds, options.budgets)
    lines = [line for m in options.models.split(",") for line in lines_of(m, rounds, count)]
    finish("budget", COLUMNS, lines, options)


if __name__ == "__main__":
    main()
