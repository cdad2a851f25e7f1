"""The target of a save or an export: checked, locked, filled, published, tidied up.

    run/                        the published snapshot
    .run.lock                   the lock of the writer
    .run.saving-1f3a90c2/       being written; never read, removed by the next save
    .run.new/                   complete, about to be published
    .run.old/                   the previous snapshot, until the new one is published

Publishing is three renames: saving -> new, run -> old, new -> run. A directory with its final name
is always whole. If an interrupted save has left none, `open_snapshot` reads .new, or else .old, and
the next save first renames it back.

Every directory made by zerofx contains the file `.zerofx`, its mark, from the first moment to the
last. A directory without mark or manifest belongs to the user: it is never removed, and if it has
one of the names above, the save is refused. If a snapshot that is replaced contains files of the
user, they are kept, in `run.kept-5d20c1aa/`.

A lock has an owner: one process at a time saves or exports to a place.

    .run.lock   {"zerofx": "lock", "host": "node7", "boot": ..., "pid": 4711, "started": ...,
                 "time": "2026-11-23 12:00:00 UTC"}

The owner holds flock on the file, which the kernel releases when the process ends for any reason.
On its own host, a dead owner's lock is therefore taken over immediately. The text names the owner
for the others, and decides if flock does not help: a lock of another host is never taken over, and
without flock, zerofx looks for the process with that number and start time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from zerofx.errors import ArgumentError, SnapshotError
from zerofx.nvme.folder import free_bytes, whoami
from zerofx.plan.sizes import format_bytes

log = logging.getLogger("zerofx")

MANIFEST = "zerofx.json"
VALUES = "values.pt"
INDEX = ".metadata"  # written by torch.distributed.checkpoint
MARK = ".zerofx"
_MARK_TEXT = b"zerofx: the files of this directory are zerofx's, and it may remove them\n"
_SAVING = re.compile(r"saving-[0-9a-f]{8}")
# The files of a snapshot; a file server keeps deleted files as .nfs*.
_OURS = re.compile(
    rf"__\d+_\d+{re.escape(DEFAULT_SUFFIX)}|{re.escape(INDEX)}(\.tmp)?|{re.escape(VALUES)}"
    rf"|{re.escape(MANIFEST)}|{re.escape(MARK)}|\.nfs\w+"
)

_LOCK = "lock"
_MOST_LOCK_BYTES = 4096
_LOCK_TRIES = 100  # to open a file that others may remove at the same time
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


def check_call(call: str, path: object) -> None:
    """Check that a function was given a path where it expects one; `call` is the correct call.

    Raises:
        ArgumentError: it is something else, such as the model.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(
            f"{call.partition('(')[0]} was given a {type(path).__name__} instead of a path. "
            f"Call {call}."
        )


