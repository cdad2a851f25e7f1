"""Libraries that few tests need: TRL and TensorBoard, which `make integrations` installs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx

ROOT = Path(__file__).parents[2]
JOB = ROOT / "tests" / "support" / "cases" / "sft_job.py"


def trained(kind: str, out: Path, *options: str) -> Any:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(JOB), str(out), kind, *options],
        capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    return json.loads((out / f"{kind}.json").read_text())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the package trl")
@pytest.mark.parametrize("options", [(), ("packed",)])
def test_sft_trains_as_with_distributed_data_parallel(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    plain, ours = (trained(kind, tmp_path, *options) for kind in ("plain", "ours"))
    assert len(plain["logged"]) == 10
    for mine, theirs in zip(ours["logged"], plain["logged"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        # AdamW divides the rounding noise of the bias of keys by its own size
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-6)
    assert ours["weights"] == pytest.approx(plain["weights"], rel=1e-6)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard's own reader finds: step and value of each name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard"
)
@pytest.mark.filterwarnings("ignore")  # of TensorBoard
def test_tensorboard_reads_what_a_meter_and_an_engine_write(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    from zerofx.integrations import deepspeed

    model = zerofx.compile(nn.Linear(4, 1), zerofx.Plan(kernels="aten"))
    meter = zerofx.meter(model)
    seen = []
    with SummaryWriter(tmp_path / "meter") as writer:
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            numbers = meter.step(samples=2)
            seen.append(numbers["samples_per_s"])
            for name, value in numbers.items():
                if value is not None:
                    writer.add_scalar(name, value, step)
    found = scalars(tmp_path / "meter")["samples_per_s"]
    assert [step for step, _ in found] == [0, 1, 2]
    assert [value for _, value in found] == pytest.approx(seen, rel=1e-6)

    net = nn.Linear(4, 1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "engine"},
    }
    engine = deepspeed.initialize(model=net, config=config, plan={"kernels": "aten"})[0]
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(2, 4)).square().sum()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    found = scalars(tmp_path / "engine")["Train/Samples/train_loss"]
    assert [step for step, _ in found] == [2, 4, 6]
    assert [value for _, value in found] == pytest.approx(losses, rel=1e-6)
