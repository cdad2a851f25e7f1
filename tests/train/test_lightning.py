"""Lightning's Trainer and Fabric under strategy="zerofx", beside their own DDP."""

from __future__ import annotations

import csv
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from zerofx.errors import ArgumentError, DesyncError, OptimizerError, PlanError, SnapshotError

if importlib.util.find_spec("lightning") is None:
    pytest.skip("needs the package lightning", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries that Lightning imports
    import lightning.pytorch as pl
    from lightning import Fabric
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision

    from zerofx.integrations.lightning import (
        LightningMeter,
        ZeroFXFabricStrategy,
        ZeroFXStrategy,
    )

ATEN: dict[str, Any] = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}
ROWS = torch.randint(0, 50, (160, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    """End the process group that Lightning leaves in a process which trains by itself."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.fc(self.norm(x))))


class Net(pl.LightningModule):
    """Trains on next tokens, and notes every loss and every norm."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 16})
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.blocks = nn.Sequential(Block(), Block())
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))

    def loss(self, rows: Tensor) -> Tensor:
        return F.cross_entropy(self(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("loss", loss)
        self.log("mean", loss, sync_dist=True, on_step=False, on_epoch=True)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("val", self.loss(batch[0]), sync_dist=True)

    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
        self.norms.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.2)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what Lightning says and warns: few workers, no logger, old names of torch's."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def trainer_of(strategy: Any, folder: str | None = None, **options: Any) -> pl.Trainer:
    callbacks: list[Any] = []
    if folder is not None:
        at_end = {"every_n_epochs": 1, "save_top_k": -1, "save_on_train_epoch_end": True}
        callbacks = [ModelCheckpoint(folder, "{step}", **at_end)]
    given: dict[str, Any] = {
        "accelerator": "cpu", "devices": ranks(), "logger": False, "callbacks": callbacks,
        "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": folder is not None, **options,
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, **given)


def rows_in_order() -> DataLoader[Any]:
    """Return a loader of 4 rows per micro-batch of all ranks, in the same order on any ranks."""
    data = TensorDataset(ROWS)
    rank = dist.get_rank() if dist.is_initialized() else 0
    sampler: Any = DistributedSampler(data, ranks(), rank, shuffle=False)
    return DataLoader(data, 4 // ranks(), sampler=sampler)


def fitted(
    strategy: Any, folder: str | None = None, steps: int = 20, ckpt: str | None = None,
    model: Any = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train: 4 rows in each of 4 micro-batches of an update, on any number of ranks."""
    model = Net() if model is None else model
    with quiet():
        if isinstance(strategy, dict):
            strategy = ZeroFXStrategy({**ATEN, **strategy})
        options = {"gradient_clip_val": 0.2, "accumulate_grad_batches": 4, **options}
        trainer = trainer_of(strategy, folder, max_steps=steps, **options)
        val = DataLoader(TensorDataset(ROWS[:16]), 8)
        trainer.fit(model, rows_in_order(), val, ckpt_path=ckpt)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"losses": model.losses, "norms": model.norms, "state": state, "logged": logged}


def looped(
    strategy: Any, folder: str | None = None, steps: int = 20, load: str | None = None,
    precision: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Train by Fabric, as `fitted` does; save after 10 updates, and at the end."""
    if isinstance(strategy, dict):
        strategy = ZeroFXFabricStrategy({**ATEN, **strategy})
    with quiet():
        fabric: Any = Fabric(
            accelerator="cpu", strategy=strategy, devices=ranks(), precision=precision
        )
        fabric.launch()
        net = Net()
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
        model, optimizer = fabric.setup(net, optimizer)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        loader = fabric.setup_dataloaders(rows_in_order())
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
        if load is not None:
            assert fabric.load(load, state) == {}
        losses, norms = [], []
        while state["step"] < steps:
            for number, (rows,) in enumerate(loader):
                is_last = number % 4 == 3
                with fabric.no_backward_sync(model, enabled=not is_last):
                    out = model(rows)[:, :-1].flatten(0, 1)
                    loss = F.cross_entropy(out, rows[:, 1:].flatten()) / 4
                    fabric.backward(loss)
                losses.append(float(loss.detach()))
                if is_last:
                    norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.2)))
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    state["step"] += 1
                    if folder is not None and state["step"] == 10:
                        fabric.save(f"{folder}/fabric", state)
                if state["step"] == steps:
                    break
        with torch.no_grad():
            val = fabric.all_reduce(model(ROWS[:8]).square().mean())
    found = {name: value.clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "state": found, "logged": {"val": float(val)}}


