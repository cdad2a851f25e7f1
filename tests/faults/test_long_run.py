"""examples/long_run.py goes on by itself after a rank is killed, and after the job was ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import zerofx
from zerofx.errors import ArgumentError

ROOT = Path(__file__).parents[2]
SLOWLY = f"""
import sys, time
sys.path.insert(0, "{ROOT / "examples"}")
import long_run, zerofx
is_requested = zerofx.Preemption.is_requested
zerofx.Preemption.is_requested = lambda self: time.sleep(0.1) or is_requested(self)
long_run.main(sys.argv[1])
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAST = "step 40  loss 3.791"


def start(folder: Path) -> subprocess.Popen[str]:
    script = folder / "slowly.py"
    script.write_text(SLOWLY)
    return subprocess.Popen(
        [*TORCHRUN, "--max-restarts=3", str(script), str(folder / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(folder: Path, name: str) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "run" / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.05)


def ranks_of(torchrun: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found += [int(stat.parent.name)] if int(fields[1]) == torchrun else []
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_it_goes_on_after_a_rank_was_killed(tmp_path: Path, rank: int) -> None:
    job = start(tmp_path)
    wait_for(tmp_path, "step-000010")
    os.kill(ranks_of(job.pid)[rank], signal.SIGKILL)
    said, errors = job.communicate(timeout=240)
    assert job.returncode == 0, errors[-3000:]
    assert said.splitlines()[-1] == LAST
    assert said.count("step 40") == 1


@pytest.mark.slow
def test_it_saves_within_seconds_of_sigterm(tmp_path: Path) -> None:
    job = start(tmp_path)
    wait_for(tmp_path, "step-000010")
    job.terminate()
    began = time.monotonic()
    said, errors = job.communicate(timeout=60)
    assert time.monotonic() - began < 20, errors[-3000:]
    steps = [int(p.name.partition("-")[2]) for p in (tmp_path / "run").glob("step-*")]
    assert 10 < max(steps) < 40 and "step 40" not in said
    last = (tmp_path / "run" / "latest").resolve().name
    assert last == f"step-{max(steps):06d}"
    again = start(tmp_path)
    said, errors = again.communicate(timeout=240)
    assert again.returncode == 0, errors[-3000:]
    assert said.splitlines()[-1] == LAST and "step 10" not in said


def asked_on_one_rank() -> list[bool]:
    model = zerofx.compile(nn.Linear(2, 2), zerofx.Plan(stage=3, kernels="aten"))
    preemption = zerofx.Preemption(model, [signal.SIGUSR2])
    found = []
    for number in range(5):
        model(torch.ones(1, 2)).sum().backward()
        if number == 2 and model.zerofx.world.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        found.append(preemption.is_requested())
    preemption.close()
    return found


def test_all_ranks_hear_of_it_at_one_step(pool: Pool) -> None:
    assert pool.run(2, asked_on_one_rank) == [[False, False, True, True, True]] * 2


def test_signals_are_given_back() -> None:
    model: Any = zerofx.compile(nn.Linear(2, 2), zerofx.Plan(kernels="aten"))
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda *_: seen.append("mine"))
    try:
        preemption = zerofx.Preemption(model, [signal.SIGUSR2])
        assert not preemption.is_requested()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert preemption.is_requested() and not seen
        os.kill(os.getpid(), signal.SIGUSR2)  # the second one goes to whoever had it
        assert seen == ["mine"]
    finally:
        signal.signal(signal.SIGUSR2, before)
    with pytest.raises(ArgumentError, match="Linear that is not compiled"):
        zerofx.Preemption(nn.Linear(2, 2))
