"""Snapshots of several steps side by side, in the background, and going on from the newest one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn

import zerofx
from zerofx.errors import ArgumentError, SnapshotError
from zerofx.snapshot.dcp import SaveSteps

PLAN = zerofx.Plan(stage=3, kernels="aten")


def trained() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = zerofx.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), PLAN)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_equal(model: Any, wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, wanted[name]) for name, value in values(model).items())


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_newest_steps_stay_and_are_loaded(tmp_path: Path) -> None:
    run, (model, optimizer) = tmp_path / "runs" / "run", trained()
    assert zerofx.resume(run, model, optimizer) is None
    seen = {}
    for number in (1, 2, 3, 1_000_000):
        step(model, optimizer)
        zerofx.save(run, model, optimizer, {"step": number}, step=number, keep=2)
        seen[number] = values(model)
    assert names(run) == ["latest", "step-000003", "step-1000000"]
    assert os.readlink(run / "latest") == "step-1000000"
    for folder, number in ((run, 1_000_000), (run / "latest", 1_000_000), (run / "step-000003", 3)):
        step(model, optimizer)
        assert zerofx.load(folder, model, optimizer) == {"step": number}
        assert is_equal(model, seen[number])
    step(model, optimizer)  # back at step 3: what is saved last is the newest
    zerofx.save(run, model, optimizer, {"step": 4}, step=4, keep=2)
    assert names(run) == ["latest", "step-000004", "step-1000000"]
    assert zerofx.resume(run, *trained()) == {"step": 4}


@pytest.mark.parametrize("damage", ["flipped", "cut", "no manifest", "gone"])
def test_a_damaged_snapshot_is_skipped(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained()
    for number in (1, 2):
        step(model, optimizer)
        zerofx.save(tmp_path, model, optimizer, {"step": number}, step=number)
    newest = tmp_path / "step-000002"
    file = next(newest.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "flipped":
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "no manifest":
        (newest / "zerofx.json").unlink()
    else:
        file.unlink()
    assert zerofx.resume(tmp_path, *trained()) == {"step": 1}
    assert "a damaged snapshot is skipped" in caplog.text and str(newest) in caplog.text
    next((tmp_path / "step-000001").glob("*.distcp")).unlink()
    with pytest.raises(SnapshotError, match=r"all 2 snapshots .*step-000002.*step-000001"):
        zerofx.load(tmp_path, *trained())


def test_a_snapshot_of_another_model_is_not_skipped(tmp_path: Path) -> None:
    model, optimizer = trained()
    zerofx.save(tmp_path, model, optimizer, step=1)
    other = zerofx.compile(nn.Linear(4, 4), PLAN)
    zerofx.save(tmp_path / "other", other, step=2)
    (tmp_path / "other" / "step-000002").rename(tmp_path / "step-000002")
    (tmp_path / "latest").unlink()
    with pytest.raises(SnapshotError, match=r"step-000002: the save is of another model") as caught:
        zerofx.load(tmp_path, model, optimizer)
    assert "none of the" not in str(caught.value)


# -- of several models -----------------------------------------------------------------------------


def pair(plan: Any = PLAN) -> list[tuple[Any, Any]]:
    """Return a generator and a discriminator, each with its optimizer."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, n)) for n in (8, 1)]
    models = [zerofx.compile(net, plan) for net in nets]
    return [(model, torch.optim.Adam(model.parameters())) for model in models]


def in_one_folder(folder: str, background: bool) -> list[str]:
    run, texts = Path(folder), []
    gen, disc = pair()
    zerofx.save(run / "steps", *gen, {"step": 3}, step=3)
    zerofx.save(run / "one", *gen, {"step": 3})
    before = sorted(str(path) for path in run.rglob("*"))
    for path, options in (
        (run / "steps", {"step": 3}),
        (run / "steps", {"step": 4, "keep": 1}),  # which would remove step 3
        (run / "steps" / "step-000003", {}),
        (run / "one", {}),
    ):
        with pytest.raises(SnapshotError) as caught:
            zerofx.save(path, *disc, background=background, **options)
        texts.append(str(caught.value))
        if gen[0]._engine.world.rank == 0:  # which has released its locks
            assert sorted(str(path) for path in run.rglob("*")) == before
    zerofx.save(run / "steps", *gen, {"step": 4}, step=4, keep=1)
    for path, number in ((run / "steps", 4), (run / "one", 3)):
        assert zerofx.resume(path, *gen) == {"step": number}
    return texts


