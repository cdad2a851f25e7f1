"""The folder of the NVMe tier: can it be used, is it shared, and what did dead jobs leave."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zerofx import nvme
from zerofx.errors import NvmeError
from zerofx.nvme import folder


def made(home: Path, label: str = "rank0-opt") -> Any:
    store = nvme.NvmeStore.create(home, {"w": 40}, label=label)
    store.write("w", torch.ones(10)).wait()
    return store


def left_behind(home: Path) -> Path:
    """A file as a killed process leaves it: whole, and no longer locked."""
    store = made(home)
    path = home / "zerofx-rank0-opt-host-1-00000000.nvme"
    path.write_bytes(Path(store.path).read_bytes())
    store.close()
    return path


def test_a_folder_is_made_if_only_it_is_missing(tmp_path: Path) -> None:
    assert nvme.prepare(tmp_path / "new") == tmp_path / "new"
    assert (tmp_path / "new").is_dir()
    with pytest.raises(
        NvmeError, match=r"far/away: neither it nor .*far exists. Create the folder"
    ):
        nvme.prepare(tmp_path / "far" / "away")
    assert not (tmp_path / "far").exists()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for use in (nvme.prepare, made):
        with pytest.raises(NvmeError, match=r"file is a file. The NVMe tier needs a folder"):
            use(tmp_path / "file")


def test_a_folder_where_nothing_can_be_written() -> None:
    """/proc refuses new files to everybody, root included."""
    with pytest.raises(NvmeError, match=r"cannot write to the folder /proc: .*\(E[A-Z]+\). "):
        nvme.prepare("/proc")
    with pytest.raises(NvmeError, match=r"cannot make the folder /proc/new: .*\(E[A-Z]+\). "):
        nvme.prepare("/proc/new")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(NvmeError, match=r"cannot write .*\(EACCES\). Give this user the rights"):
        nvme.prepare(tmp_path / "closed")


def test_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(NvmeError, match=r"cannot write .*\(EROFS\). Remount the file system"):
        nvme.prepare(tmp_path)


def test_too_little_space_is_said_with_both_numbers(tmp_path: Path) -> None:
    needed = nvme.free_bytes(tmp_path) + 2**50
    with pytest.raises(NvmeError) as caught:
        nvme.prepare(tmp_path, needed, "the optimizer states of rank 0")
    text = str(caught.value)
    assert "the optimizer states of rank 0 needs 10" in text and f"({needed} bytes) but" in text
    assert "bytes) are free. Free space there, choose another path, or offload less" in text
    with pytest.raises(NvmeError, match=r"rank0-opt needs .* but .* are free"):
        nvme.NvmeStore.create(tmp_path, {"w": needed}, label="rank0-opt")
    assert not list(tmp_path.iterdir())


def test_space_that_goes_while_it_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NvmeError, match=r"cannot reserve .* bytes\) for rank0-opt in .*ENOSPC"):
        made(tmp_path)
    assert not list(tmp_path.iterdir())


def test_two_jobs_share_a_folder(tmp_path: Path) -> None:
    """Each has a file of its own, locked: neither writes nor removes the other's."""
    one, two = made(tmp_path), made(tmp_path)
    assert one.path != two.path
    assert nvme.remove_left_behind(tmp_path) == []
    two.write("w", torch.zeros(10)).wait()
    assert torch.equal(one.read("w", torch.empty(10)).wait(), torch.ones(10))
    two.close()
    nvme.prepare(tmp_path)
    assert torch.equal(one.read("w", torch.empty(10)).wait(), torch.ones(10))
    one.close()


def test_what_a_dead_job_left_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = left_behind(tmp_path)
    with caplog.at_level(logging.WARNING, "zerofx"):
        store = made(tmp_path)
    assert not path.exists() and Path(store.path).exists()
    assert f"{path}: removed, left behind by process" in caplog.text
    store.close()


def test_what_another_host_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lock need not be seen here, so that it may be alive."""
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(folder, "_boot", lambda: "another boot")
    path = left_behind(tmp_path)
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING, "zerofx"):
        assert nvme.remove_left_behind(tmp_path) == []
    assert path.exists() and "on elsewhere, at" in caplog.text and "may still use it" in caplog.text
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert nvme.remove_left_behind(tmp_path) == [path]


def test_what_died_while_it_was_made_is_removed(tmp_path: Path) -> None:
    path = left_behind(tmp_path)
    os.truncate(path, 4096 + 100)
    assert nvme.remove_left_behind(tmp_path) == [path]


def test_what_is_not_left_behind_stays(tmp_path: Path) -> None:
    kept = made(tmp_path)
    kept.close(delete=False)
    foreign = tmp_path / "zerofx-rank0-foreign.nvme"
    foreign.write_bytes(b"somebody's data" * 1000)
    elsewhere = left_behind(tmp_path).rename(tmp_path / "renamed-by-its-user.bin")
    (tmp_path / "zerofx-folder.nvme").mkdir()
    assert nvme.remove_left_behind(tmp_path) == []
    assert Path(kept.path).exists() and foreign.exists() and elsewhere.exists()


def test_a_forgotten_store_goes(tmp_path: Path) -> None:
    path = made(tmp_path).path
    assert not os.path.exists(path)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # that is what it is about
def test_a_child_neither_removes_nor_locks_it(tmp_path: Path) -> None:
    """A worker that outlives its parent must not make the parent's files look alive."""
    store = made(tmp_path)
    (reading, writing), (started, starts) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - another process
        os.close(writing)
        os.write(starts, b".")
        os.read(reading, 1)  # until the parent is done
        store.close()
        del store
        os._exit(0)
    os.read(started, 1)  # it has let go of what it inherited
    for end in (reading, started, starts):
        os.close(end)
    path = Path(store.path)
    assert path.exists()
    store.close(delete=False)
    with nvme.NvmeStore.open(path) as again:  # the child holds no lock
        assert torch.equal(again.read("w", torch.empty(10)).wait(), torch.ones(10))
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert path.exists()


HOLDS = """
import sys, torch
from zerofx import nvme
store = nvme.NvmeStore.create(sys.argv[1], {"w": 40_000_000}, label="rank0-opt")
x = torch.ones(10_000_000)
store.write("w", x).wait()
print(store.path, flush=True)
while True:
    store.write("w", x)
    store.wait()
"""


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    """Alive, its file is left alone; killed in the middle of a write, the next start cleans."""
    job = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    try:
        path = Path(job.stdout.readline().strip())
        mine = made(tmp_path)
        assert path.exists()
        with pytest.raises(NvmeError, match=f"in use by process {job.pid} on "):
            nvme.NvmeStore.open(path)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait(30)
        job.stdout.close()
    assert path.exists()
    assert nvme.remove_left_behind(tmp_path) == [path]
    assert not path.exists() and Path(mine.path).exists()
    mine.close()
