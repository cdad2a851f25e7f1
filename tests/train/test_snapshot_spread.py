"""Snapshots on the disks of several hosts, here a directory each: save(copies=1)."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Died, Pool
from torch import nn

import zerofx
from zerofx.errors import ArgumentError, DesyncError, SnapshotError
from zerofx.snapshot.spread import Courier, _Disk, look


def disk(home: str, per_host: int = 1) -> Path:
    """Return the disk of this rank's host: each `per_host` ranks have one."""
    found = Path(home) / f"disk-{int(os.environ['RANK']) // per_host}"
    found.mkdir(exist_ok=True)
    return found


def trained(plan: dict[str, Any] | None = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))
    model = zerofx.compile(net, {"stage": 3, "kernels": "aten"} | (plan or {}))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(5, 4) * torch.arange(5.0)[:, None]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return all values whole, on rank 0."""
    found = dict(zerofx.full_state_dict(model) or {})
    states = (zerofx.full_optimizer_state_dict(model, optimizer) or {}).get("state", {})
    for number, held in states.items():
        found |= {f"{number} {key}": value for key, value in held.items()}
    return {name: value.clone() for name, value in found.items()}


def saved(
    home: str, copies: int, steps: int = 2, in_background: bool = False, per_host: int = 1,
    plan: dict[str, Any] | None = None,
) -> list[dict[str, torch.Tensor]]:  # fmt: skip
    run, seen = trained(plan), []
    for number in range(1, steps + 1):
        step(*run)
        seen.append(values(*run))
        future = zerofx.save(
            disk(home, per_host) / "run", *run, {"step": number}, step=number, keep=2,
            background=in_background, copies=copies,
        )  # fmt: skip
    if future is not None:
        future.result()
    return seen


def resumed(
    home: str, per_host: int = 1, plan: dict[str, Any] | None = None, name: str = ""
) -> Any:
    run = trained(plan)
    extra = zerofx.resume(disk(home, per_host) / "run" / name, *run)
    found = values(*run)
    step(*run)
    return extra, found


def check(answers: list[Any], number: int, seen: list[dict[str, torch.Tensor]]) -> None:
    """Check that the snapshot of a step was loaded, bit for bit."""
    assert [extra for extra, _ in answers] == [{"step": number}] * len(answers)
    found, wanted = answers[0][1], seen[number - 1]
    assert found.keys() == wanted.keys() and len(found) > 20
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("in_background", [False, True])
def test_any_host_may_be_lost(pool: Pool, tmp_path: Path, in_background: bool) -> None:
    seen = pool.run(3, saved, str(tmp_path), 1, 3, in_background)[0]
    names = sorted(p.name for p in (tmp_path / "disk-1" / "run").iterdir())
    assert names == ["latest", "step-000002", "step-000003"]
    kept = {n: sorted(p.name for p in (tmp_path / f"disk-{n}/run/step-000003").glob("_*"))
            for n in range(3)}  # fmt: skip
    assert kept == {n: sorted([f"__{n}_0.distcp", f"__{(n - 1) % 3}_0.distcp"]) for n in range(3)}
    for lost in range(3):
        home = tmp_path / f"without-{lost}"
        for n in range(3):
            if n != lost:
                shutil.copytree(tmp_path / f"disk-{n}", home / f"disk-{n}", symlinks=True)
        check(pool.run(3, resumed, str(home)), 3, seen)
        assert (home / f"disk-{lost}/run/step-000003/zerofx.json").exists()


def test_the_newest_by_its_link_and_one_by_its_name(pool: Pool, tmp_path: Path) -> None:
    seen = pool.run(2, saved, str(tmp_path), 1)[0]
    shutil.rmtree(tmp_path / "disk-0" / "run")
    check(pool.run(2, resumed, str(tmp_path), 1, None, "latest"), 2, seen)
    assert sorted(p.name for p in (tmp_path / "disk-0/run").iterdir()) == ["step-000002"]
    check(pool.run(2, resumed, str(tmp_path), 1, None, "step-000001"), 1, seen)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_another_number_of_hosts_loads_it(pool: Pool, tmp_path: Path, world: int) -> None:
    seen = pool.run(2, saved, str(tmp_path), 1)[0]
    check(pool.run(world, resumed, str(tmp_path), 1, {"stage": 2}), 2, seen)


def test_several_ranks_of_a_host_share_its_disk(pool: Pool, tmp_path: Path) -> None:
    plan = {"shard_axis_size": 2}
    seen = pool.run(4, saved, str(tmp_path), 1, 1, False, 2, plan)[0]
    shutil.rmtree(tmp_path / "disk-0")
    check(pool.run(4, resumed, str(tmp_path), 2, plan), 1, seen)


def test_without_copies_each_file_is_on_one_host(pool: Pool, tmp_path: Path) -> None:
    seen = pool.run(2, saved, str(tmp_path), 0)[0]
    assert len(list((tmp_path / "disk-1/run/step-000002").glob("*.distcp"))) == 1
    (tmp_path / "disk-0").rename(tmp_path / "disk-2")  # the hosts change places
    (tmp_path / "disk-1").rename(tmp_path / "disk-0")
    (tmp_path / "disk-2").rename(tmp_path / "disk-1")
    check(pool.run(2, resumed, str(tmp_path)), 2, seen)
    shutil.rmtree(tmp_path / "disk-1" / "run")
    (tmp_path / "disk-0/run/step-000002/__0_0.distcp").unlink()
    shutil.rmtree(tmp_path / "disk-0/run/step-000001")
    with pytest.raises(SnapshotError, match=r"__0_0.distcp: on none of 2 hosts"):
        pool.run(2, resumed, str(tmp_path))


@pytest.mark.parametrize("damage", ["flipped", "cut", "no manifest", "torn manifest", "newer gone"])
def test_copies_replace_what_is_damaged(
    pool: Pool, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen = pool.run(2, saved, str(tmp_path), 1)[0]
    newest, wanted = tmp_path / "disk-0/run/step-000002", 2
    if damage in ("flipped", "cut"):
        file = newest / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data if damage == "flipped" else data[:-1])
    elif damage == "no manifest":
        (newest / "zerofx.json").unlink()
    elif damage == "torn manifest":
        (newest / "zerofx.json").write_text("{")
        assert [sight.name for sight in look(newest.parent)] == ["step-000001"]
        assert f"{newest} is left out: " in caplog.text
    else:  # on all hosts: the older one is taken
        for host in (0, 1):
            (tmp_path / f"disk-{host}/run/step-000002/__0_0.distcp").unlink()
        wanted = 1
    check(pool.run(2, resumed, str(tmp_path)), wanted, seen)
    if damage == "flipped":
        other = (tmp_path / "disk-1/run/step-000002/__0_0.distcp").read_bytes()
        assert (newest / "__0_0.distcp").read_bytes() == other


def test_what_is_damaged_wherever_it_is_is_passed_over(pool: Pool, tmp_path: Path) -> None:
    """A copy that no rank of its host needs is damaged, and the other host is lost."""
    seen = pool.run(3, saved, str(tmp_path), 1)[0]
    shutil.rmtree(tmp_path / "disk-1" / "run")
    copy = tmp_path / "disk-2/run/step-000002/__1_0.distcp"
    data = bytearray(copy.read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)
    check(pool.run(3, resumed, str(tmp_path)), 1, seen)
    assert not (tmp_path / "disk-1/run/step-000002").exists()


def test_another_snapshot_of_the_same_name_stays(pool: Pool, tmp_path: Path) -> None:
    """A host that went on alone has saved the same step: what it saved is newer, and not lost."""
    seen = pool.run(2, saved, str(tmp_path), 1)[0]
    alone = pool.run(1, going_on, str(tmp_path))[0]
    other = (tmp_path / "disk-1/run/step-000002/zerofx.json").read_bytes()
    before = (tmp_path / "disk-0/run/step-000002/zerofx.json").read_bytes()
    assert before != other
    check(pool.run(2, resumed, str(tmp_path)), 2, seen)  # of what both hosts can load
    assert (tmp_path / "disk-0/run/step-000002/zerofx.json").read_bytes() == before
    check(pool.run(1, resumed, str(tmp_path)), 2, [{}, alone])


def going_on(home: str) -> Any:
    run = trained()
    zerofx.resume(disk(home) / "run", *run)
    step(*run)
    zerofx.save(disk(home) / "run", *run, {"step": 2}, step=2)
    return values(*run)


def refused(home: str) -> list[str]:
    run, found = trained(), []
    shared = Path(home) / "run"
    for path, options, raises in (
        (disk(home) / "run", {"copies": 1}, ArgumentError),
        (disk(home) / "run", {"copies": -1, "step": 1}, ArgumentError),
        (disk(home) / "run", {"copies": 2, "step": 1}, SnapshotError),
        (shared / "run", {"copies": 1, "step": 1}, SnapshotError),
    ):
        with pytest.raises(raises) as caught:
            zerofx.save(path, *run, **options)
        found.append(str(caught.value))
    assert zerofx.resume(disk(home) / "run", *run) is None
    return found


def test_what_cannot_be_is_refused(pool: Pool, tmp_path: Path) -> None:
    no_step, negative, many, one = pool.run(2, refused, str(tmp_path))[1]
    assert "copies=1 and no step" in no_step
    assert "copies=-1. It must be a whole number of at least 0" in negative
    assert "copies=2, but the ranks run on 2 hosts" in many and "Give copies=1" in many
    assert "copies=1, but the ranks run on one host" in one
    assert not list(tmp_path.rglob("*.distcp"))


def killed_while_copying(home: str, victim: int, in_background: bool) -> str:
    run = trained()
    path = disk(home) / "run"
    step(*run)
    zerofx.save(path, *run, {"step": 1}, step=1, keep=1, copies=1)
    carry = Courier.carry

    def killed(self: Courier, *args: Any) -> None:
        if int(os.environ["RANK"]) == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        carry(self, *args)

    Courier.carry = killed  # type: ignore[method-assign]
    step(*run)
    began = time.monotonic()
    with pytest.raises(DesyncError) as caught:
        future = zerofx.save(
            path, *run, {"step": 2}, step=2, keep=1, copies=1, background=in_background
        )
        assert future is not None
        future.result()
    assert time.monotonic() - began < 5
    return str(caught.value)


@pytest.mark.parametrize(("victim", "in_background"), [(0, False), (1, True)])
def test_a_host_that_dies_while_copying_is_named(
    pool: Pool, tmp_path: Path, victim: int, in_background: bool
) -> None:
    answers = pool.run(2, killed_while_copying, str(tmp_path), victim, in_background, may_die=True)
    assert isinstance(answers[victim], Died)
    assert f"rank {victim}" in answers[1 - victim] and "died" in answers[1 - victim]
    shutil.rmtree(tmp_path / f"disk-{victim}")  # and its disk is lost with it
    for extra, _ in pool.run(2, resumed, str(tmp_path)):
        assert extra == {"step": 1}


def failing(home: str, where: str) -> list[str]:
    run = trained()
    path = disk(home) / "run"
    zerofx.save(path, *run, {"step": 1}, step=1, keep=1, copies=1)
    numbers = itertools.count()
    real = Path.open

    def open_or_fail(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        is_it = ".saving-" in str(self) and mode == where and os.environ["RANK"] == "1"
        if is_it and not next(numbers):
            raise OSError(28, "No space left on device", str(self))
        return real(self, mode, *args, **kwargs)

    Path.open = open_or_fail  # type: ignore[assignment, method-assign]
    try:
        with pytest.raises(SnapshotError) as caught:
            zerofx.save(path, *run, {"step": 2}, step=2, keep=1, copies=1)
    finally:
        Path.open = real  # type: ignore[method-assign]
    zerofx.save(path, *run, {"step": 3}, step=3, keep=1, copies=1)
    return [str(caught.value), *sorted(p.name for p in path.iterdir())]


@pytest.mark.parametrize("where", ["rb", "wb"])
def test_a_full_disk_fails_the_save_on_all_hosts(pool: Pool, tmp_path: Path, where: str) -> None:
    for said, *names in pool.run(2, failing, str(tmp_path), where):
        assert "No space left on device" in said
        assert names == ["latest", "step-000003"]


def test_a_file_that_cannot_be_read_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(b"abc")
    piece = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(FileNotFoundError, match="gone"), _Disk() as disk:
        disk.read(disk.opened(tmp_path / "gone", "rb"), piece)
        disk.read(disk.opened(tmp_path / "whole", "rb"), piece)
    assert piece.tolist() == list(b"abc")