@pytest.mark.parametrize("background", [False, True])
def test_a_save_never_replaces_another_model(pool: Pool, tmp_path: Path, background: bool) -> None:
    for texts in pool.run(2, in_one_folder, str(tmp_path), background):
        for text, name in zip(texts, ["steps/step-000003"] * 3 + ["one"], strict=True):
            assert (
                f"{tmp_path / name} is a snapshot of another model: Sequential with 4 parameters "
                "is saved there, this is Sequential with 4 parameters, and 2.bias is [8] in the "
                "snapshot and [1] in this model; 2.weight is [8, 16] in the snapshot and [1, 16] "
                "in this model. Give each model a folder of its own, for example run/generator "
                "and run/discriminator, or remove the old snapshot if it is no longer needed."
            ) in text


def shared_optimizer(folder: str) -> str:
    (gen, _), (disc, _) = pair()
    joint = torch.optim.Adam([*gen.parameters(), *disc.parameters()])
    with pytest.raises(SnapshotError) as caught:
        zerofx.save(folder, gen, joint)

    def adversarial() -> tuple[Any, Any]:
        torch.manual_seed(0)
        net = nn.ModuleDict({"gen": nn.Linear(4, 4), "disc": nn.Linear(4, 1)})
        both = zerofx.compile(net, PLAN)
        return both, torch.optim.Adam(both.parameters(), lr=0.1)

    def train(both: Any, optimizer: Any) -> torch.Tensor:
        loss = both.disc(both.gen(torch.ones(2, 4))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    both, optimizer = adversarial()
    train(both, optimizer)
    zerofx.save(folder, both, optimizer, {"step": 1})
    loss = train(both, optimizer)
    again = adversarial()
    assert zerofx.resume(folder, *again) == {"step": 1}
    assert torch.equal(train(*again), loss) and is_equal(again[0], values(both))
    return str(caught.value)


def test_one_optimizer_of_two_models_is_saved_with_a_module_of_both(
    pool: Pool, tmp_path: Path
) -> None:
    for text in pool.run(2, shared_optimizer, str(tmp_path / "run")):
        assert "that is not the model's" in text
        assert "save that: torch.nn.ModuleDict(dict(gen=..., disc=...))" in text


def test_models_that_are_alike_have_a_folder_each(tmp_path: Path) -> None:
    (there, _), (back, _) = trained(), trained()
    for options in ({}, {"step": 3}):
        run = tmp_path / f"run{len(options)}"
        zerofx.save(run, there, **options)
        with pytest.raises(SnapshotError, match="of another Sequential of this process"):
            zerofx.save(run, back, **options)
        shutil.rmtree(run)
        zerofx.save(run, back, **options)  # the way out
    zerofx.load(tmp_path / "run1", there)  # goes on from there
    zerofx.save(tmp_path / "run1", there, step=4)
    zerofx.save(tmp_path / "run1", trained()[0], step=5)  # compiled since: it succeeds them


def test_the_same_model_is_replaced_whatever_its_plan(tmp_path: Path) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))

    for plan in (
        {"stage": 3},
        {"stage": 1},
        {"ignored_params": ["0.bias"]},  # a buffer of the snapshot
        {"stage": 0},
    ):
        model = zerofx.compile(net(), {"kernels": "aten", **plan})
        zerofx.save(tmp_path, model, step=1)
        del model
    model = zerofx.compile(net().double(), PLAN)
    zerofx.save(tmp_path, model, step=1)
    (tmp_path / "step-000001" / "zerofx.json").write_text("{")  # damaged: it is no one's
    del model
    zerofx.save(tmp_path, pair()[0][0], step=1)