def place(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a snapshot, with links resolved."""
    return Path(os.path.realpath(folder))


def beside(folder: Path, role: str) -> Path:
    """Return the hidden path next to a snapshot for a role, such as "new" or "lock"."""
    return folder.parent / f".{folder.name}.{role}"


# -- before the first byte ------------------------------------------------------------------------
def check_place(folder: Path) -> None:
    """Check that a snapshot may be published here: nothing, a snapshot, or an empty directory.

    Raises:
        SnapshotError: says what has the name, and what to give instead.
    """
    while True:
        before = _number(folder)
        try:
            return _check_what_is_there(folder)
        except (SnapshotError, FileNotFoundError):
            if _number(folder) == before:  # otherwise another save has just published: look again
                raise


def _number(path: Path) -> int | None:
    """Return the inode number of a path; None if nothing has this name."""
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None


def _check_what_is_there(folder: Path) -> None:
    if folder.is_dir():
        if is_mount(folder):
            raise SnapshotError(
                f"{folder} is a mount point. A save replaces its whole directory, and a mount "
                f"point cannot be replaced. Give a directory in it, such as {folder / 'save'}."
            )
        if not (folder / MANIFEST).exists() and any(folder.iterdir()):
            raise SnapshotError(
                f"{folder} holds other files and no {MANIFEST}. A save replaces the whole "
                "directory. Give it one of its own."
            )
        _check_replaceable(folder)
    elif os.path.lexists(folder):
        raise SnapshotError(f"{folder} is a file. Give a directory.")


def _check_names(folder: Path) -> None:
    """Check that no file or directory of the user has a name that a save uses temporarily."""
    for role in ("new", "old"):
        left = beside(folder, role)
        if os.path.lexists(left) and not is_ours(left) and not _is_empty(left):
            raise SnapshotError(
                f"{left} is in the way: a save needs this name temporarily, and zerofx did not "
                "make this one. Move it, or save to another name."
            )


def is_mount(path: Path) -> bool:
    """Return whether something is mounted at a path, even from the same file system."""
    if os.path.ismount(path):
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return False
    escaped = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in str(path))
    return any(line.split(" ")[4] == escaped for line in lines)


def _check_replaceable(folder: Path) -> None:
    """Check that this user may rename and empty a directory that a save would replace."""
    found, parent = folder.stat(), folder.parent.stat()
    me = os.geteuid()
    is_sticky = parent.st_mode & stat.S_ISVTX and me not in (0, found.st_uid, parent.st_uid)
    if is_sticky or not os.access(folder, os.W_OK | os.X_OK):
        raise SnapshotError(
            f"{folder} belongs to user {found.st_uid}, and user {me} may not replace it. Save to "
            "another directory, or change its owner."
        )


def check_space(folder: Path, num_bytes: int) -> None:
    """Check that the file system of `folder` has enough space.

    Raises:
        SnapshotError: says how much is needed and how much is free.
    """
    free = free_bytes(folder)
    if num_bytes > free:
        raise SnapshotError(
            f"{folder}: the save needs at least {format_bytes(num_bytes)}, but "
            f"{format_bytes(free)} are free. Free space there, or save to another file system."
        )


# -- the lock ------------------------------------------------------------------------------------
class Lock:
    """The lock file at `path`, held from construction to `release`.

    Raises:
        SnapshotError: another process holds it; says which, since when, and how to continue.
        OSError: the directory cannot be written to.
    """

    def __init__(self, path: Path, place: Path) -> None:
        self.path, self._place = path, place
        for _ in range(_LOCK_TRIES):
            fd = _opened_lock(path)
            try:
                has_flock = _flocked(fd)
                if not _is_at(fd, path):  # its owner has released it meanwhile
                    os.close(fd)
                    continue
                self._check_owner(fd, has_flock)
                _write_owner(fd, {"zerofx": _LOCK, **whoami(), "started": _started(os.getpid())})
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd
            return
        raise SnapshotError(f"{path} keeps changing. Save when no other job saves to {place}.")

    def _check_owner(self, fd: int, has_flock: bool | None) -> None:
        """Check that the lock is free, or that its owner is dead.

        has_flock: whether this process now holds flock; None if the file system does not have it.
        """
        owner = _read_owner(fd, self.path)
        if owner is None and has_flock is not False:
            return
        said = _describe_owner(owner, time.time() - os.fstat(fd).st_mtime)
        is_here = owner is not None and (
            owner["boot"] == whoami()["boot"] or owner["host"] == socket.gethostname()
        )
        if has_flock is False or (is_here and has_flock is None and _is_alive(owner)):
            raise SnapshotError(
                f"{self._place} is being written by {said}. Give each job a directory of its own, "
                "or wait until that process has finished."
            )
        if not is_here:
            raise SnapshotError(
                f"{self._place} is locked by {said}. Another host cannot tell whether that process "
                f"still runs. Wait for it. If it has ended, remove {self.path}."
            )
        log.warning("%s: taken over from %s, which has ended.", self.path, said)

    def check(self) -> None:
        """Check that the lock file was not removed or replaced while this process held it.

        Raises:
            SnapshotError: names it.
        """
        if not _is_at(self._fd, self.path):
            raise SnapshotError(
                f"{self.path} was removed while this process saved to {self._place}. Another job "
                "may save there: give each job a directory of its own."
            )

    def release(self) -> None:
        """Release the lock and remove its file; a file that remains is taken over later."""
        try:
            if _is_at(self._fd, self.path):
                os.unlink(self.path)
        except OSError as error:
            log.warning("%s: could not be removed (%s).", self.path, error)
        finally:
            os.close(self._fd)


def _opened_lock(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise _foreign_lock(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _foreign_lock(path)
    return fd


def _foreign_lock(path: Path) -> SnapshotError:
    return SnapshotError(
        f"{path} is in the way: zerofx needs this name for a lock file, and did not make this "
        "one. Move it, or save to another name."
    )


def _flocked(fd: int) -> bool | None:
    """Try to take flock; return None if the file system does not have it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        raise
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _read_owner(fd: int, path: Path) -> dict[str, Any] | None:
    """Return the owner that the file names; None if it is empty, as after a crash."""
    text = os.pread(fd, _MOST_LOCK_BYTES, 0)
    if not text.strip(b"\0 \n"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _foreign_lock(path) from None
    if not isinstance(found, dict) or found.get("zerofx") != _LOCK:
        raise _foreign_lock(path)
    texts = all(isinstance(found.get(key), str) for key in ("host", "boot", "time"))
    if not (texts and type(found.get("pid")) is int):
        raise _foreign_lock(path)
    return found


def _write_owner(fd: int, owner: dict[str, Any]) -> None:
    text = json.dumps(owner).encode()
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))


