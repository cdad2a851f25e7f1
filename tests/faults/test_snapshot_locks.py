"""Who may save to a place, and what a save may remove there: owners, marks, checks before it."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from snapshot_cases import tree

import zerofx
from zerofx.errors import SnapshotError
from zerofx.nvme.folder import whoami
from zerofx.snapshot import target


@pytest.fixture(scope="module")
def run() -> Any:
    model = zerofx.compile(torch.nn.Linear(4, 3), {"kernels": "aten"})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def save(folder: Path, run: Any, value: float = 1.0) -> None:
    model, optimizer = run
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    zerofx.save(folder, model, optimizer, extra={"value": value})


def value_in(folder: Path, run: Any) -> float:
    value = zerofx.load(folder, *run)["value"]
    assert all(bool((p == value).all()) for p in run[0].parameters())
    return float(value)


def refused(folder: Path, run: Any, *texts: str) -> str:
    """Assert that a save is refused with these texts, and changes nothing on disk."""
    before = tree(folder.parent)
    with pytest.raises(SnapshotError) as caught:
        save(folder, run, 2.0)
    for text in texts:
        assert text in str(caught.value), caught.value
    assert tree(folder.parent) == before
    return str(caught.value)


# -- locks ----------------------------------------------------------------------------------------
def test_a_process_that_saves_is_not_disturbed(tmp_path: Path, run: Any) -> None:
    """The second of two jobs is refused while the first runs, and takes over once it is dead."""
    folder = tmp_path / "save"
    save(folder, run)
    first = target.Lock(tmp_path / ".save.lock", folder)
    also = target.Lock(tmp_path / ".w.safetensors.lock", folder)
    refused(folder, run, f"process {os.getpid()} of host", "Give each job a directory of its own")
    with pytest.raises(SnapshotError, match="is being written by process"):
        zerofx.export(tmp_path / "w.safetensors", run[0])
    also.release()
    assert value_in(folder, run) == 1.0
    os.close(first._fd)  # as when its process dies
    save(folder, run, 3.0)
    assert value_in(folder, run) == 3.0
    assert os.listdir(tmp_path) == ["save"]


def write_lock(folder: Path, **changes: Any) -> Path:
    owner = {"zerofx": "lock", **whoami(), "started": "1", **changes}
    path = folder.parent / f".{folder.name}.lock"
    path.write_text(json.dumps(owner))
    return path


def test_the_lock_of_another_host(tmp_path: Path, run: Any) -> None:
    folder = tmp_path / "save"
    path = write_lock(folder, host="node7", boot="another")
    os.utime(path, (time.time() - 7300, time.time() - 7300))
    refused(folder, run, "of host node7", "(2 h ago)", f"If it has ended, remove {path}")
    path.unlink()
    save(folder, run)


def test_the_lock_of_this_host_before_it_was_rebooted(tmp_path: Path, run: Any) -> None:
    write_lock(tmp_path / "save", boot="before")
    save(tmp_path / "save", run)
    assert os.listdir(tmp_path) == ["save"]


def test_a_file_system_without_flock(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the process of the lock's number and start time is looked for."""

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(target.fcntl, "flock", none)
    folder = tmp_path / "save"
    started = target._started(os.getppid())
    write_lock(folder, pid=os.getppid(), started=started)
    refused(folder, run, f"process {os.getppid()}", "is being written")
    write_lock(folder, pid=os.getppid(), started="1")  # an earlier process of that number
    save(folder, run)
    assert os.listdir(tmp_path) == ["save"]


