"""The GPU benchmark, rehearsed: all of its code at tiny sizes on the CPU, in its own processes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TRAININGS = {
    "small": {"torch.compile", "zerofx", "zerofx-graph"},
    "loss-head": {"zerofx-bitwise", "zerofx-fast"},
    "gpt": {"torch.compile", "fsdp2", "zerofx"},
}
COMPARED = {
    ("adamw", "zerofx"): ">= 0.90",
    ("adamw", "torch fused"): None,
    ("small", "zerofx-graph"): ">= 1.50",
    ("small", "zerofx"): None,
    ("loss-head", "zerofx-fast"): "<= 1.00",
    ("gpt", "zerofx"): "<= 1.00",
}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def rehearse(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    out = folder / "gpu.json"
    done = run("--rehearse", "--out", str(out), *options)
    content = json.loads(out.read_text())
    assert content["rehearsal"] and content["machine"]["torch"] == torch.__version__
    return done, content["results"]


def numbers(value: Any) -> Iterator[float]:
    """Yield every number within a JSON value."""
    if isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif isinstance(value, (int, float)):
        yield value


@pytest.mark.parametrize(
    "only",
    [
        ("adamw",),
        pytest.param(("gpt",), marks=pytest.mark.slow),
        pytest.param(("small", "loss-head"), marks=pytest.mark.slow),
    ],
    ids=",".join,
)
def test_a_rehearsal_gives_every_row(only: tuple[str, ...], tmp_path: Path) -> None:
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    done, rows = rehearse(tmp_path, "--only", ",".join(only))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REHEARSAL" in done.stdout
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before
    assert all(map(math.isfinite, numbers(rows)))

    own = {(r["case"], r["system"]): r for r in rows if r["measure"] == "training step"}
    memory = {(r["case"], r["system"]): r for r in rows if r["measure"].startswith("predicted")}
    trained = {(case, system) for case in only for system in TRAININGS.get(case, ())}
    assert set(own) == trained
    assert set(memory) == {(case, system) for case, system in trained if "zerofx" in system}
    for row in own.values():
        assert row["figures"]["step_s"] > 0 and row["figures"]["peak_bytes"] > 0
        assert len(row["rounds"]["step_s"]) == 2
    for row in memory.values():
        assert row["met"] == (abs(row["value"]) <= 0.05)

    compared = [row for row in rows if row not in [*own.values(), *memory.values()]]
    targets = {(r["case"], r["system"]): r["target"] for r in reversed(compared)}
    assert targets == {where: target for where, target in COMPARED.items() if where[0] in only}
    for row in compared:
        assert row["low"] <= row["value"] <= row["high"]
        assert (row["met"] is None) == (row["target"] is None)


@pytest.mark.slow
def test_a_failure_stays_in_its_rows(tmp_path: Path) -> None:
    done, rows = rehearse(tmp_path, "--only", "adamw,loss-head", "--stage", "7")
    assert done.returncode == 1
    assert "FAILED: zerofx.errors.PlanError: Plan.stage = 7: allowed are 0, 1, 2, 3" in done.stdout
    failed = {(row["case"], row["error"] is not None) for row in rows}
    assert failed == {("adamw", False), ("loss-head", True)}


def test_no_time_left(tmp_path: Path) -> None:
    done, rows = rehearse(tmp_path, "--only", "loss-head", "--limit", "1e-9")
    assert done.returncode == 1
    assert rows and all("not run: --limit" in row["error"] for row in rows)


def test_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a CUDA device")
    done = run()
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr and "--rehearse" in done.stderr


def test_unknown_rows() -> None:
    done = run("--rehearse", "--only", "adam")
    assert done.returncode == 2
    assert "--only: unknown adam; known adamw, small, loss-head, gpt" in done.stderr