def _describe_owner(owner: dict[str, Any] | None, age_s: float) -> str:
    if owner is None:
        return "another process"
    return (
        f"process {owner['pid']} of host {owner['host']}, since {owner['time']} "
        f"({_age_of(max(age_s, 0.0))} ago)"
    )


def _age_of(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _started(pid: int) -> str | None:
    """Return the start time of a process in the kernel's ticks; None if unknown or not Linux."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return said.rpartition(")")[2].split()[19]


def _is_alive(owner: dict[str, Any] | None) -> bool:
    """Return whether the owner, a process of this host, still runs; its pid may be reused."""
    return (
        owner is not None
        and owner["boot"] == whoami()["boot"]
        and _started(owner["pid"]) == owner.get("started")
    )


# -- writing --------------------------------------------------------------------------------------
class SavePlace:
    """A new hidden directory to write into, and the lock of the place for which it is.

    parent: the folder of both. name: the name from which both names are derived.
    """

    def __init__(self, parent: Path, name: str, what: Path) -> None:
        self._named = parent / name
        self._lock = Lock(beside(self._named, "lock"), what)
        self.path = beside(self._named, f"saving-{secrets.token_hex(4)}")

    def make(self) -> Path:
        """Remove remains of interrupted writers, and make the directory."""
        for left in _saving(self._named):
            discard(left)
        make(self.path)
        return self.path

    def check(self) -> None:
        """Check that this process still holds the lock."""
        self._lock.check()

    def close(self) -> None:
        """Remove what was not published, and release the lock."""
        discard(self.path)
        self._lock.release()


def make(folder: Path) -> None:
    """Make a directory with the mark of zerofx."""
    folder.mkdir()
    write_file(folder / MARK, _MARK_TEXT)


def begin(folder: Path) -> SavePlace:
    """Lock the place of a save, and tidy up after interrupted ones; `make` is yet to be called."""
    check_place(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = SavePlace(folder.parent, folder.name, folder)
    try:
        _check_names(folder)
        if not os.path.lexists(folder):
            for role in ("new", "old"):
                left = beside(folder, role)
                if (left / MANIFEST).exists():
                    os.rename(left, folder)
                    break
        for left in (beside(folder, "new"), beside(folder, "old")):
            discard(left)
    except BaseException:
        hidden.close()
        raise
    return hidden


def _saving(folder: Path) -> Iterator[Path]:
    """Yield the directories that writers to this place have left behind."""
    start = f".{folder.name}."
    with os.scandir(folder.parent) as entries:
        found = [e.name for e in entries if e.name.startswith(start)]
    for name in found:
        if _SAVING.fullmatch(name.removeprefix(start)):
            yield folder.parent / name


def is_ours(folder: Path) -> bool:
    """Return whether zerofx made a directory: it has the mark, or a snapshot's manifest."""
    return not folder.is_symlink() and any((folder / name).is_file() for name in (MARK, MANIFEST))


def _is_empty(folder: Path) -> bool:
    return not folder.is_symlink() and folder.is_dir() and not any(folder.iterdir())


def discard(folder: Path) -> None:
    """Remove a directory of zerofx that is no longer read; if that fails, only log it.

    Files that zerofx did not write are kept, under a name that is not hidden. The manifest is
    removed first, so that the rest is never taken for a snapshot, and the mark last.
    """
    if not os.path.lexists(folder):
        return
    try:
        if not is_ours(folder):
            if _is_empty(folder):  # a writer was killed before it wrote the mark or after removal
                os.rmdir(folder)
            return
        others = _remove_ours(folder)
        if others:
            kept = _kept(folder)
            os.rename(folder, kept)
            (kept / MARK).unlink(missing_ok=True)
            log.warning(
                "%s: zerofx did not write %s, which was in a snapshot that a save replaced. It is "
                "now in %s.", folder, ", ".join(others[:6]), kept,
            )  # fmt: skip
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / MARK)
        os.rmdir(folder)
    except OSError as error:
        log.warning("%s: could not be removed (%s).", folder, error)