RUNS = {"trainer": fitted, "fabric": looped}


def both(folder: str, plan: dict[str, Any], steps: int) -> Any:
    """Return what Trainer and Fabric do under DDP, and under zerofx."""
    return {name: (run("ddp", None, steps), run(plan, folder, steps)) for name, run in RUNS.items()}


def goes_on(name: str, plan: dict[str, Any], path: str) -> Any:
    if name == "trainer":
        return fitted(plan, None, 20, path)
    return looped(plan, None, 20, path)


def check_same(mine: dict[str, Any], theirs: dict[str, Any], start: int = 0) -> None:
    """Check norms of updates from `start` on, and where they end, of runs on any ranks."""
    assert mine["norms"] == pytest.approx(theirs["norms"][start:], abs=1e-6)
    for name in mine["logged"].keys() - {"loss"}:  # which is of each rank
        assert mine["logged"][name] == pytest.approx(theirs["logged"][name], abs=1e-6)
    for name, value in theirs["state"].items():
        torch.testing.assert_close(mine["state"][name], value, atol=1e-5, rtol=1e-4)


def check_both(found: list[Any], steps: int) -> None:
    for of_rank in found:
        for theirs, mine in of_rank.values():
            assert len(mine["losses"]) == 4 * steps
            assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
            check_same(mine, theirs)


def test_training_is_as_under_ddp(pool: Pool, tmp_path: Path) -> None:
    check_both(pool.run(2, both, str(tmp_path), {"stage": 3}, 3), 3)


