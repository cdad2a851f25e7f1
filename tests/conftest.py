"""What every test gets: one thread, repeatable examples, and a reason where a GPU is missing."""

from __future__ import annotations

import os

# Before torch is imported: its thread pools are made once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path
from typing import Any

import matrix_table
import pytest
import torch
from hypothesis import HealthCheck, settings
from nvme_cases import disk, engine, file, kept, store_engine  # noqa: F401  (fixtures)
from pool import pool  # noqa: F401  (a fixture: real gloo ranks)
from triton_interpreter import interpreted  # noqa: F401  (a fixture: a process of its own)

# No deadlines: a busy machine is not a failure. Derandomized: a red run is red again.
settings.register_profile(
    "zerofx",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("zerofx")


LIKELY_ALL = 2000  # tests, from which on nothing was left out of the collection


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_slow_cells(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _mark_slow_cells(items: list[pytest.Item]) -> None:
    """Mark the cells of slow_cells.txt, each of which must be there if its file was collected."""
    lines = (Path(__file__).parent / "slow_cells.txt").read_text().splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    found = {f"{item.path.name}::{item.name}": item for item in items}
    for cell in listed & found.keys():
        found[cell].add_marker(pytest.mark.slow)
    whole = len(items) > LIKELY_ALL
    assert not whole or listed <= found.keys(), sorted(listed - found.keys())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write what the full matrix found, where it ran, as a table."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    path = matrix_table.write(Path(__file__).parents[1] / "build", reports)
    if path is not None:
        terminalreporter.write_line(f"the full matrix: {path}")