def test_a_lock_that_was_removed(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lost the lock does not publish."""
    folder = tmp_path / "save"
    save(folder, run)
    monkeypatch.setattr(target, "check_written", lambda *_: os.unlink(tmp_path / ".save.lock"))
    with pytest.raises(SnapshotError, match="was removed while this process saved"):
        save(folder, run, 2.0)
    assert value_in(folder, run) == 1.0 and os.listdir(tmp_path) == ["save"]


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("notes"),
        lambda path: path.write_text('{"zerofx": "lock", "pid": "none"}'),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("elsewhere"),
    ],
    ids=["text", "half", "pipe", "directory", "link"],
)
def test_something_else_under_the_name_of_the_lock(
    tmp_path: Path, run: Any, make: Callable[[Path], None]
) -> None:
    make(tmp_path / ".save.lock")
    refused(tmp_path / "save", run, f"{tmp_path / '.save.lock'} is in the way")


# -- what is a user's own -------------------------------------------------------------------------
@pytest.mark.parametrize("role", ["old", "new"])
def test_a_directory_of_the_user_in_the_way(tmp_path: Path, run: Any, role: str) -> None:
    theirs = tmp_path / f".save.{role}"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("years of work")
    refused(tmp_path / "save", run, f"{theirs} is in the way")
    save(tmp_path / "other", run)
    assert (theirs / "thesis.tex").exists()


def test_directories_of_the_user_that_look_like_ours(tmp_path: Path, run: Any) -> None:
    theirs = [tmp_path / f".save.saving-{end}" for end in ("0123abcd", "notes")]
    for path in theirs:
        path.mkdir()
        (path / "thesis.tex").write_text("years of work")
    ours = tmp_path / ".save.saving-0000ffff"
    ours.mkdir()
    (ours / ".zerofx").touch()
    (ours / "__0_0.distcp").write_text("half")
    save(tmp_path / "save", run)
    assert all((path / "thesis.tex").exists() for path in theirs)
    assert not ours.exists()


def test_files_of_the_user_in_a_snapshot_are_kept(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "save"
    save(folder, run)
    (folder / "notes.txt").write_text("years of work")
    (folder / "plots").mkdir()
    save(folder, run, 2.0)
    (kept,) = tmp_path.glob("save.kept-*")
    assert sorted(os.listdir(kept)) == ["notes.txt", "plots"]
    assert str(kept) in caplog.text and "notes.txt" in caplog.text
    assert value_in(folder, run) == 2.0


# -- before the first byte ------------------------------------------------------------------------
def test_a_mount_point(run: Any) -> None:
    shm = Path("/dev/shm")
    if not os.path.ismount(shm):
        pytest.skip("/dev/shm is no mount point here")
    before = os.listdir("/dev")
    with pytest.raises(SnapshotError, match="/dev/shm is a mount point"):
        save(shm, run)
    assert os.listdir("/dev") == before


def test_a_mount_of_the_same_file_system(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bind mount has its parent's device number, and shows in the list of mounts alone."""
    (tmp_path / "a b").mkdir()
    listed = f"36 35 98:0 / {tmp_path}/a\\040b rw - ext4 /dev/vda rw\n"
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda p, *a, **k: listed if p.name == "mountinfo" else read(p, *a, **k)
    )
    refused(tmp_path / "a b", run, "is a mount point", str(tmp_path / "a b" / "save"))


def test_too_little_space(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "free_bytes", lambda _: 40)
    refused(tmp_path / "save", run, "at least", "40 B are free")
    with pytest.raises(SnapshotError, match="40 B are free"):
        zerofx.export(tmp_path / "model", run[0])
    assert tree(tmp_path) == []


def test_another_user_in_a_directory_like_tmp(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "save", run)
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
    refused(tmp_path / "save", run, f"belongs to user {os.getuid()}", "may not replace it")


def test_an_export_to_the_wrong_kind(tmp_path: Path, run: Any) -> None:
    (tmp_path / "a.safetensors").mkdir()
    (tmp_path / "b").write_text("notes")
    for name in ("a.safetensors", "b"):
        before = tree(tmp_path)
        with pytest.raises(SnapshotError, match="Give"):
            zerofx.export(tmp_path / name, run[0])
        assert tree(tmp_path) == before


def test_an_export_stays_on_the_file_system_of_its_directory(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []
    monkeypatch.setattr(target, "free_bytes", lambda path: places.append(path) or 1 << 60)
    zerofx.export(tmp_path / "model", run[0])
    assert places[0].parent == tmp_path / "model"
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]


# -- two jobs that save to one path, and are killed -----------------------------------------------
def pairs(folder: str, count: int, seed: int) -> dict[str, int]:
    """Let two children save to one place until each is killed; load what remains, every time."""
    warnings.simplefilter("ignore", DeprecationWarning)  # it forks beside gloo's threads
    model = zerofx.compile(torch.nn.Linear(4, 3), {"kernels": "aten"})
    run = model, torch.optim.SGD(model.parameters(), lr=0.1)
    save(Path(folder), run, 0.0)
    rng, seen, found = random.Random(seed), {"changed": 0, "found": 0}, 0.0
    for number in range(count):
        children = [
            _saver(Path(folder), run, 1.0 + 2 * number + which, rng.uniform(0.0, 0.15))
            for which in (0, 1)
        ]
        for child in children:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == -signal.SIGKILL, status
        before, found = found, value_in(Path(folder), run)
        seen["found"] += 1
        seen["changed"] += found != before
    return seen


def _saver(folder: Path, run: Any, value: float, delay_s: float) -> int:
    child = os.fork()
    if child:
        return child
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, max(delay_s, 1e-4))
    try:
        while True:
            try:
                save(folder, run, value)
            except SnapshotError as error:
                if "is being written" not in str(error):
                    raise
    except BaseException as error:
        print(f"pair of {folder}: {error!r}", file=sys.stderr, flush=True)
        os._exit(9)


@pytest.mark.parametrize("count", [4, pytest.param(500, marks=pytest.mark.slow)])
def test_pairs_that_are_killed(pool: Pool, tmp_path: Path, count: int) -> None:
    """A whole snapshot remains every time, and the last save tidies up."""
    folder = tmp_path / "save"
    (seen,) = pool.run(1, pairs, str(folder), count, count, timeout_s=1200.0)
    assert seen["found"] == count and seen["changed"] >= count // 20
    model = zerofx.compile(torch.nn.Linear(4, 3), {"kernels": "aten"})
    run = model, torch.optim.SGD(model.parameters(), lr=0.1)
    save(folder, run, -1.0)
    assert value_in(folder, run) == -1.0 and os.listdir(tmp_path) == ["save"]