@pytest.mark.slow
def test_runs_go_on_at_another_world_size_and_stage(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(2, both, str(tmp_path), {"stage": 3}, 20, timeout_s=250)
    check_both(found, 20)
    for ranks, stage in ((1, 1), (2, 2)):
        for name, saved in (("trainer", "step=10.ckpt"), ("fabric", "fabric")):
            assert (tmp_path / saved / "zerofx.json").is_file()
            for mine in pool.run(ranks, goes_on, name, {"stage": stage}, str(tmp_path / saved)):
                assert len(mine["norms"]) == 10
                check_same(mine, found[0][name][0], 10)


# -- number formats --------------------------------------------------------------------------------


def errors(mine: dict[str, Any], exact: dict[str, Any]) -> list[float]:
    """Return the root mean squares of the differences of losses and norms."""
    return [
        float((torch.tensor(mine[key]) - torch.tensor(exact[key])).square().mean().sqrt())
        for key in ("losses", "norms")
    ]


def in_formats(steps: int) -> Any:
    """Return the errors against fp64 of Lightning's own bf16 and of zerofx's, by library."""
    found = {}
    for name, run in RUNS.items():
        exact = run("ddp", None, steps, precision="64-true")
        theirs = run("ddp", None, steps, precision="bf16-mixed")
        mine = run({"stage": 3}, None, steps, precision="bf16-mixed")
        assert run({"stage": 2}, None, 2, precision="64-true")["losses"] == pytest.approx(
            exact["losses"][:8], abs=1e-14
        )
        found[name] = errors(theirs, exact), errors(mine, exact)
    return found


@pytest.mark.slow
def test_errors_of_bf16_are_those_of_the_library(pool: Pool) -> None:
    for of_rank in pool.run(2, in_formats, 20, timeout_s=250):
        for theirs, mine in of_rank.values():
            assert all(0 < m <= 1.5 * t for m, t in zip(mine, theirs, strict=True)), (mine, theirs)


def test_fp16_is_scaled_by_lightnings_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # the first steps overflow
    model = Net()
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    losses = fitted({"stage": 3}, None, 20, model=model, plugins=[plugin])["losses"]
    assert model._zerofx.plan.precision.compute == "fp16"
    assert scaler.get_scale() < 2.0**24 and sum(losses[-20:]) < sum(losses[:20])


def test_formats_that_contradict_are_named() -> None:
    with pytest.raises(PlanError, match=r"bf16-mixed.*computes in fp16"):
        fitted({"precision": "fp16"}, None, 1, precision="bf16-mixed")
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(PlanError, match="loss_scale='external'"):
        fitted({"precision": "fp16"}, None, 1, plugins=[plugin])


# -- several optimizers, other modules, other files ------------------------------------------------


class Adversaries(pl.LightningModule):
    """Two networks with an optimizer each, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(4, 6), nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.ones(6))
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, noise: Tensor) -> Tensor:
        return self.critic(self.generator(noise) * self.scale)

    def training_step(self, batch: list[Tensor], number: int) -> None:
        noise = batch[0][:, :4] / 50
        for each, sign in zip(self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(each)
            loss = sign * (self(noise) - 1).square().mean()
            each.zero_grad()
            self.manual_backward(loss)
            each.step()
            self.untoggle_optimizer(each)
            self.log(f"loss{sign}", loss)
            self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        made = [self.scale, *self.generator.parameters()]
        return torch.optim.Adam(made, 1e-2), torch.optim.Adam(self.critic.parameters(), 1e-3)


def by_hand(folder: str) -> Any:
    by_hand = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    theirs = fitted("ddp_find_unused_parameters_true", None, 8, model=Adversaries(), **by_hand)
    mine = fitted({"stage": 3}, folder, 8, model=Adversaries(), **by_hand)
    assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
    check_same(mine, theirs)


@pytest.mark.slow
def test_several_optimizers_are_stepped_by_hand(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, by_hand, str(tmp_path))


def of_others(folder: str) -> None:
    """Go on from a file of DDP's, and write one that DDP goes on from."""
    theirs = fitted("ddp", f"{folder}/ddp", 20)
    saved = f"{folder}/ddp/step=10.ckpt"
    check_same(fitted({"stage": 3}, None, 20, saved), theirs, 10)
    strategy = ZeroFXStrategy(ATEN, state_dict_type="full")
    fitted(strategy, f"{folder}/full", 10)
    check_same(fitted("ddp", None, 20, f"{folder}/full/step=10.ckpt"), theirs, 10)


@pytest.mark.slow
def test_files_of_other_strategies_are_read_and_written(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, of_others, str(tmp_path), timeout_s=250)


def test_testing_after_training_and_a_new_start(tmp_path: Path) -> None:
    model = Net()
    with quiet():
        trainer = trainer_of(ZeroFXStrategy(ATEN), str(tmp_path), max_epochs=1)
        assert model.device.type == "cpu"
        trainer.fit(model, rows_in_order())
        assert type(model.head) is nn.Linear and isinstance(model, Net)
        (found,) = trainer.validate(model, rows_in_order(), verbose=False)
        (again,) = trainer.validate(
            Net(), rows_in_order(), f"{tmp_path}/step=40.ckpt", verbose=False
        )
        assert found == again
        meta = trainer_of(ZeroFXStrategy(ATEN))
        with meta.init_module(empty_init=True):
            built = Net()
        assert built.head.weight.is_meta
        assert meta.validate(built, rows_in_order(), f"{tmp_path}/step=40.ckpt", verbose=False) == [
            found
        ]


# -- live numbers ----------------------------------------------------------------------------------


def test_lightnings_loggers_get_the_meters_numbers(tmp_path: Path) -> None:
    model = Net()
    with quiet():
        logger = CSVLogger(str(tmp_path), "", "", flush_logs_every_n_steps=1)
        trainer = trainer_of(
            ZeroFXStrategy(ATEN), max_steps=4, log_every_n_steps=2, logger=logger,
            callbacks=[LightningMeter("cpu-box", tokens=lambda batch: batch[0].numel())],
            accumulate_grad_batches=2,
        )  # fmt: skip
        trainer.fit(model, rows_in_order())
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["zerofx/seconds"]]
    assert [row["step"] for row in rows] == ["2", "4"]
    for row in rows:
        seconds = float(row["zerofx/seconds"])
        assert float(row["zerofx/samples_per_s"]) * seconds == pytest.approx(16)
        assert float(row["zerofx/tokens_per_s"]) * seconds == pytest.approx(16 * 9)
        assert float(row["zerofx/model_flops"]) > 0 and float(row["zerofx/mfu"]) > 0
    assert model._engine.tally is None


