"""A lock with an owner: one process at a time saves or exports to a place.

    .run.lock   {"zerofx": "lock", "host": "node7", "boot": ..., "pid": 4711, "started": ...,
                 "time": "2026-11-23 12:00:00 UTC"}

The owner holds flock on the file, which the kernel releases when the process ends for any reason.
On its own host, a dead owner's lock is therefore taken over immediately. The text names the owner
for the others, and decides if flock does not help: a lock of another host is never taken over, and
without flock, zerofx looks for the process with that number and start time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

from zerofx.errors import SnapshotError
from zerofx.nvme.folder import whoami

log = logging.getLogger("zerofx")

_KIND = "lock"
_MOST_BYTES = 4096
_TRIES = 100  # to open a file that others may remove at the same time
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class Lock:
    """The lock file at `path`, held from construction to `release`.

    Raises:
        SnapshotError: another process holds it; says which, since when, and how to continue.
        OSError: the directory cannot be written to.
    """

    def __init__(self, path: Path, place: Path) -> None:
        self.path, self._place = path, place
        for _ in range(_TRIES):
            fd = _opened(path)
            try:
                has_flock = _flocked(fd)
                if not _is_at(fd, path):  # its owner has released it meanwhile
                    os.close(fd)
                    continue
                self._check_owner(fd, has_flock)
                _write(fd, {"zerofx": _KIND, **whoami(), "started": _started(os.getpid())})
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd
            return
        raise SnapshotError(f"{path} keeps changing. Save when no other job saves to {place}")

    def _check_owner(self, fd: int, has_flock: bool | None) -> None:
        """Check that the lock is free, or that its owner is dead.

        has_flock: whether this process now holds flock; None if the file system does not have it.
        """
        owner = _read(fd, self.path)
        if owner is None and has_flock is not False:
            return
        said = _describe(owner, time.time() - os.fstat(fd).st_mtime)
        is_here = owner is not None and (
            owner["boot"] == whoami()["boot"] or owner["host"] == socket.gethostname()
        )
        if has_flock is False or (is_here and has_flock is None and _is_alive(owner)):
            raise SnapshotError(
                f"{self._place} is being written by {said}. Give each job a directory of its own, "
                "or wait until that process has finished"
            )
        if not is_here:
            raise SnapshotError(
                f"{self._place} is locked by {said}. Another host cannot tell whether that process "
                f"still runs. Wait for it; if it has ended, remove {self.path}"
            )
        log.warning("%s: taken over from %s, which has ended", self.path, said)

    def check(self) -> None:
        """Check that the lock file was not removed or replaced while this process held it.

        Raises:
            SnapshotError: names it.
        """
        if not _is_at(self._fd, self.path):
            raise SnapshotError(
                f"{self.path} was removed while this process saved to {self._place}. Another job "
                "may save there: give each job a directory of its own"
            )

    def release(self) -> None:
        """Release the lock and remove its file; a file that remains is taken over later."""
        try:
            if _is_at(self._fd, self.path):
                os.unlink(self.path)
        except OSError as error:
            log.warning("%s: could not be removed (%s)", self.path, error)
        finally:
            os.close(self._fd)


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise _foreign(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _foreign(path)
    return fd


def _foreign(path: Path) -> SnapshotError:
    return SnapshotError(
        f"{path} is in the way: zerofx needs this name for a lock file, and did not make this "
        "one. Move it, or save to another name"
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


def _read(fd: int, path: Path) -> dict[str, Any] | None:
    """Return the owner that the file names; None if it is empty, as after a crash."""
    text = os.pread(fd, _MOST_BYTES, 0)
    if not text.strip(b"\0 \n"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _foreign(path) from None
    if not isinstance(found, dict) or found.get("zerofx") != _KIND:
        raise _foreign(path)
    texts = all(isinstance(found.get(key), str) for key in ("host", "boot", "time"))
    if not (texts and type(found.get("pid")) is int):
        raise _foreign(path)
    return found


def _write(fd: int, owner: dict[str, Any]) -> None:
    text = json.dumps(owner).encode()
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))


def _describe(owner: dict[str, Any] | None, age_s: float) -> str:
    if owner is None:
        return "another process"
    return (
        f"process {owner['pid']} of host {owner['host']}, since {owner['time']} "
        f"({_age(max(age_s, 0.0))} ago)"
    )


def _age(seconds: float) -> str:
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
