"""Libraries that few tests need: TRL and TensorBoard, which `make integrations` installs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from jobs import check_weights, launched, numbers
from torch import nn

import zerofx


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the package trl")
@pytest.mark.parametrize("is_packed", [False, True])
def test_sft_trains_as_with_distributed_data_parallel(tmp_path: Path, is_packed: bool) -> None:
    runs = [{"name": kind, "kind": kind, "is_packed": is_packed} for kind in ("plain", "ours")]
    found = launched("sft_job.py", 2, tmp_path, runs)
    plain, ours = found["plain"], found["ours"]
    assert len(plain["logged"]) == 10
    assert numbers(ours, "loss") == pytest.approx(numbers(plain, "loss"), rel=1e-6)
    # AdamW divides the rounding noise of the bias of keys by its own size
    norms = numbers(plain, "grad_norm")
    assert numbers(ours, "grad_norm") == pytest.approx(norms, rel=5e-6 if is_packed else 1e-6)
    check_weights(ours, plain)


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
