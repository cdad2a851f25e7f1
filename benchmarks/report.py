"""Tables on the terminal, JSON in benchmarks/results/, and the machine of the measurements."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Column:
    """One column: the result's key, its title, and its number format."""

    key: str
    title: str
    form: str = "{}"

    def cell(self, row: dict[str, Any]) -> str:
        """Format the row's value; a missing value gives an empty cell."""
        value = row[self.key]
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "NO"
        return self.form.format(value)


def as_named(*keys: str) -> list[Column]:
    """Return columns whose titles are their keys."""
    return [Column(key, key) for key in keys]


def _proc(path: str, key: str) -> str:
    """Return the value of the first `key: value` line of a /proc file, or "" if there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"


def machine() -> dict[str, Any]:
    """Return facts that the figures depend on: processor, memory, versions, load before the run."""
    return {
        "cpu": _proc("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory": _proc("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zerofx": _version("zerofx"),
        "load_average": os.getloadavg(),
    }


def source() -> dict[str, Any]:
    """Return what is measured: the commit, git's digest of zerofx/, and whether zerofx/ differs.

    Outside of a git checkout there is no commit and no digest.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(RESULTS.parent), *words]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        return ended.stdout.strip()

    return {
        "commit": git("rev-parse", "--short=8", "HEAD") or None,
        "package": git("rev-parse", "HEAD:zerofx") or None,
        "edited": bool(git("status", "--porcelain", "--", ":/zerofx")),
    }


def need_memory(needed_bytes: int) -> None:
    """Stop before a run that would swap, because it would measure the swapping."""
    free = _proc("/proc/meminfo", "MemAvailable")
    if free and int(free.split()[0]) * 1024 < needed_bytes:
        free_gib = int(free.split()[0]) / 2**20
        raise SystemExit(
            f"this run needs about {needed_bytes / 2**30:.1f} GiB but {free_gib:.1f} GiB are free. "
            "Choose fewer --systems or smaller --sizes."
        )


def show(title: str, columns: list[Column], rows: list[dict[str, Any]]) -> None:
    """Print the table, at full width even if the output is a file."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column.title, justify="left" if column.form == "{}" else "right")
    section = None
    for row in rows:
        if section is not None and row[columns[0].key] != section:
            table.add_section()
        section = row[columns[0].key]
        table.add_row(*(column.cell(row) for column in columns))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def finish(
    name: str,
    columns: list[Column],
    rows: list[dict[str, Any]],
    options: argparse.Namespace,
    **more: Any,
) -> Path:
    """Show the table and write it, with the machine, to benchmarks/results/; return the file.

    more: additional entries of the file.
    """
    now = datetime.now(timezone.utc)
    facts = machine()
    show(f"{name}: torch {facts['torch']}, {facts['cores']} cores, {facts['cpu']}", columns, rows)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{now:%Y%m%d-%H%M%S}.json"
    content = {"when": f"{now:%Y-%m-%d %H:%M} UTC", "source": source(), "machine": facts}
    content |= {"options": vars(options)} | more | {"results": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path


def markdown(columns: list[Column], rows: list[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    head = [[c.title for c in columns], ["---" if c.form == "{}" else "---:" for c in columns]]
    lines = head + [[c.cell(row) for c in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
