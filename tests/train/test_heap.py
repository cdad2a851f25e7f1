"""Steps on a CPU reuse the memory of the steps before: page faults of processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
JOB = """
import json, resource, statistics, sys, torch, zerofx
from torch import nn
from zerofx.process import keep_heap
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
)
model(torch.randn(2, 3, 32, 32))
model = zerofx.compile(model, json.loads(sys.argv[1]), device="cpu")
asked = keep_heap.cache_info().currsize == 1
optimizer = zerofx.optim.AdamW(model.parameters())
x = torch.randn(64, 3, 32, 32)
def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
for _ in range(12):
    step()
faults = []
for _ in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
# the median: a host short of memory takes pages away for a while, and steps fault them in again
faults = statistics.median(faults)
print(json.dumps({"faults": faults, "asked": asked, "kept": asked and keep_heap()}))
"""
PLAN = {"stage": 0, "kernels": "aten"}
OURS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def trained(plan: dict[str, Any], **environment: str) -> dict[str, Any]:
    inherited = {name: value for name, value in os.environ.items() if name not in OURS}
    done = subprocess.run(
        [sys.executable, "-c", JOB, json.dumps(plan)],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_step_takes_no_new_memory_from_the_system() -> None:
    found = trained(PLAN)
    assert found["kept"] and found["faults"] < 200


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072:glibc.malloc.mmap_threshold=131072"},
    ],
)
def test_settings_of_the_environment_win(environment: dict[str, str]) -> None:
    found = trained(PLAN, **environment)
    assert found["asked"] and not found["kept"] and found["faults"] > 2000


def test_with_a_part_of_the_model_on_a_disk_memory_is_given_back(tmp_path: Path) -> None:
    tiers = {"optimizer": "nvme", "path": str(tmp_path)}
    assert not trained({**PLAN, "stage": 3, "offload": tiers})["asked"]
