"""Scripts written for DeepSpeed: engine, schedulers, data, checkpoints, and the real one beside."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import check_equal, error_of, launched, numbers
from pool import Pool
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import zerofx
from zerofx.errors import ArgumentError, GradientError, OptimizerError, PlanError
from zerofx.integrations import deepspeed, schedules
from zerofx.plan.ds_config import read_ds_config

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2}},
}
ATEN = {"kernels": "aten"}
DATA = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).square().mean()


def begun(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    return deepspeed.initialize(model=model, config=config, plan=ATEN)[0]


def update(engine: Any, rows: Tensor) -> None:
    """Run one update over rows of all ranks: 2 of each rank in each of 2 backwards."""
    rank, world = engine.global_rank, engine.world_size
    for micro in rows.split(2 * world):
        engine.backward(engine(micro[rank * 2 : rank * 2 + 2]))
        engine.step()


def plain(num_updates: int, rows: int) -> tuple[nn.Module, list[float], list[float]]:
    """Train the same without DeepSpeed: return the model, norms, and rates of the updates."""
    torch.manual_seed(0)
    model, norms, rates = Net(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = schedules.WarmupLR(optimizer, warmup_max_lr=1e-2, warmup_num_steps=2)
    for number in range(num_updates):
        rates.append(scheduler.get_last_lr()[0])
        model(DATA[number * rows :][:rows]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, norms, rates


def on_a_rank(folder: str, stage: int) -> dict[str, Any]:
    engine = begun(zero_optimization={"stage": stage})
    norms = []
    for number in range(2):
        update(engine, DATA[number * 8 :][:8])
        norms.append(engine.get_global_grad_norm())
    state = dict(engine.module.state_dict())
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    engine.save_16bit_model(folder)
    with deepspeed.zero.GatheredParameters(engine.module.head.weight, modifier_rank=0):
        assert engine.module.head.weight.shape == (1, 8)
        if engine.global_rank == 0:
            engine.module.head.weight.data.zero_()
    assert not engine.module.state_dict()["head.weight"].any()
    other = begun()
    path, client = other.load_checkpoint(folder)
    assert path == os.path.join(folder, "global_step2") and client == {"epoch": 3}
    again = dict(other.module.state_dict())
    assert all(torch.equal(again[name], value) for name, value in state.items())
    counts = [other.global_steps, other.micro_steps, other.global_samples, other.get_lr()[0]]
    return {"state": state, "norms": norms, "counts": counts}


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_script_on_two_ranks_trains_saves_and_goes_on(
    pool: Pool, tmp_path: Path, stage: int
) -> None:
    found = pool.run(2, on_a_rank, str(tmp_path), stage)[0]
    model, norms, rates = plain(2, 8)
    assert found["norms"] == pytest.approx(norms, rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-5, atol=1e-6)
    assert rates == [0.0, 0.0]  # of the updates, as under DeepSpeed
    assert found["counts"] == [2, 0, 16, 0.01]
    assert (tmp_path / "latest").read_text() == "global_step2"
    whole = torch.load(tmp_path / "pytorch_model.bin")
    assert all(torch.equal(whole[name], value) for name, value in found["state"].items())


def alone(folder: str) -> str:
    engine = begun()
    with pytest.raises(zerofx.errors.ZerofxError) as caught:
        if engine.global_rank == 0:
            engine.save_checkpoint(folder)
        else:
            engine(DATA[:2])
    return str(caught.value)


def test_a_save_of_one_rank_alone_is_named(pool: Pool, tmp_path: Path) -> None:
    began = time.perf_counter()
    for said in pool.run(2, alone, str(tmp_path / "run")):
        assert "rank 0" in said and "save" in said
    assert time.perf_counter() - began < 60 and not (tmp_path / "run").exists()


def test_lamb_and_one_cycle_train_as_without_an_engine() -> None:
    """As in DeepSpeed's BERT tutorial, whose config the two sections are from."""
    lamb = {"lr": 1e-2, "weight_decay": 0.01, "max_coeff": 0.3, "min_coeff": 0.01}
    cycle = {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-2, "cycle_first_step_size": 2,
             "decay_step_size": 1, "decay_lr_rate": 0.5}  # fmt: skip
    engine = begun(
        optimizer={"type": "Lamb", "params": {**lamb, "max_grad_norm": 0.1}},
        gradient_clipping=None,
        scheduler={"type": "OneCycle", "params": cycle},
    )
    torch.manual_seed(0)
    plain = Net()
    optimizer = zerofx.optim.Lamb(plain.parameters(), **lamb)  # type: ignore[arg-type]
    scheduler = schedules.OneCycle(optimizer, **cycle)
    for number in range(6):
        rows = DATA[number * 2 : number * 2 + 4]
        assert engine.get_lr() == [optimizer.param_groups[0]["lr"]]
        update(engine, rows)
        plain(rows).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(engine.module.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_boundaries_are_counted_set_or_left_to_the_script() -> None:
    engine = begun()
    assert isinstance(engine.module, zerofx.CompiledModule)
    with pytest.raises(GradientError, match="no_sync"), engine.no_sync():
        engine.step()
    for is_boundary in (False, True):
        assert engine.is_gradient_accumulation_boundary() is is_boundary
        engine.backward(engine(DATA[:2]))
        engine.step()
        assert engine.was_step_applied() is is_boundary
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(DATA[:2]))
    engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 3, 8)
    engine.set_train_batch_size(8)
    assert engine.get_batch_info() == (8, 2, 4)
    own = begun(managed_gradient_accumulation=False)
    for _ in range(3):
        own.backward(own(DATA[:2]))
    own.step()
    assert own.was_step_applied() and own.global_samples == 6
    with pytest.raises(GradientError, match="managed_gradient_accumulation"):
        own.set_gradient_accumulation_boundary(True)


