"""Rescue: a rank is killed, and the next job continues from the step at which it was lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Died, Pool
from torch import nn

import zerofx
from zerofx.errors import ArgumentError, ZerofxError
from zerofx.snapshot import rescue as rescue_module

STAGE_0 = {"stage": 0}
GROUPS = {"stage": 3, "shard_axis_size": 2}


def trained(plan: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 3)
    )
    model = zerofx.compile(net, {"kernels": "aten"} | plan)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def values(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return all values whole, on rank 0, and the state of the generator of random numbers."""
    found = dict(zerofx.full_state_dict(model) or {})
    states = (zerofx.full_optimizer_state_dict(model, optimizer) or {}).get("state", {})
    for number, held in states.items():
        found |= {f"{number} {key}": value for key, value in held.items()}
    found["generator"] = torch.get_rng_state()
    return {name: value.clone() for name, value in found.items()}


def loss_of(model: Any, step: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(10 * step + int(os.environ["RANK"]))
    return model(torch.randn(6, 5, generator=draws)).square().sum()


def folder_of(home: str, apart: bool) -> Path:
    place = Path(home) / f"host-{os.environ['RANK']}" if apart else Path(home)
    place.mkdir(exist_ok=True)
    return place / "run"


def job(
    home: str, plan: dict[str, Any], victims: tuple[int, ...] = (), where: str = "", at: int = 5,
    last: int = 7, apart: bool = False, saves: int = 2,
) -> Any:  # fmt: skip
    """Train; return (first step, losses by step, values), or the error if ranks are killed.

    where: the phase of step `at` in which the victims die.
    """
    rank = int(os.environ["RANK"])
    run = trained(plan)
    folder = folder_of(home, apart)
    losses = {}

    def may_die(phase: str, step: int) -> None:
        if rank in victims and (phase, step) == (where, at):
            os.kill(os.getpid(), signal.SIGKILL)

    extra = zerofx.resume(folder, *run)
    first = extra["step"] if extra else 0
    if first == last:
        return first, losses, values(*run)
    try:
        with zerofx.Rescue(folder, *run) as rescue:
            for step in range(first + 1, last + 1):
                may_die("forward", step)
                loss = loss_of(run[0], step)
                may_die("backward", step)
                loss.backward()
                may_die("step", step)
                run[1].step()
                run[1].zero_grad()
                losses[step] = float(loss.detach())
                rescue.note(step, {"step": step})
                if step % saves == 0:
                    zerofx.save(
                        folder, *run, {"step": step}, step=step, copies=1 if apart else None
                    )
    except ZerofxError as error:
        return str(error)
    return first, losses, values(*run)


def check_goes_on(pool: Pool, tmp_path: Path, plan: dict[str, Any], ranks: int, killed: Any,
                  after: int, apart: bool = False) -> None:  # fmt: skip
    """Check that a job goes on after step `after` as one that was never disturbed."""
    victims, where = killed
    (tmp_path / "undisturbed").mkdir()
    whole = pool.run(ranks, job, str(tmp_path / "undisturbed"), plan, (), "", 5, 7, apart)
    said = pool.run(ranks, job, str(tmp_path), plan, victims, where, 5, 7, apart, may_die=True)
    for rank, answer in enumerate(said):
        if rank in victims:
            assert isinstance(answer, Died)
        else:
            assert any(f"rank {victim}" in answer for victim in victims), answer
    again = pool.run(ranks, job, str(tmp_path), plan, (), "", 5, 7, apart)
    for (first, losses, _), (_, wanted, _) in zip(again, whole, strict=True):
        assert first == after
        assert losses == {step: loss for step, loss in wanted.items() if step > after}
    found, wanted = again[0][2], whole[0][2]
    assert found.keys() == wanted.keys() and len(found) > 20
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []
    assert not list(tmp_path.rglob(".rescue-*"))


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("victim", [0, 1])
def test_no_step_is_lost_if_all_have_all(
    pool: Pool, tmp_path: Path, victim: int, where: str
) -> None:
    after = 5 if where == "step" else 4  # the survivor has made the step
    check_goes_on(pool, tmp_path, STAGE_0, 2, ((victim,), where), after)


@pytest.mark.parametrize(
    ("victims", "apart"),
    [((1,), True), ((0,), False), pytest.param((0, 3), True, marks=pytest.mark.slow)],
)
def test_no_step_is_lost_if_a_copy_of_each_shard_is_left(
    pool: Pool, tmp_path: Path, victims: tuple[int, ...], apart: bool
) -> None:
    check_goes_on(pool, tmp_path, GROUPS, 4, (victims, "backward"), 4, apart)


def test_the_newest_snapshot_is_taken_if_a_shard_is_lost(
    pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool.run(2, job, str(tmp_path), {"stage": 3}, (1,), "backward", 4, may_die=True)
    assert len(list(tmp_path.rglob(".rescue-*-of-0"))) == 1
    first, losses, _ = pool.run(2, job, str(tmp_path), {"stage": 3})[0]
    assert first == 2 and list(losses) == [3, 4, 5, 6, 7]
    assert not list(tmp_path.rglob(".rescue-*"))  # removed by the next save


def test_a_rescued_state_is_loaded_at_another_world(pool: Pool, tmp_path: Path) -> None:
    wanted = pool.run(4, job, str(tmp_path / ".."), GROUPS, (), "", 5, 4, False, 9)[0][2]
    pool.run(4, job, str(tmp_path), GROUPS, (2,), "backward", 5, 7, False, 9, may_die=True)
    first, _, found = pool.run(1, job, str(tmp_path), {"stage": 3}, (), "", 5, 4)[0]
    assert first == 4
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


def damaged(home: str) -> Any:
    run = trained(STAGE_0)
    extra = zerofx.resume(Path(home) / "run", *run)
    return None if extra is None else extra["step"]


@pytest.mark.parametrize("damage", ["cut", "no manifest", "values"])
def test_a_damaged_part_is_not_taken(
    pool: Pool, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool.run(2, job, str(tmp_path), STAGE_0, (1,), "forward", may_die=True)
    part = next(p for p in (tmp_path / "run").glob(".rescue-*-0") if "-of-" not in p.name)
    file = {"cut": "__0_0.distcp", "no manifest": "zerofx.json", "values": "values.pt"}[damage]
    data = (part / file).read_bytes()
    (part / file).unlink() if damage == "no manifest" else (part / file).write_bytes(data[:-9])
    if damage == "values":
        rescue_module._look(part.parent)
        assert f"{part} is left out: " in caplog.text
    assert pool.run(2, damaged, str(tmp_path)) == [4, 4]
    assert not (tmp_path / "run/step-000005").exists()


def test_a_step_cut_short_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained({"stage": 3})
    with pytest.raises(RuntimeError, match="mine"), zerofx.Rescue(tmp_path / "run", *run) as rescue:
        rescue.note(3, {"step": 3})
        next(iter(run[0].parameters())).data.mul_(2)
        raise RuntimeError("mine")
    assert "it was being updated after step 3" in caplog.text
    assert zerofx.resume(tmp_path / "run", *run) is None
    with pytest.raises(RuntimeError, match="mine"), zerofx.Rescue(tmp_path / "run", *run) as rescue:
        rescue.note(3, {"step": 3})
        raise RuntimeError("mine")
    assert zerofx.resume(tmp_path / "run", *trained({"stage": 3})) == {"step": 3}


def test_a_step_that_has_begun_is_not_saved(tmp_path: Path) -> None:
    model, optimizer = trained({"stage": 3})
    model(torch.ones(6, 5)).sum().backward()

    def fails(*args: Any) -> None:  # in place of a lack of memory after states were updated
        raise RuntimeError("mine")

    optimizer.register_step_pre_hook(fails)
    rescue = zerofx.Rescue(tmp_path / "run", model, optimizer)
    with pytest.raises(RuntimeError, match="mine"), rescue:
        rescue.note(3, {"step": 3})
        optimizer.step()
    assert zerofx.resume(tmp_path / "run", model, optimizer) is None


def test_what_is_noted_is_that_of_the_note(tmp_path: Path) -> None:
    run = trained({"stage": 3})
    seen = {"step": 3, "metrics": [1.0]}
    with pytest.raises(RuntimeError, match="mine"), zerofx.Rescue(tmp_path / "run", *run) as rescue:
        rescue.note(3, seen)
        seen["metrics"].append(2.0)  # type: ignore[attr-defined]
        run[1].param_groups[0]["lr"] = 7.0
        torch.rand(3)
        raise RuntimeError("mine")
    before = torch.get_rng_state()
    again = trained({"stage": 3})
    assert zerofx.resume(tmp_path / "run", *again) == {"step": 3, "metrics": [1.0]}
    assert again[1].param_groups[0]["lr"] == 0.1
    assert not torch.equal(torch.get_rng_state(), before)


def resumed_at(home: str, fails: bool) -> Any:
    run = trained(STAGE_0)
    publish = rescue_module._Restoring.publish

    def failing(self: Any) -> None:
        publish(self)
        raise OSError(5, "Input/output error", str(self.folder))

    if fails:
        rescue_module._Restoring.publish = failing  # type: ignore[method-assign]
    try:
        extra = zerofx.resume(Path(home) / "run", *run)
    finally:
        rescue_module._Restoring.publish = publish  # type: ignore[method-assign]
    return None if extra is None else extra["step"]


def test_a_restore_that_was_interrupted_is_made_again(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, job, str(tmp_path), STAGE_0, (1,), "step", may_die=True)
    assert pool.run(2, resumed_at, str(tmp_path), True) == [5, 5]
    assert list((tmp_path / "run").glob(".rescue-*"))  # the parts are still there
    next((tmp_path / "run/step-000005").glob("*.distcp")).unlink()  # as if a host had failed before
    assert pool.run(2, resumed_at, str(tmp_path), False) == [5, 5]
    assert not list((tmp_path / "run").glob(".rescue-*"))


def test_what_a_rank_alone_cannot_save_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained({"stage": 3})
    with pytest.raises(ArgumentError, match=r"step=-1\. It must be a whole number"):
        zerofx.Rescue(tmp_path, model, optimizer).note(-1)
    whole = zerofx.optim.whole_matrices(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ArgumentError, match="whose states are each on one rank only"):
        zerofx.Rescue(tmp_path, model, whole)


SCRIPT = textwrap.dedent(
    """
    import os, signal, sys, time
    import torch, zerofx
    from torch import nn

    folder, rank = sys.argv[1], int(os.environ["RANK"])
    torch.manual_seed(0)
    model = zerofx.compile(nn.Linear(4, 2), zerofx.Plan(stage=0, kernels="aten"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    extra = zerofx.resume(folder, model, optimizer)
    first = extra["step"] if extra else 0
    os.write(1, f"from {first}{os.linesep}".encode())  # in one piece, beside the other rank's
    with zerofx.Rescue(folder, model, optimizer) as rescue:
        for step in range(first + 1, 41):
            if (rank, step, first) == (1, 25, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.full((2, 4), float(rank))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            rescue.note(step, {"step": step})
    """
)


@pytest.mark.slow
def test_torchrun_starts_again_where_a_rank_was_lost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               "--max-restarts=1", str(tmp_path / "train.py"), str(tmp_path / "run")]  # fmt: skip
    began = time.monotonic()
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.split("\n")[:4] == ["from 0", "from 0", "from 24", "from 24"]
    assert "nothing is lost" in found.stderr
    assert time.monotonic() - began < 150
