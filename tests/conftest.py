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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write what the full matrix found, where it ran, as a table."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    path = matrix_table.write(Path(__file__).parents[1] / "build", reports)
    if path is not None:
        terminalreporter.write_line(f"the full matrix: {path}")