def test_fp16_steps_that_overflow_are_skipped() -> None:
    scale = {"enabled": True, "initial_scale_power": 100, "hysteresis": 1}
    engine = begun(fp16=scale, gradient_accumulation_steps=1)
    engine.backward(engine(DATA[:2]))
    engine.step()
    assert (engine.skipped_steps, engine.global_steps) == (1, 1)
    assert not engine.was_step_applied() and engine.lr_scheduler.last_batch_iteration == -1
    assert engine.loss_scale() == 2.0**99 and engine.fp16_enabled()


def test_data_loaders_are_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = {**CONFIG, "csv_monitor": csv, "steps_per_print": 1, "dataloader_drop_last": True}
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=Net(), config=config, training_data=TensorDataset(DATA[:15]), plan=ATEN
    )
    batches = [batch for (batch,) in loader]
    assert len(batches) == 7 and all(batch.shape == (2, 4) for batch in batches)
    for batch in batches[:2]:
        engine.backward(engine(batch))
        engine.step()
    assert "zerofx: step=1, skipped=0, lr=[0.0]" in capfd.readouterr().err
    files = {path.name: path.read_text().split() for path in (tmp_path / "job").iterdir()}
    assert files["Train_Samples_lr.csv"] == ["step,lr", "4,0.0"]
    assert files["Train_Samples_train_loss.csv"][0] == "step,train_loss"
    assert optimizer is engine.optimizer and scheduler is engine.lr_scheduler

    class Rows(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter(DATA[:4])

    assert [batch.shape for batch in engine.deepspeed_io(Rows())] == [(2, 4), (2, 4)]


def test_what_is_monitored_reaches_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs the package wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    monitors = {"csv_monitor": csv, "wandb": {"enabled": True, "project": "tried"}}
    config = {**CONFIG, **monitors, "gradient_accumulation_steps": 1}
    engine = deepspeed.initialize(model=Net(), config=config, plan=ATEN)[0]
    for _ in range(3):
        engine.backward(engine(DATA[:2]))
        engine.step()
    wandb.finish()
    written = next(tmp_path.glob("wandb/offline-run-*/*.wandb")).read_bytes()
    rows = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().split()[1:]
    assert len(rows) == 3
    for row in rows:
        assert row.partition(",")[2].encode() in written
    assert b"Train/Samples/train_loss" in written and b"Train/Samples/lr" in written


def test_what_a_script_may_bring_itself(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"train_batch_size": 4, "gradient_clipping": 0}))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(config)])
    model = Net()
    groups = [{"params": model.body.parameters(), "lr": 0.5}, {"params": model.head.parameters()}]
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args, model, model_parameters=groups, plan=ATEN,
        optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
        lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, 0.1),
    )  # fmt: skip
    engine.backward(engine(DATA))
    engine.step()
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert optimizer is engine.optimizer
    assert engine.get_lr() == pytest.approx([0.05, 0.01])
    assert engine.get_global_grad_norm() > 0 and engine.head is engine.module.head
    with deepspeed.zero.Init(remote_device="meta"):
        on_meta = Net()
    assert on_meta.head.weight.is_meta
    ready = deepspeed.initialize(model=on_meta, config=read_ds_config(CONFIG), plan=ATEN)[0]
    ready.backward(ready(DATA[:2]))
    with deepspeed.zero.GatheredParameters(Net().parameters()):  # of no engine: whole anyway
        pass


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"has no get_data_parallel_group\(\)"):
        deepspeed.initialize(model=Net(), config=CONFIG, mpu=object())
    divided = SimpleNamespace(get_pipeline_model_parallel_world_size=lambda: 2)
    with pytest.raises(
        ArgumentError, match=r"get_pipeline_model_parallel_world_size\(\) is 2: the"
    ):
        deepspeed.initialize(model=Net(), config=CONFIG, mpu=divided)
    sliced = SimpleNamespace(
        get_model_parallel_world_size=lambda: 2, get_data_parallel_group=lambda: None
    )
    with pytest.raises(ArgumentError, match=r"is 2, and no parameter of Net is marked as a slice"):
        deepspeed.initialize(model=Net(), config=CONFIG, mpu=sliced)
    with pytest.raises(ArgumentError, match="mesh_param was given"):
        deepspeed.initialize(model=Net(), config=CONFIG, mesh_param=(1, 1))
    with pytest.raises(ArgumentError, match="there is no config"):
        deepspeed.initialize(model=Net())
    with pytest.raises(ArgumentError, match="config and config_params are given"):
        deepspeed.initialize(model=Net(), config=CONFIG, config_params=CONFIG)
    with pytest.raises(ArgumentError, match="model is of type NoneType"):
        deepspeed.initialize(config=CONFIG)
    with pytest.raises(PlanError, match="train_batch_size"):
        deepspeed.initialize(model=Net(), config={**CONFIG, "train_batch_size": 16})
    with pytest.raises(PlanError, match=r"scheduler\.params"):
        begun(scheduler={"type": "StepLR", "params": {"step": 1}})
    with pytest.raises(PlanError, match=r"scheduler\.params\.warmup_min_lr has 3 values"):
        begun(scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": [0, 0, 0]}})
    engine = begun(optimizer=None, scheduler=None)
    with pytest.raises(OptimizerError, match="no optimizer"):
        engine.backward(engine(DATA[:2]))
    with pytest.warns(UserWarning, match="latest"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    with pytest.raises(ArgumentError, match="load_module_strict"):
        engine.load_checkpoint(tmp_path, load_module_strict=False)
    gathered = deepspeed.zero.GatheredParameters([], modifier_rank=1)
    with pytest.raises(ArgumentError, match="modifier_rank=1"), gathered:
        pass


def with_mpu(gives_mpu: bool) -> list[float]:
    """Train with a data-parallel group of both ranks, as Megatron's parallel state has."""
    torch.manual_seed(0)
    deepspeed.init_distributed()
    group = torch.distributed.new_group([0, 1])
    mpu = SimpleNamespace(
        get_model_parallel_world_size=lambda: 1, get_data_parallel_group=lambda: group
    )
    config = {**CONFIG, "train_batch_size": 8, "gradient_accumulation_steps": 2}
    engine = deepspeed.initialize(
        model=Net(), config=config, mpu=mpu if gives_mpu else None, plan=ATEN
    )[0]
    found = []
    for step in range(4):
        loss = engine(DATA[2 * torch.distributed.get_rank() + step :][:2])
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    assert engine.module._zerofx.world.shard_size == 2 and engine.global_steps == 2
    return found


def test_an_mpu_becomes_a_mesh(pool: Pool) -> None:
    assert pool.run(2, with_mpu, True) == pool.run(2, with_mpu, False)


def rates(kind: Any, steps: int, lr: float = 0.1, **params: Any) -> list[float]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, found = kind(optimizer, **params), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return found


def test_schedules_start_as_deepspeeds() -> None:
    linear = {"warmup_type": "linear", "warmup_num_steps": 4}
    up = [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    assert rates(schedules.WarmupLR, 7, 1.0, **linear) == [*up, 1.0]
    assert rates(
        schedules.WarmupDecayLR, 9, warmup_max_lr=1.0, total_num_steps=6, **linear
    ) == [*up, 0.5, 0.0, 0.0]  # fmt: skip
    cosine = rates(schedules.WarmupCosineLR, 9, 1.0, total_num_steps=6, cos_min_ratio=0.1, **linear)
    assert cosine == pytest.approx([*up[:-1], 0.55, 0.1, 0.1, 0.1])
    cycle = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2}
    decay = {"decay_step_size": 1, "decay_lr_rate": 1.0}
    assert rates(schedules.OneCycle, 7, **cycle, **decay) == [1.0, 2.0, 3.0, 2.0, 1.0, 0.5, 1 / 3]
    assert rates(schedules.LRRangeTest, 3, lr_range_test_min_lr=1.0, lr_range_test_step_size=2) == [
        1.0, 1.5, 2.0]  # fmt: skip
    assert rates(schedules.WarmupLR, 4, 1.0, warmup_num_steps=4)[2] == 0.5  # log 2 / log 4


def test_one_cycle_moves_momentum_the_other_way() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    scheduler = schedules.OneCycle(optimizer, 1.0, 3.0, cycle_first_step_size=2)
    found = []
    for _ in range(4):
        found.append(optimizer.param_groups[0]["betas"][0])
        scheduler.step()
    assert found == pytest.approx([0.8, 0.85, 0.8, 0.85])
    scheduler.load_state_dict({"last_batch_iteration": 7})
    assert scheduler.state_dict() == {"last_batch_iteration": 7}


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the package deepspeed"
)


@pytest.mark.slow
def test_engines_train_as_with_distributed_data_parallel(tmp_path: Path) -> None:
    """20 updates of 4 micro-batches, clipped, evaluated; resumed by other ranks, other stages."""
    found = launched("engine_job.py", 2, tmp_path, [
        {"name": "plain", "kind": "plain"},
        {"name": "three", "kind": "ours"},
        {"name": "one", "kind": "ours", "config": {"zero_optimization": {"stage": 1}}},
    ])  # fmt: skip
    plain = found.pop("plain")
    assert len(numbers(plain, "loss")) == 20 and len(numbers(plain, "eval_loss")) == 4
    two = {"zero_optimization": {"stage": 2}}
    again = launched("engine_job.py", 1, tmp_path, [
        {"name": "three-two", "kind": "ours", "resume": "three", "config": two},
        {"name": "alone", "kind": "ours"},
    ])  # fmt: skip
    again |= launched("engine_job.py", 2, tmp_path, [
        {"name": "alone-three", "kind": "ours", "resume": "alone"}
    ])  # fmt: skip
    for name, each in (found | again).items():
        check_equal(each, plain, first=10 if "-" in name else 0)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_same_script_under_deepspeed(stage: int, tmp_path: Path) -> None:
    """20 updates, and the last 10 of them again by an engine that has loaded a checkpoint."""
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    kinds = ("theirs", "ours")
    runs = [{"name": kind, "kind": kind, "config": config} for kind in kinds]
    later = [{**run, "name": f"{run['kind']}-later", "resume": run["kind"]} for run in runs]
    found = launched("engine_job.py", 2, tmp_path, runs)
    found |= launched("engine_job.py", 2, tmp_path, later)
    for part in ("", "-later"):
        theirs, ours = (found[f"{kind}{part}"] for kind in kinds)
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-6, abs=1e-12)
        assert numbers(ours, "lr") == pytest.approx(numbers(theirs, "lr"), rel=1e-12, abs=0)
        assert ours["counts"] == theirs["counts"]


