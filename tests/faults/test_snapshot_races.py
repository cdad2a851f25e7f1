"""A load while other processes save to the same place: all that is loaded is of one save."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import zerofx
from zerofx.errors import SnapshotError
from zerofx.snapshot import dcp, held, spread, target
from zerofx.snapshot import files as snapshot_files
from zerofx.snapshot.sources import source as sources
from zerofx.snapshot.sources import tensor_files


def filled(value: float, stage: int = 3) -> tuple[Any, Any]:
    """Return (model, optimizer) of which every tensor is full of `value`."""
    model = zerofx.compile(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4)),
        {"kernels": "aten", "stage": stage},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    fill(model, optimizer, value)
    return model, optimizer


@torch.no_grad()
def fill(model: Any, optimizer: Any, value: float) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.fill_(value)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"].fill_(value)
    optimizer.param_groups[0]["lr"] = value


def save(folder: Path | str, run: tuple[Any, Any], value: float) -> None:
    fill(*run, value)
    zerofx.save(folder, *run, extra={"value": value})


def load(folder: Path | str, run: tuple[Any, Any]) -> float:
    """Load a snapshot and return the one value that all of it has on this rank."""
    model, optimizer = run
    fill(model, optimizer, -1.0)
    value = zerofx.load(folder, model, optimizer)["value"]
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    states = {f"{n}.momentum": optimizer.state[p] for n, p in model.named_parameters()}
    tensors |= {name: state["momentum_buffer"] for name, state in states.items()}
    for name, tensor in tensors.items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        assert bool((local == value).all()), f"{name} is {local}, extra {value}"
    assert optimizer.param_groups[0]["lr"] == value
    return float(value)


class Swap:
    """Snapshots of values 1 and 2, published by turns under one name as `save` does it."""

    def __init__(self, parent: Path, run: tuple[Any, Any] | None = None) -> None:
        self.folder = parent / "save"
        self._made = [parent / f"made-{value}" for value in (1, 2)]
        self._copies = 0
        self.turn = 1
        if run is not None:
            for number, made in enumerate(self._made):
                save(made, run, number + 1.0)
            save(self.folder, run, 1.0)

    def __call__(self) -> None:
        self._copies += 1
        written = self.folder.parent / f".copy-{os.getpid()}-{self._copies}"
        shutil.copytree(self._made[self.turn % 2], written)
        target.publish(written, self.folder)
        self.turn += 1


@contextmanager
def at_call(
    owner: Any, name: str, numbers: set[int], act: Callable[[], Any]
) -> Iterator[list[int]]:
    """Act before the calls of these numbers (from 1) of a function; yield how many there were."""
    real, count = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] in numbers:
            act()
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield count


@pytest.fixture(scope="module")
def run() -> tuple[Any, Any]:
    return filled(0.0)


@pytest.fixture
def swap(tmp_path: Path, run: Any) -> Swap:
    return Swap(tmp_path, run)


# -- swaps at the worst moments -------------------------------------------------------------------
def test_swap_before_any_tensor(swap: Swap, run: Any) -> None:
    """The values and every tensor are read by torch.load: a save is published before each."""
    number, count = 0, [1]
    while number < count[0]:
        number += 1
        with at_call(torch, "load", {number}, swap) as count:
            assert load(swap.folder, run) in (1.0, 2.0)
    assert number > 8


@pytest.mark.parametrize(
    ("step", "number"), [("__init__", 1), ("plan", 1), ("plan", 2), ("read", 1)]
)
def test_swap_between_two_steps(swap: Swap, run: Any, step: str, number: int) -> None:
    """A save is published after the check, and before the index or any tensor is read."""
    with at_call(dcp.LoadSteps, step, {number}, swap) as count:
        assert load(swap.folder, run) in (1.0, 2.0)
    assert count[0] >= number


def test_swap_before_every_tensor(swap: Swap, run: Any) -> None:
    with at_call(torch, "load", set(range(100)), swap):
        assert load(swap.folder, run) in (1.0, 2.0)


def test_swap_before_any_file_is_opened(swap: Swap, run: Any) -> None:
    number, count = 0, [1]
    while number < count[0]:
        number += 1
        with at_call(held.HeldFiles, "_opened", {number}, swap) as count:
            assert load(swap.folder, run) in (1.0, 2.0)
    assert number > 3


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_more_files_than_descriptors(swap: Swap, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are closed and opened again are of the same save, or the load starts again."""
    monkeypatch.setattr(held.resource, "getrlimit", lambda _: (4, 4))
    before = descriptors()
    with at_call(held.HeldFiles, "_opened", set(), swap) as count:
        assert load(swap.folder, run) == 1.0
    for number in range(1, count[0] + 1):
        with at_call(held.HeldFiles, "_opened", {number}, swap):
            assert load(swap.folder, run) in (1.0, 2.0)
    assert descriptors() <= before  # others of the process may be closed meanwhile


