"""The folder of the NVMe tier: can it hold what is planned, and what did dead jobs leave there.

Every store locks its own file (flock) for as long as its process lives, and file names are never
used twice: jobs that share a folder cannot touch one another's files, and a file of ours that is
not locked was left behind.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
from pathlib import Path

from zerofx.errors import NvmeError
from zerofx.runtime.nvme.aligned import PAGE
from zerofx.runtime.nvme.faults import path_error, sized
from zerofx.runtime.nvme.header import State, is_ours, read_layout

log = logging.getLogger("zerofx")
SUFFIX = ".nvme"


def prepare(path: str | os.PathLike[str], needed_bytes: int = 0, what: str = "the store") -> Path:
    """Return a folder that can hold `needed_bytes`: made if only it is missing, and cleaned.

    Raises:
        NvmeError: missing, no folder, not writable, or with too little space (both numbers said).
    """
    folder = Path(os.path.abspath(path))
    if not folder.exists():
        if not folder.parent.is_dir():
            raise NvmeError(
                f"{folder}: neither it nor {folder.parent} exists; make the folder, or mount the "
                "device that it should be on"
            )
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise path_error("cannot make the folder", folder, error) from error
    if not folder.is_dir():
        raise NvmeError(f"{folder} is a file; the NVMe tier needs a folder: give another path")
    try_writing(folder)
    remove_left_behind(folder)
    need_space(folder, needed_bytes, what)
    return folder


def try_writing(folder: Path) -> None:
    """Find out by doing it: rights alone do not tell (root, read-only mounts)."""
    path = folder / unique_name("try")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        path.unlink()
    except OSError as error:
        raise path_error("cannot write to the folder", folder, error) from error


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the bytes that this user may still write on the folder's file system."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def need_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise, with both numbers, where the file system has too little space left."""
    free = free_bytes(folder)
    if needed_bytes > free:
        raise NvmeError(
            f"{folder}: {what} needs {sized(needed_bytes)} but {sized(free)} are free; free space "
            "there, choose another path, or offload less"
        )


def unique_name(label: str) -> str:
    """Return a file name that no other process or store uses, and that says whose it is."""
    safe = "".join(c if c.isalnum() or c in "._" else "-" for c in label[:64])
    host = socket.gethostname().split(".")[0]
    return f"zerofx-{safe}-{host}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"


def lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file for as long as it is open; False if another process has it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_left_behind(folder: Path) -> list[Path]:
    """Delete the stores whose process is dead, and return their paths.

    Only files that begin as a store does, that nobody has locked, and that were not kept on
    purpose (`close(delete=False)`).
    """
    removed = [path for path in sorted(folder.glob(f"zerofx-*{SUFFIX}")) if _remove_if_dead(path)]
    return removed


def _remove_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # another process cleans too
        return False
    except PermissionError:  # another user's
        return False
    try:
        try:
            if not is_ours(fd) or not lock(fd):
                return False
        except OSError as error:  # no locks here, or unreadable: then nothing tells that it is dead
            log.warning("%s: left as it is: %s", path, error)
            return False
        size = os.fstat(fd).st_size
        try:
            layout = read_layout(fd, str(path))
        except NvmeError:  # cut short by the death of its process, or of another version
            whose = "its process died while making it"
        else:
            state = State.decode(os.pread(fd, PAGE, layout.state_at))
            if state is not None and state.is_kept:
                return False
            whose = f"made by {layout.maker}"
        path.unlink(missing_ok=True)
    finally:
        os.close(fd)
    log.warning("%s: removed, left behind by a dead process (%s; %s)", path, whose, sized(size))
    return True