@pytest.mark.slow
@needs_deepspeed
def test_bf16_is_as_exact_as_deepspeeds(tmp_path: Path) -> None:
    half = {"bf16": {"enabled": True}}
    found = launched("engine_job.py", 2, tmp_path, [
        {"name": "exact", "kind": "plain", "double": True},
        {"name": "theirs", "kind": "theirs", "config": half},
        {"name": "ours", "kind": "ours", "config": half},
    ])  # fmt: skip
    for kind in ("loss", "eval_loss", "grad_norm"):
        mine, theirs = (error_of(found[name], found["exact"], kind) for name in ("ours", "theirs"))
        assert 0 < mine < 1.5 * theirs, kind


@pytest.mark.slow
@needs_deepspeed
def test_schedules_are_deepspeeds(tmp_path: Path) -> None:
    code = (
        "import json, sys, torch\n"
        "from deepspeed.runtime import lr_schedules as theirs\n"
        "from zerofx.integrations import schedules as ours\n"
        "for name, params in json.loads(sys.argv[1]):\n"
        "    rates = []\n"
        "    for module in (ours, theirs):\n"
        "        made = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)\n"
        "        scheduler, found = getattr(module, name)(made, **params), []\n"
        "        for _ in range(40):\n"
        "            found.append((made.param_groups[0]['lr'], made.param_groups[0]['betas']))\n"
        "            scheduler.step()\n"
        "        rates.append(found)\n"
        "    assert rates[0] == rates[1], (name, params, rates)\n"
    )
    cases: list[Any] = [
        ("WarmupLR", {"warmup_num_steps": 7}),
        ("WarmupLR", {"warmup_num_steps": 7, "warmup_type": "linear", "warmup_min_lr": 0.01}),
        ("WarmupDecayLR", {"total_num_steps": 30, "warmup_num_steps": 10}),
        ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 10}),
        ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 9, "cos_min_ratio": 0.2}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 10,
                      "cycle_second_step_size": 5, "decay_step_size": 3, "decay_lr_rate": 0.1,
                      "decay_mom_rate": 0.01}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 10,
                      "cycle_first_stair_count": 4, "cycle_momentum": False}),
        ("LRRangeTest", {"lr_range_test_step_size": 3}),
        ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(cases)], capture_output=True, text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