def _remove_ours(folder: Path) -> list[str]:
    """Remove everything but the mark and files that zerofx did not write; return the latter."""
    is_new = _SAVING.search(folder.name) is not None  # everything in it is ours
    names = sorted(os.listdir(folder), key=lambda name: name != MANIFEST)
    others = []
    if (folder / MARK).is_file():
        names.remove(MARK)
    else:  # written by an older zerofx: the manifest is its mark
        names.append(names.pop(0))
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            if is_new:
                shutil.rmtree(path)
            else:
                others.append(name)
        elif is_new or _OURS.fullmatch(name):
            path.unlink(missing_ok=True)
        else:
            others.append(name)
    return others


def _kept(folder: Path) -> Path:
    name = folder.name.removeprefix(".").rpartition(".")[0]
    return folder.parent / f"{name}.kept-{secrets.token_hex(4)}"


def write_file(path: Path, data: bytes) -> None:
    """Write a small file, and sync it to disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Sync a file, or the entries of a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_written(written: Path, sums: Mapping[str, Any], folder: Path) -> None:
    """Check that all files named by the manifest exist, before another save is given up for them.

    A process that does not respect locks may have removed them.

    Raises:
        SnapshotError: names the file.
    """
    for name, (num_bytes, _) in sums.items():
        path = written / name
        if not path.is_file() or path.stat().st_size != num_bytes:
            raise SnapshotError(
                f"{path} was removed or changed while it was saved. Another job may be saving to "
                f"{folder}: give each job a directory of its own."
            )


def add(written: Path, folder: Path) -> None:
    """Move all files of a directory into a snapshot, in place of files of the same name."""
    for name in sorted(os.listdir(written)):
        if name != MARK:
            os.replace(written / name, folder / name)
    sync_file(folder)


def publish(written: Path, folder: Path) -> None:
    """Rename a complete directory to `folder`, replacing the previous snapshot."""
    sync_file(written)
    new, old = beside(folder, "new"), beside(folder, "old")
    os.rename(written, new)
    try:
        if os.path.lexists(folder):
            os.rename(folder, old)
        os.rename(new, folder)
    except OSError:
        if os.path.lexists(old) and not os.path.lexists(folder):
            os.rename(old, folder)
        discard(new)
        raise
    sync_file(folder.parent)
    discard(old)
