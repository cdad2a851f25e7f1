"""Steps over NVMe that fail on one rank: told to all in that call, which then load and go on."""

from __future__ import annotations

import errno
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from far_cases import batch_loss, everything, far, rank_here, train, unequal
from nvme_cases import Disk, change
from pool import Died, Pool

import zerofx
from zerofx.errors import DesyncError, NvmeError, SnapshotError

EARLY = {"update": "in-backward"}
STEPS = 4  # of a whole training; the third fails


def failing_step(model: Any, optimizer: Any, which: str, rank: int) -> str:
    """Train one step in which the disk of one rank fails once; return what this rank is told."""
    with pytest.MonkeyPatch.context() as patch:
        if rank_here() == rank:
            disk = Disk(patch)
            disk.fails(which, errno.EIO)
        with pytest.raises(NvmeError) as caught:
            train(model, optimizer, "gpt", 2, 3)
    if model._engine.store.updates is None:  # else it has freed its gradients
        optimizer.zero_grad()
    return str(caught.value)


def loaded_again(folder: str, kind: str, plan: dict[str, Any], which: str) -> tuple[str, list[str]]:
    """Return what this rank is told, and what differs at the end from a run without fault."""
    model, optimizer = far(folder, optimizer=kind, **plan)
    train(model, optimizer, "gpt", 0, STEPS)
    expected = everything(model, optimizer)
    model, optimizer = far(folder, optimizer=kind, **plan)
    train(model, optimizer, "gpt", 0, 2)
    zerofx.save(f"{folder}/save", model, optimizer)
    told = failing_step(model, optimizer, which, 1)
    for go_on in (lambda: train(model, optimizer, "gpt", 3, 4), model.state_dict().copy):
        with pytest.raises(NvmeError, match=r"zerofx\.load an earlier state before continuing"):
            go_on()  # on every rank
    zerofx.load(f"{folder}/save", model, optimizer)
    train(model, optimizer, "gpt", 2, STEPS)
    return told, unequal(everything(model, optimizer), expected)


CELLS = [("adamw", {}), ("adamw", EARLY), ("lamb", {}), ("lamb", EARLY), ("sgd", {})]


@pytest.mark.parametrize(("kind", "plan"), CELLS[:3], ids=str)
def test_ranks_load_in_the_same_job(
    pool: Pool, tmp_path: Path, kind: str, plan: dict[str, Any]
) -> None:
    (first, nothing), (second, none) = pool.run(
        2, loaded_again, str(tmp_path), kind, plan, "pwritev"
    )
    assert not nothing and not none
    assert second.startswith(f"write of {tmp_path}/zerofx-rank1-") and "(EIO)" in second
    assert re.search(r" of bucket \d \([\w.]+: [\w.]+weight.*\) at offset \d+: ", second)
    assert f"rank 1: {second}" in first


@pytest.mark.slow
@pytest.mark.parametrize("which", ["preadv", "pwritev"])
@pytest.mark.parametrize(("kind", "plan"), CELLS, ids=str)
def test_ranks_load_in_the_same_job_everywhere(
    pool: Pool, tmp_path: Path, kind: str, plan: dict[str, Any], which: str
) -> None:
    if which == "preadv":
        plan = {**plan, "offload": {"optimizer": "nvme", "parameters": "none", "path": tmp_path}}
    (first, nothing), (second, none) = pool.run(2, loaded_again, str(tmp_path), kind, plan, which)
    assert not nothing and not none
    assert f"rank 1: {second}" in first and "(EIO)" in second


# -- reads ----------------------------------------------------------------------------------------
def damaged(folder: str, plan: dict[str, Any], where: str) -> tuple[list[str], list[str]]:
    """A byte of rank 1's parameters flips on disk before a forward, or only before its backward.

    Return what this rank is told, by the call, by a save and by a state dict; and what differs in
    the end.
    """
    model, optimizer = far(folder, **plan)
    train(model, optimizer, "gpt", 0, STEPS)
    expected = everything(model, optimizer)
    model, optimizer = far(folder, **plan)
    train(model, optimizer, "gpt", 0, 2)
    zerofx.save(f"{folder}/save", model, optimizer)
    store = model._engine.store.homes.nvme._stores["parameters", 3]
    extent = store._layout.extents[model._engine.store.homes.nvme._names[3]]
    told: list[str] = []

    def flip() -> None:
        if rank_here() == 1:
            change(Path(store.path), extent.offset + 7)

    if where == "forward":
        flip()
        with pytest.raises(NvmeError) as caught:
            batch_loss(model, "gpt", 2)
        save = partial(zerofx.save, f"{folder}/save", model)
        for look in (lambda: dict(model.state_dict()), save):
            with pytest.raises((NvmeError, SnapshotError)) as refused:
                look()
            told.append(str(refused.value))
    else:
        loss = batch_loss(model, "gpt", 2)
        flip()
        with pytest.raises(NvmeError) as caught:
            loss.backward()
    if model._engine.store.updates is None:
        optimizer.zero_grad()
    zerofx.load(f"{folder}/save", model, optimizer)
    train(model, optimizer, "gpt", 2, STEPS)
    return [str(caught.value), *told], unequal(everything(model, optimizer), expected)


