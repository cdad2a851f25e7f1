"""Training jobs in processes of their own, and what they have logged.

A job is a script of tests/support/cases that takes the folder for its results and the JSON of one
run after another. It writes `{"logged": [{"step": 1, "loss": 0.5}], "weights": {name: values}}` to
`<name of the run>.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "support" / "cases"

Logged = dict[tuple[int, str], float]


def launched(job: str, ranks: int, out: Path, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Run a job under torchrun; return what each run of it has found, by name."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *launch, str(CASES / job), str(out), *map(json.dumps, runs)],
        capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    return {run["name"]: json.loads((out / f"{run['name']}.json").read_text()) for run in runs}


def numbers(found: dict[str, Any], *kinds: str) -> Logged:
    """Return what was logged, by step and name; all of it, or of some names."""
    return {
        (entry["step"], name): value
        for entry in found["logged"]
        for name, value in entry.items()
        if name != "step" and (not kinds or name in kinds)
    }


def check_equal(found: dict[str, Any], wanted: dict[str, Any], first: int = 0) -> None:
    """Compare what was logged after step `first`, and the weights at the end."""
    mine, theirs = numbers(found), numbers(wanted)
    assert mine.keys() == {key for key in theirs if key[0] > first}
    for key, value in mine.items():
        assert value == pytest.approx(theirs[key], rel=1e-6, abs=1e-12), key
    check_weights(found, wanted)


def check_weights(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare the weights at the end, tensor by tensor."""
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, values in wanted["weights"].items():
        there, own = (_with_gradient(name, each) for each in (values, found["weights"][name]))
        assert (own - there).norm() <= 2e-6 * there.norm(), name


def _with_gradient(name: str, values: Any) -> Tensor:
    """Return a weight of GPT-2 without the bias of keys.

    Softmax cancels that bias, so its gradient is rounding noise, which AdamW divides by its own
    size: it moves by the learning rate in a direction that nothing determines.
    """
    found = torch.tensor(values).double()
    if not name.endswith("c_attn.bias"):
        return found
    query, _, value = found.chunk(3)
    return torch.cat([query, value])


def error_of(found: dict[str, Any], exact: dict[str, Any], kind: str) -> float:
    """Return the root of the summed squared differences of all values of a kind."""
    mine = numbers(found, kind)
    pairs = [(mine[key], value) for key, value in numbers(exact, kind).items()]
    return float(torch.tensor(pairs).double().diff(dim=1).norm())