def test_never_settled(swap: Swap, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that meets a new save at each attempt ends, and says so."""
    monkeypatch.setattr(held, "TRIES", 4)
    before = descriptors()
    with (
        at_call(held.HeldFiles, "_opened", set(range(100)), swap),
        at_call(snapshot_files, "open_snapshot", set(), swap) as count,
        pytest.raises(SnapshotError) as caught,
    ):
        load(swap.folder, run)
    assert count == [4]
    assert "replaced during each of 4 attempts" in str(caught.value)
    assert "loaded in part" not in str(caught.value)
    assert descriptors() <= before  # others of the process may be closed meanwhile


def stale() -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_stale_handles(swap: Swap, run: Any) -> None:
    """NFS answers ESTALE for a file that another host has deleted: at any read of any attempt."""
    with at_call(torch, "load", set(), swap) as count:
        load(swap.folder, run)
    for number in range(1, count[0] + 1):

        def act() -> None:
            swap()
            stale()

        with at_call(torch, "load", {number}, act):
            assert load(swap.folder, run) in (1.0, 2.0)


def test_what_is_loaded_in_part_is_said(
    swap: Swap, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the attempt after a broken read finds no snapshot, the model keeps a part of each."""
    monkeypatch.setattr(held, "TRIES", 2)

    def act() -> None:
        (swap.folder / "zerofx.json").unlink()
        stale()

    with at_call(torch, "load", {4}, act), pytest.raises(SnapshotError) as caught:
        load(swap.folder, run)
    assert "half-written" in str(caught.value) or "alone" in str(caught.value)
    assert "The model is loaded in part" in str(caught.value)


def test_damage_is_no_swap(swap: Swap, run: Any) -> None:
    """What is damaged is reported at once, and not read again."""
    os.truncate(swap.folder / "values.pt", 10)
    with (
        at_call(snapshot_files, "open_snapshot", set(), swap) as count,
        pytest.raises(SnapshotError, match="truncated"),
    ):
        load(swap.folder, run)
    assert count == [1]


def test_between_two_renames(swap: Swap, run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """While a save publishes, the name is missing; that is no interrupted save."""
    away = swap.folder.parent / ".save.old"
    os.rename(swap.folder, away)
    with at_call(time, "sleep", {2}, lambda: os.rename(away, swap.folder)):
        assert load(swap.folder, run) == 1.0
    assert not caplog.records


def test_a_link_that_moves_on(swap: Swap, run: Any) -> None:
    """A link to the latest of several snapshots, of which the older are deleted."""
    link = swap.folder.parent / "latest"
    link.symlink_to("made-1")

    def move() -> None:
        link.unlink()
        link.symlink_to("made-2")
        shutil.rmtree(swap.folder.parent / "made-1")

    with at_call(snapshot_files, "open_snapshot", {1}, move):
        assert load(link, run) == 2.0


def test_two_jobs_that_save(swap: Swap, run: Any) -> None:
    """What another job has removed of a save does not replace the save before."""

    def remove() -> None:
        (written,) = swap.folder.parent.glob(".save.saving-*")
        (written / "__0_0.distcp").unlink()

    with (
        at_call(snapshot_files, "write_manifest", {1}, remove),
        pytest.raises(SnapshotError, match="give each job a directory of its own"),
    ):
        save(swap.folder, run, 2.0)
    assert load(swap.folder, run) == 1.0


# -- several ranks --------------------------------------------------------------------------------
def swapped_on_rank_1(parent: str) -> list[float]:
    """Publish another save before each read of rank 1, then between the openings of both ranks."""
    run = filled(0.0)
    rank = run[0]._engine.world.rank
    swap = Swap(Path(parent), run)
    values, number, count = [], 0, [1]
    while number < count[0]:
        number += 1
        with at_call(torch, "load", {number} if rank == 1 else set(), swap) as count:
            values.append(load(swap.folder, run))
    flag = Path(parent) / "rank 0 has opened"
    with pytest.MonkeyPatch.context() as patch:
        real = snapshot_files.open_snapshot

        def opened(folder: Path) -> Any:
            is_first = not flag.exists()
            if rank == 0:
                found = real(folder)
                flag.touch()
                return found
            while not flag.exists():
                time.sleep(1e-3)
            if is_first:
                swap()
            return real(folder)

        patch.setattr(snapshot_files, "open_snapshot", opened)
        values.append(load(swap.folder, run))
    return values


def test_swaps_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, swapped_on_rank_1, str(tmp_path))
    assert first == second
    assert len(first) > 8


# -- safetensors ----------------------------------------------------------------------------------
def exported(folder: Path, run: Any, value: float, max_file_bytes: int) -> None:
    fill(*run, value)
    zerofx.export(folder, run[0], max_file_bytes=max_file_bytes)


def weights_of(folder: Path, run: Any, strict: bool = True) -> float:
    """Load weights and return their one value."""
    model = run[0]
    fill(*run, -1.0)
    zerofx.load_weights(model, folder, strict=strict)
    values = {t.flatten()[0].item() for t in (*model.parameters(), *model.buffers())}
    assert len(values) == 1, values
    return float(values.pop())


@pytest.mark.parametrize(("old", "new"), [(50, 50), (10**9, 50), (50, 10**9), (10**9, 10**9)])
def test_export_while_weights_load(tmp_path: Path, run: Any, old: int, new: int) -> None:
    """An export is finished before any one tensor is read, or any file is opened."""
    folder = tmp_path / "model"
    source = filled(0.0)
    for owner, name in ((sources.Entry, "read"), (tensor_files, "_json")):
        number, count = 0, [1]
        while number < count[0]:
            number += 1
            shutil.rmtree(folder, ignore_errors=True)
            exported(folder, source, 1.0, old)
            act = lambda: exported(folder, source, 2.0, new)  # noqa: E731
            with at_call(owner, name, {number}, act) as count:
                assert weights_of(folder, run) in (1.0, 2.0)


@pytest.mark.parametrize("new", [50, 10**9])
@pytest.mark.parametrize("call", ["replace", "unlink"])
def test_export_in_between(tmp_path: Path, run: Any, new: int, call: str) -> None:
    """An export is under way while weights are loaded: any of its renames and deletions is next."""
    folder = tmp_path / "model"
    source = filled(0.0)
    found: list[Any] = []

    def act() -> None:
        try:
            found.append(weights_of(folder, run, strict=False))
        except SnapshotError as error:
            found.append(str(error))

    number, count = 0, [1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_SECOND_LOOK_S", 0.0)
        while number < count[0]:
            number += 1
            shutil.rmtree(folder, ignore_errors=True)
            exported(folder, source, 1.0, 50)
            with at_call(os, call, {number}, act) as count:
                exported(folder, source, 2.0, new)
    assert found
    for each in found:
        assert each in (1.0, 2.0) or str(folder) in str(each)


def test_weights_written_in_place(tmp_path: Path, run: Any) -> None:
    """A file that is written to while it is read is read again."""
    path, other = tmp_path / "w.safetensors", tmp_path / "other.safetensors"
    for value, where in ((1.0, path), (2.0, other)):
        fill(*run, value)
        zerofx.export(where, run[0])

    def write() -> None:
        with open(path, "r+b") as file:
            file.write(other.read_bytes())
        os.utime(path, ns=(0, 0))

    with at_call(sources.Entry, "read", {3}, write):
        assert weights_of(path, run) == 2.0


# -- races ----------------------------------------------------------------------------------------
def raced_alone(folder: str, count: int) -> list[int]:
    """Load while a child saves; return the number of loads of either value, and of changes."""
    warnings.simplefilter("ignore", DeprecationWarning)  # it forks beside gloo's threads
    run = filled(0.0)
    save(folder, run, 1.0)
    child = os.fork()
    if child == 0:
        saved = 0
        while True:
            saved += 1
            save(folder, run, 1.0 + saved % 2)
    try:
        return seen([load(folder, run) for _ in range(count)])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def seen(values: list[float]) -> list[int]:
    changes = sum(a != b for a, b in itertools.pairwise(values))
    return [values.count(1.0), values.count(2.0), changes]


def test_race_of_one_rank(pool: Pool, tmp_path: Path) -> None:
    (counts,) = pool.run(1, raced_alone, str(tmp_path / "save"), 60)
    assert counts[0] + counts[1] == 60
    assert counts[2] >= 1  # saves did come between


def raced_together(parent: str, count: int) -> list[int]:
    """Load on all ranks while a child of rank 0 publishes saves of as many ranks."""
    warnings.simplefilter("ignore", DeprecationWarning)
    run = filled(0.0)
    world = run[0]._engine.world
    swap = Swap(Path(parent), run)
    child = os.fork() if world.rank == 0 else None
    if child == 0:
        while True:
            swap()
            time.sleep(0.01)
    try:
        return seen([load(swap.folder, run) for _ in range(count)])
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_race_of_two_ranks(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, raced_together, str(tmp_path), 30)
    assert first == second
    assert first[0] + first[1] == 30
    assert first[2] > 3


SAVER = """
import os, sys
from test_snapshot_races import filled, save
run, saved, parent = filled(0.0), 0, os.getppid()
while os.getppid() == parent:
    saved += 1
    save(sys.argv[1], run, 1.0 + saved % 2)
    if saved == 1:
        print("saved", flush=True)
"""


def raced_with_another(folder: str, count: int) -> list[int]:
    run = filled(0.0)
    return seen([load(folder, run) for _ in range(count)])


def test_a_place_is_the_same_while_it_is_replaced(tmp_path: Path) -> None:
    folder, other = tmp_path / "runs" / "save", tmp_path / "other" / "save"
    folder.mkdir(parents=True)
    before = spread._where(folder)
    folder.rename(tmp_path / "runs" / "old")
    between = spread._where(folder)
    folder.mkdir()
    assert before == between == spread._where(folder) != spread._where(other)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "count"), [*[(1, 500)] * 4, (2, 250)])
def test_many_races(pool: Pool, tmp_path: Path, world: int, count: int) -> None:
    """Loads beside a process that saves without a pause: every one is of one save."""
    folder = str(tmp_path / "save")
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, folder],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        assert saver.stdout is not None
        assert saver.stdout.readline() == b"saved\n"
        for counts in pool.run(world, raced_with_another, folder, count, timeout_s=280.0):
            assert counts[0] + counts[1] == count
            assert min(counts[:2]) > 0
        assert saver.poll() is None
    finally:
        saver.kill()
        saver.communicate()
