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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zerofx.errors import NvmeError
from zerofx.nvme.aligned import PAGE
from zerofx.nvme.faults import path_error, sized
from zerofx.nvme.header import State, is_ours, read_layout

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
    whose = f"{label[:64]}-{socket.gethostname().split('.')[0]}"
    safe = "".join(c if c.isalnum() or c in "._" else "-" for c in whose)
    return f"zerofx-{safe}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"


def lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file for as long as it is open; False if another process has it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def whoami() -> dict[str, Any]:
    """Return what a store's header says of its maker."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot": _boot(),
        "time": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC",
    }


def _boot() -> str:
    """Return what names this run of the kernel; containers share it, whatever their names."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def remove_left_behind(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete the stores whose process is dead, and return their paths.

    Only files that are stores by their content, that are not locked, that were not kept on
    purpose (`close(delete=False)`), and that were made on this host: on file systems of several
    hosts locks need not reach from one to another.
    """
    paths = sorted(Path(folder).glob(f"zerofx-*{SUFFIX}"))
    return [path for path in paths if _remove_if_dead(path)]


def _remove_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # another process cleans too
        return False
    except OSError as error:  # another user's, a link
        log.info("%s: left as it is: %s", path, error)
        return False
    try:
        if not is_ours(fd) or not lock(fd):
            return False
        layout = read_layout(fd, str(path))
        state = State.decode(os.pread(fd, PAGE, layout.state_at))
        if state is not None and state.is_kept:
            return False
        if _boot() != layout.made["boot"] and socket.gethostname() != layout.made["host"]:
            log.warning("%s: left as it is: %s may still use it", path, layout.maker)
            return False
        size = os.fstat(fd).st_size
        path.unlink(missing_ok=True)
    except OSError as error:  # no locks, or no header by which to tell
        log.warning("%s: left as it is: %s", path, error)
        return False
    finally:
        os.close(fd)
    log.warning("%s: removed, left behind by %s (%s)", path, layout.maker, sized(size))
    return True
