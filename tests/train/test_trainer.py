"""transformers' Trainer, unmodified: it trains and evaluates a compiled model on 2 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
JOB = ROOT / "tests" / "support" / "cases" / "trainer_job.py"


def trained(kind: str, out: Path) -> Any:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launch, str(JOB), kind, str(out)], capture_output=True, text=True, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((out / f"{kind}.json").read_text())


@pytest.mark.slow
def test_trainer_trains_as_with_distributed_data_parallel(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    plain, compiled = trained("plain", tmp_path), trained("compiled", tmp_path)
    assert sum("loss" in entry for entry in plain["logged"]) == 4
    assert sum("eval_loss" in entry for entry in plain["logged"]) == 2
    for mine, theirs in zip(compiled.pop("logged"), plain.pop("logged"), strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5)
    assert compiled == plain
    assert plain["same"] and plain["ranks"] == 2 and plain["labels"] == ["labels"]
