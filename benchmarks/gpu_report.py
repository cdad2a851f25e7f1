"""Rows of `benchmarks.gpu`: printed and written as they are completed, shown as one table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import RESULTS, Column, _version, as_named, machine, show

_RAISED = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt)\b.*", re.MULTILINE)


@dataclass
class Row:
    """One line: the measurement of one system, and its target.

    value: None if `error` gives a reason, or if the row only has a system's own figures.
    low, high: the minimum and maximum over all rounds.
    """

    case: str
    system: str
    measure: str
    value: float | None = None
    form: str = "{:.3f}"
    target: str | None = None
    met: bool | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""
    error: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)

    def cells(self) -> dict[str, Any]:
        """Return the cells of the table."""
        numbers = {name: getattr(self, name) for name in ("value", "low", "high")}
        shown = {k: None if v is None else self.form.format(v) for k, v in numbers.items()}
        step_s, peak_bytes = self.figures.get("step_s"), self.figures.get("peak_bytes")
        return {
            "case": self.case,
            "system": self.system,
            "measure": self.measure,
            **shown,
            "target": self.target,
            "met": self.met,
            "step_ms": step_s and step_s * 1e3,
            "tokens_s": self.figures.get("tokens_s"),
            "peak_mib": peak_bytes and peak_bytes / 2**20,
            "note": self.note if self.error is None else f"FAILED: {summary(self.error)}",
        }


COLUMNS = [
    *as_named("case", "system", "measure", "value", "target", "met"),
    Column("low", "lowest"),
    Column("high", "highest"),
    Column("step_ms", "step ms", "{:.2f}"),
    Column("tokens_s", "tokens / s", "{:,.0f}"),
    Column("peak_mib", "peak MiB", "{:,.1f}"),
    *as_named("note"),
]


def summary(error: str) -> str:
    """Return the line of an error that names it: the last exception's, or else the last one."""
    found = [match.group() for match in _RAISED.finditer(error)]
    lines = [line for line in error.splitlines() if line.strip()]
    return (found or lines or ["no message"])[-1].strip()


class Results:
    """All rows so far, and the file that holds them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._rows: list[Row] = []
        self._options = options
        self._now = datetime.now(timezone.utc)
        self._facts = machine() | ({} if options.rehearse else _gpu())
        self._path = Path(options.out) if options.out else None
        if self._path is None and not options.rehearse:  # a rehearsal's figures mean nothing
            RESULTS.mkdir(exist_ok=True)
            self._path = RESULTS / f"gpu-{self._now:%Y%m%d-%H%M%S}.json"

    @property
    def failed(self) -> bool:
        return any(row.error is not None for row in self._rows)

    def add(self, row: Row) -> None:
        """Print a row, and write it with all before it."""
        if row.error is not None and row.error not in {r.error for r in self._rows}:
            # In full; the table only has room for one line.
            print(row.error, file=sys.stderr, flush=True)
        self._rows.append(row)
        cells = {column.title: column.cell(row.cells()) for column in COLUMNS[3:]}
        said = ", ".join(f"{title} {cell}" for title, cell in cells.items() if cell)
        print(f"{row.case}, {row.system}: {row.measure}: {said}", flush=True)
        if self._path is None:
            return
        content = {
            "when": f"{self._now:%Y-%m-%d %H:%M} UTC",
            "rehearsal": self._options.rehearse,
            "machine": self._facts,
            "options": vars(self._options),
            "results": [asdict(row) for row in self._rows],
        }
        beside = self._path.with_name(f"{self._path.name}.part")
        beside.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(beside, self._path)  # an interrupted run keeps the earlier rows

    def finish(self) -> None:
        """Show the table, and print where its file is."""
        where = self._facts.get("gpu") or f"{platform.machine()} CPU"
        title = f"gpu: torch {self._facts['torch']}, {where}, stage {self._options.stage}"
        if self._options.rehearse:
            title = f"REHEARSAL on a CPU, its figures mean nothing; {title}"
        elif self._options.rounds < 8:
            title += f"; {self._options.rounds} rounds, for a look only"
        show(title, COLUMNS, [row.cells() for row in self._rows])
        if self._path is not None:
            print(f"written to {self._path}")


def _gpu() -> dict[str, Any]:
    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name,
        "gpu_memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": _version("triton"),
    }
