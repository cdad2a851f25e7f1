"""Predicted and measured peak bytes of a rank, over models, stages, plans and kernels.

    python -m benchmarks.memory_matrix                 # 64 cells that contain every pair of choices
    python -m benchmarks.memory_matrix --only llama    # the cells with this in their name
    python -m benchmarks.memory_matrix --kernels aten  # without regions compiled by Inductor

A cell trains three steps with AdamW. Its measured peak is that of the last whole step, optimizer
included, of the highest rank. It comes with two bounds (see zerofx.tools.demo.measure). The error
is the prediction's distance from the nearer of them, 0 if it is between them.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from benchmarks.memory_cells import CHOICES, Cell, cover, run
from benchmarks.pool import Group, WorkerError
from benchmarks.report import Column, finish, machine, markdown

COUNT, PROMISED = 64, 0.05
QUIET = {"KINETO_LOG_LEVEL": "99", "TRANSFORMERS_VERBOSITY": "error"}


class Job:
    """Job of a worker: one cell after another, on the ranks of its group."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)

    def run(self, cell: dict[str, Any]) -> dict[str, Any]:
        return run(Cell(**cell))


def error_of(predicted_bytes: int, low_bytes: int, high_bytes: int) -> float:
    """Return the relative error of a prediction; 0 if it is between the measured bounds."""
    nearest = min(max(predicted_bytes, low_bytes), high_bytes)
    return predicted_bytes / nearest - 1


def host_error(predicted_bytes: int, measured_bytes: int) -> float:
    """Return the relative error of the host's predicted bytes; 0 if there are none."""
    return predicted_bytes / measured_bytes - 1 if measured_bytes else float(predicted_bytes > 0)


def line(cell: Cell, answers: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the table's line for one cell: for the rank with the largest error."""
    errors = [error_of(a["predicted_bytes"], a["low_bytes"], a["high_bytes"]) for a in answers]
    worst = max(range(len(answers)), key=lambda rank: abs(errors[rank]))
    mine = answers[worst]
    on_host = [host_error(a["predicted_host_bytes"], a["host_bytes"]) for a in answers]
    return {
        **asdict(cell),
        "predicted_mib": mine["predicted_bytes"] / 2**20,
        "measured_mib": mine["high_bytes"] / 2**20,
        "spread": mine["high_bytes"] / mine["low_bytes"] - 1,
        "error": errors[worst],
        "host_mib": mine["host_bytes"] / 2**20,
        "host_error": max(on_host, key=abs),
        "seconds": seconds,
        **mine,
    }  # fmt: skip


def worst_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the worst and the mean error over the cells of each choice."""
    groups: dict[tuple[str, Any], list[float]] = defaultdict(list)
    for row in rows:
        for name in CHOICES:
            groups[name, row[name]].append(row["error"])
    return [
        {
            "choice": name,
            "value": value,
            "cells": len(errors),
            "worst": max(errors, key=abs),
            "mean": sum(map(abs, errors)) / len(errors),
        }
        for (name, value), errors in sorted(groups.items(), key=str)
    ]


COLUMNS = [
    *(Column(name, name) for name in CHOICES),
    Column("predicted_mib", "predicted MiB", "{:.2f}"),
    Column("measured_mib", "measured MiB", "{:.2f}"),
    Column("spread", "uncertain", "{:.1%}"),
    Column("error", "error", "{:+.2%}"),
    Column("host_mib", "on the host MiB", "{:.2f}"),
    Column("host_error", "error", "{:+.2%}"),
]
WORST = [
    Column("choice", "choice"),
    Column("value", "value"),
    Column("cells", "cells"),
    Column("worst", "worst error", "{:+.2%}"),
    Column("mean", "mean |error|", "{:.2%}"),
]


def measure(cells: list[Cell]) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the cells, one group of processes per world; return rows, and cells that failed."""
    rows, failed = [], []
    for world in sorted({cell.world for cell in cells}):
        left = [cell for cell in cells if cell.world == world]
        while left:
            with Group(f"world {world}", "benchmarks.memory_matrix:Job", {}, world, QUIET) as group:
                group.ready()
                while left:
                    cell = left.pop(0)
                    try:
                        rows.append(_measured(group, cell))
                    except WorkerError as error:  # its ranks are gone: the others get new ones
                        print(f"{cell}: FAILED\n{error}", flush=True)
                        failed.append(str(cell))
                        break
    return rows, failed


def _measured(group: Group, cell: Cell) -> dict[str, Any]:
    start = time.perf_counter()
    answers = group.call("run", cell=asdict(cell))
    row = line(cell, answers, time.perf_counter() - start)
    errors = f"{row['error']:+.2%}, on the host {row['host_error']:+.2%}"
    print(f"{cell}: {errors}  {row['seconds']:.1f} s", flush=True)
    return row


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, default=COUNT)
    parser.add_argument("--only", default="", help="only cells with this text in their name")
    parser.add_argument("--kernels", choices=CHOICES["kernels"], help="only these kernels")
    options = parser.parse_args()
    cells = [
        cell
        for cell in cover(options.cells)
        if options.only in str(cell) and options.kernels in (None, cell.kernels)
    ]
    rows, failed = measure(cells)
    if rows:
        path = finish("memory-matrix", COLUMNS, rows, options).with_suffix(".md")
        path.write_text(_page(rows), encoding="utf-8")
        print(_summary(rows))
    if failed:
        raise SystemExit(f"{len(failed)} cells failed: {', '.join(failed)}")


def _summary(rows: list[dict[str, Any]]) -> str:
    worst = max(rows, key=lambda row: abs(row["error"]))
    name = ", ".join(f"{key} {worst[key]}" for key in CHOICES)
    within = sum(max(abs(r["error"]), abs(r["host_error"])) <= PROMISED for r in rows)
    mean = sum(abs(row["error"]) for row in rows) / len(rows)
    on_host = max((row["host_error"] for row in rows), key=abs)
    return (
        f"{within} of {len(rows)} cells are within {PROMISED:.0%} on the device and the host; the "
        f"worst is {worst['error']:+.2%} ({name}), the mean {mean:.2%}; on the host {on_host:+.2%}"
    )


def _page(rows: list[dict[str, Any]]) -> str:
    """Return the result as a page to read."""
    facts = machine()
    return (
        f"# Predicted and measured peak bytes of a rank\n\n{_summary(rows)}.\n\n"
        f"torch {facts['torch']}, {facts['cores']} cores, {facts['cpu']}; AdamW, one whole step in "
        "the steady state, of the rank with the largest error. "
        "`python -m benchmarks.memory_matrix`\n\n"
        f"{markdown(COLUMNS, rows)}\n## By choice\n\n{markdown(WORST, worst_of(rows))}"
    )


if __name__ == "__main__":
    main()