@pytest.mark.parametrize(("plan", "where"), [({}, "forward"), (EARLY, "backward")], ids=str)
def test_a_flipped_byte(pool: Pool, tmp_path: Path, plan: dict[str, Any], where: str) -> None:
    (first, nothing), (second, none) = pool.run(2, damaged, str(tmp_path), plan, where)
    assert not nothing and not none
    for mine, other in zip(second, first, strict=True):
        assert f"rank 1: {mine}" in other or mine in other
        assert re.search(r"read of \S*zerofx-rank1-parameters.* of bucket 3 .* at offset \d+", mine)
        assert "damaged" in mine


def no_room_for_states(folder: str, plan: dict[str, Any]) -> tuple[str, list[str]]:
    """The disk of rank 1 is full when states are made, at the first step; then there is room."""
    model, optimizer = far(folder, **plan)
    train(model, optimizer, "gpt", 0, 2)
    expected = everything(model, optimizer)
    model, optimizer = far(folder, **plan)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    batch_loss(model, "gpt", 0).backward()
    with pytest.MonkeyPatch.context() as patch:
        if rank_here() == 1:
            patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(NvmeError) as caught:
            optimizer.step()
    optimizer.step()  # nothing was changed: the very step is taken now
    optimizer.zero_grad()
    train(model, optimizer, "gpt", 1, 2)
    return str(caught.value), unequal(everything(model, optimizer), expected)


def test_a_disk_that_is_full_at_the_first_step(pool: Pool, tmp_path: Path) -> None:
    (first, nothing), (second, none) = pool.run(2, no_room_for_states, str(tmp_path), {})
    assert not nothing and not none
    assert "cannot reserve" in second and "rank1-exp_avg" in second and "ENOSPC" in second
    assert f"rank 1: {second}" in first


# -- a rank that is killed ------------------------------------------------------------------------
def killed_in_a_step(folder: str, plan: dict[str, Any]) -> str:
    """Rank 1 is killed while it writes to its disk in the third step; return what rank 0 hears."""
    model, optimizer = far(folder, **plan)
    train(model, optimizer, "gpt", 0, 2)
    zerofx.save(f"{folder}/save", model, optimizer)

    def kill(name: str, *_: Any) -> None:
        if name == "pwritev":
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if rank_here() == 1:
            Disk(patch).faults.append(kill)
        with pytest.raises(DesyncError) as caught:
            train(model, optimizer, "gpt", 2, 3)
    return str(caught.value)


def taken_up(folder: str, plan: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Load in a new job; return what differs from a run without fault, and the store files."""
    model, optimizer = far(folder, **plan)
    zerofx.load(f"{folder}/save", model, optimizer)
    train(model, optimizer, "gpt", 2, STEPS)
    found = everything(model, optimizer)
    files = sorted(p.name for p in Path(folder).glob("zerofx-rank1-*"))
    model, optimizer = far(folder, **plan)
    train(model, optimizer, "gpt", 0, STEPS)
    return unequal(found, everything(model, optimizer)), files


@pytest.mark.parametrize("plan", [{}, EARLY], ids=["step", "in backward"])
def test_a_rank_killed_in_a_step(pool: Pool, tmp_path: Path, plan: dict[str, Any]) -> None:
    told, dead = pool.run(2, killed_in_a_step, str(tmp_path), plan, may_die=True)
    assert dead == Died(-signal.SIGKILL)
    assert "rank 1" in told and "died" in told
    left = {p.name for p in tmp_path.glob("zerofx-rank1-*")}
    assert left  # nobody was there to remove them
    for differs, files in pool.run(2, taken_up, str(tmp_path), plan):
        assert not differs
        assert files and not left & set(files)