# -- mistakes --------------------------------------------------------------------------------------


class Early(Net):
    """Builds its optimizer before the strategy can compile it."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


def test_switches_that_cannot_be_honoured_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="find_unused_parameters"):
        ZeroFXStrategy(find_unused_parameters=True)
    with pytest.raises(ArgumentError, match="state_dict_type = 'whole'"):
        ZeroFXStrategy(state_dict_type="whole")
    with pytest.raises(PlanError, match="stage"):
        ZeroFXStrategy({"stage": 4})
    with pytest.raises(ArgumentError, match="sync_batchnorm"):
        fitted({}, None, 1, sync_batchnorm=True)
    with pytest.raises(ArgumentError, match="AsyncCheckpointIO writes"):
        fitted({}, None, 1, plugins=[AsyncCheckpointIO()])
    with pytest.raises(ArgumentError, match=r"torch\.compile"):
        fitted({}, None, 1, model=torch.compile(Net()))
    with pytest.raises(OptimizerError, match="SGD still refers to the parameter embed"):
        fitted({}, None, 1, model=Early())
    with quiet(), pytest.raises(SnapshotError, match=r"\['hyper_parameters'\]\['where'\]"):
        model = Net()
        model.hparams["where"] = object()
        fitted({}, str(tmp_path / "run"), 10, model=model)
    assert not list(tmp_path.glob("run/*"))
    with quiet():
        fabric = Fabric(accelerator="cpu", strategy="zerofx", devices=1)
        fabric.launch()
        one, other = fabric.setup_module(Net()), fabric.setup_module(Net())
        net = Net()
        early = torch.optim.SGD(net.parameters(), lr=0.1)
        fabric.setup_module(net)
    with pytest.raises(ArgumentError, match="2 modules that were set up \\('one', 'other'\\)"):
        fabric.save(tmp_path / "both", {"one": one, "other": other})
    with pytest.raises(ArgumentError, match="filter"):
        fabric.save(tmp_path / "some", {"one": one}, filter={"one": lambda name, value: True})
    with pytest.raises(OptimizerError, match=r"SGD still refers to the parameter embed\.weight"):
        fabric.setup_optimizers(early)
    assert not list(tmp_path.glob("[bs]*"))


class SavesAlone(Net):
    """Saves on rank 0 alone, as scripts for DDP may."""

    def on_train_batch_end(self, *of_batch: Any) -> None:
        if self.trainer.is_global_zero:
            self.trainer.save_checkpoint(self.where)


def alone(name: str, folder: str) -> None:
    os.environ["ZEROFX_TIMEOUT_S"] = "5"  # Lightning's own broadcast of each batch is waited for
    if name == "trainer":
        model = SavesAlone()
        model.where = f"{folder}/alone"
        fitted({}, None, 2, model=model)
    else:
        with quiet():
            fabric: Any = Fabric(accelerator="cpu", strategy=ZeroFXFabricStrategy(ATEN), devices=2)
            fabric.launch()
            model = fabric.setup_module(Net())
            model(ROWS[:2])
            if fabric.is_global_zero:
                fabric.save(f"{folder}/alone", {"model": model})
            model(ROWS[:2])


@pytest.mark.parametrize("name", [pytest.param("trainer", marks=pytest.mark.slow), "fabric"])
def test_a_save_on_one_rank_is_named(pool: Pool, name: str, tmp_path: Path) -> None:
    with pytest.raises(DesyncError, match=r"zerofx\.save"):
        pool.run(2, alone, name, str(tmp_path), timeout_s=60)
    assert not list(tmp_path.iterdir())


def test_an_old_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerofx.integrations import lightning

    monkeypatch.setattr(lightning.importlib.metadata, "version", lambda name: "2.1.4")
    with pytest.raises(ImportError, match=r"lightning 2\.1\.4 is installed.*needs 2\.6 or newer"):
        lightning._check_version()