def test_what_is_no_series_or_step_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    for options, text in (
        ({"step": -1}, r"step=-1\. It must be a whole number of at least 0"),
        ({"step": True}, "step=True"),
        ({"step": 1, "keep": 0}, r"keep=0\. It must be a whole number of at least 1"),
        ({"keep": 2}, "keep=2 and no step"),
    ):
        with pytest.raises(ArgumentError, match=text):
            zerofx.save(tmp_path / "run", model, optimizer, **options)
    zerofx.save(tmp_path / "one", model, optimizer, {"step": 7})
    with pytest.raises(SnapshotError, match=r"was saved without step="):
        zerofx.save(tmp_path / "one", model, optimizer, step=1)
    assert zerofx.resume(tmp_path / "one", model, optimizer) == {"step": 7}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "step-000001").mkdir()
    (tmp_path / "mine" / "step-000001" / "notes.txt").write_text("mine")
    (tmp_path / "mine" / "latest").write_text("mine")
    assert zerofx.resume(tmp_path / "mine", model, optimizer) is None
    with pytest.raises(SnapshotError, match="step-000001 holds other files"):
        zerofx.save(tmp_path / "mine", model, optimizer, step=1)
    with pytest.raises(SnapshotError, match="latest is in the way"):
        zerofx.save(tmp_path / "mine", model, optimizer, step=2, keep=1)
    assert (tmp_path / "mine" / "latest").read_text() == "mine"


# -- in the background -----------------------------------------------------------------------------


class Slow:
    """Has writing wait until it is told to go on, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.may_go_on = threading.Event()
        write = SaveSteps.write

        def later(steps: SaveSteps) -> Any:
            assert self.may_go_on.wait(30)
            if error is not None:
                raise error
            return write(steps)

        monkeypatch.setattr(SaveSteps, "write", later)


def background(folder: str) -> None:
    run, (model, optimizer) = Path(folder), trained()
    rank = dist.get_rank() if dist.is_initialized() else 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        step(model, optimizer)
        slow = Slow(monkeypatch)
        saved = values(model)
        future = zerofx.save(run, model, optimizer, {"step": 1}, step=1, background=True)
        assert future is not None and not future.done()
        for _ in range(3):
            step(model, optimizer)
        assert not is_equal(model, saved) and not (run / "step-000001").exists()
        slow.may_go_on.set()
        assert future.result(30) == run / "step-000001"
    assert zerofx.load(run, model, optimizer) == {"step": 1}
    assert is_equal(model, saved)
    with pytest.MonkeyPatch.context() as monkeypatch:
        slow = Slow(monkeypatch, OSError(28, "No space left on device") if rank == 0 else None)
        zerofx.save(run, model, optimizer, {"step": 2}, step=2, background=True)
        step(model, optimizer)
        slow.may_go_on.set()
        with pytest.raises(SnapshotError, match="No space left on device"):
            zerofx.save(run, model, optimizer, {"step": 3}, step=3, background=True)
    zerofx.save(run, model, optimizer, {"step": 3}, step=3, background=True)
    saved = values(model)
    step(model, optimizer)
    assert zerofx.load(run, model, optimizer) == {"step": 3}  # waits for it
    assert is_equal(model, saved)
    assert names(run) == ["latest", "step-000001", "step-000003"]


def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    background(str(tmp_path))


def test_training_goes_on_while_a_save_is_written_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, background, str(tmp_path))


SCRIPT = """
import sys, torch, zerofx
from zerofx.snapshot.dcp import SaveSteps
import time
write = SaveSteps.write
SaveSteps.write = lambda steps: time.sleep(1) or write(steps)
model = zerofx.compile(torch.nn.Linear(4, 4), zerofx.Plan(stage=3, kernels="aten"))
zerofx.save(sys.argv[1], model, background=True)
if len(sys.argv) > 2:
    raise ValueError("a fault")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["well", "by an exception"])
def test_the_process_waits_for_the_save_at_its_end(tmp_path: Path, end: str) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    more = [] if end == "well" else ["fails"]
    done = subprocess.run(
        [*command, str(script), str(run), *more], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode == 0) == (end == "well"), done.stderr
    if end == "well":
        assert zerofx.load(run, zerofx.compile(nn.Linear(4, 4), PLAN)) == {}
    assert names(tmp_path) == ["run", "train.py"] or end != "well"
