"""A save that is interrupted, at any point and in any way, leaves the one before."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Died, Pool
from snapshot_cases import assert_same, compiled, everything, train

import zerofx
from zerofx.errors import DesyncError, SnapshotError

# Every call that changes what lies on disk; what is not yet flushed is not there to be lost.
CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink")
MOST = 40  # more calls than one save makes


def small(value: float, folder: Path | str | None = None) -> Any:
    """Return (model, optimizer) full of `value`, saved where a folder is given."""
    model = zerofx.compile(torch.nn.Linear(4, 3), {"kernels": "aten"})
    optimizer = torch.optim.SGD(model.parameters(), lr=value)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    if folder is not None:
        zerofx.save(folder, model, optimizer, extra={"value": value})
    return model, optimizer


def value_in(folder: Path) -> float:
    """Load a snapshot and return the one value that all of it has."""
    model, optimizer = small(9.0)
    value = zerofx.load(folder, model, optimizer)["value"]
    assert all(bool((p == value).all()) for p in model.parameters())
    assert optimizer.param_groups[0]["lr"] == value
    return value


def on_call(number: int, act: Callable[[str], None]) -> dict[str, Any]:
    """Return os functions of which the number-th call acts first."""
    calls = [0]

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                act(name)
            return real(*args, **kwargs)

        return call

    return {name: watched(name) for name in CALLS}


def tidy(folder: Path) -> bool:
    """Return whether a snapshot lies alone in its directory."""
    return [p.name for p in folder.parent.iterdir()] == [folder.name]


# -- the file system refuses ----------------------------------------------------------------------
def save_refused(folder: Path, number: int) -> tuple[bool, bool]:
    """Save while the number-th call fails; return whether there was one, and whether it raised."""
    model, optimizer = small(2.0)
    met: list[str] = []

    def refuse(name: str) -> None:
        met.append(name)
        raise OSError(28, "No space left on device", name)

    with pytest.MonkeyPatch.context() as patch:
        for name, function in on_call(number, refuse).items():
            patch.setattr(os, name, function)
        try:
            zerofx.save(folder, model, optimizer, extra={"value": 2.0})
        except SnapshotError as error:
            assert "No space left on device" in str(error)
            return True, True
    return bool(met), False


@pytest.mark.parametrize("has_previous", [True, False])
def test_any_call_fails(tmp_path: Path, has_previous: bool) -> None:
    outcomes = []
    for number in range(1, MOST):
        folder = tmp_path / str(number) / "save"
        folder.parent.mkdir()
        if has_previous:
            small(1.0, folder)
        has_failed, was_refused = save_refused(folder, number)
        if has_previous or folder.exists():
            outcomes.append(value_in(folder))
            assert was_refused or outcomes[-1] == 2.0
        else:
            assert was_refused
        small(3.0, folder)
        assert value_in(folder) == 3.0 and tidy(folder)
        if not has_failed:
            break
    assert not has_failed and number > 8
    assert set(outcomes) == ({1.0, 2.0} if has_previous else {2.0})


def save_on_full_disk(folder: str) -> str:
    """Save while rank 1's files may have 3 kB (the kernel's own limit: a write fails half-way)."""
    model, optimizer = compiled("gpt", {"stage": 3})
    rank = model._engine.world.rank
    zerofx.save(folder, model, optimizer, extra={"step": 0})
    train(model, optimizer, "gpt", 0, 1)
    before = everything(model, optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(SnapshotError) as caught:
            zerofx.save(folder, model, optimizer, extra={"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same(everything(model, optimizer), before)
    train(model, optimizer, "gpt", 1, 2)
    assert zerofx.load(folder, model, optimizer) == {"step": 0}
    zerofx.save(folder, model, optimizer, extra={"step": 2})
    assert zerofx.load(folder, model, optimizer) == {"step": 2}
    return str(caught.value)


def test_disk_full_on_one_rank(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, save_on_full_disk, str(tmp_path / "save"))
    assert "rank 1: " in first and "File too large" in second
    assert tidy(tmp_path / "save")


# -- the process dies -----------------------------------------------------------------------------
def die(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_a_child(folder: str) -> list[float]:
    """Kill a forked child at each call of a save; return what is loaded after each."""
    warnings.simplefilter("ignore", DeprecationWarning)  # it forks beside gloo's threads
    model, optimizer = small(2.0)
    values = []
    for number in range(1, MOST):
        small(1.0, folder)
        assert tidy(Path(folder))
        child = os.fork()
        if child == 0:
            for name, function in on_call(number, die).items():
                setattr(os, name, function)
            zerofx.save(folder, model, optimizer, extra={"value": 2.0})
            os._exit(3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        values.append(value_in(Path(folder)))
        if status == 3:
            return values
        assert status == -signal.SIGKILL
    raise AssertionError("never saved")


def test_killed_at_any_call(pool: Pool, tmp_path: Path) -> None:
    (values,) = pool.run(1, killed_in_a_child, str(tmp_path / "save"))
    assert len(values) > 8 and values[0] == 1.0 and values[-1] == 2.0
    assert values == sorted(values)


def save_killed(folder: str, number: int, rank: int) -> str:
    """Save while `rank` is killed at its number-th call; return what became of the others."""
    is_victim = os.environ["RANK"] == str(rank)
    model, optimizer = small(2.0)
    if is_victim:
        for name, function in on_call(number, die).items():
            setattr(os, name, function)
    try:
        zerofx.save(folder, model, optimizer, extra={"value": 2.0})
    except DesyncError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(("rank", "number"), [(1, 1), (0, 5)])
def test_one_of_two_is_killed(pool: Pool, tmp_path: Path, rank: int, number: int) -> None:
    folder = tmp_path / "save"
    small(1.0, folder)
    results = pool.run(2, save_killed, str(folder), number, rank, may_die=True)
    assert isinstance(results[rank], Died)
    assert f"rank {rank}" in results[1 - rank] and "died" in results[1 - rank]
    assert value_in(folder) == 1.0
    small(3.0, folder)
    assert value_in(folder) == 3.0 and tidy(folder)


def save_until_killed(folder: str, delay_s: float) -> str:
    model, optimizer = small(1.0)
    if os.environ["RANK"] == "0":
        threading.Timer(delay_s, die, [""]).start()
    try:
        for _ in range(10_000):
            zerofx.save(folder, model, optimizer, extra={"value": 1.0})
    except DesyncError as error:
        return str(error)
    return "never killed"


@pytest.mark.parametrize("world", [1, 2])
def test_killed_at_random(pool: Pool, tmp_path: Path, world: int) -> None:
    folder = tmp_path / "save"
    small(1.0, folder)
    rng = random.Random(world)
    for _ in range(4 - world):
        delay_s = rng.uniform(0.0, 0.2)
        results = pool.run(world, save_until_killed, str(folder), delay_s, may_die=True)
        assert isinstance(results[0], Died)
        assert value_in(folder) == 1.0
        for text in results[1:]:
            assert "rank 0" in text and "died" in text
