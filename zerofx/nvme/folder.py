"""The folder of the NVMe tier: checked for space, and cleared of the files of dead jobs.

Every store locks its own file (flock) for as long as its process lives, and file names are never
reused. Jobs that share a folder therefore cannot touch each other's files, and a zerofx file that
is not locked was left behind.
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

from zerofx.errors import NvmeError, as_sentence
from zerofx.nvme.aligned import PAGE
from zerofx.nvme.faults import path_error, sized
from zerofx.nvme.header import State, is_ours, read_layout

log = logging.getLogger("zerofx")
SUFFIX = ".nvme"


def prepare(path: str | os.PathLike[str], needed_bytes: int = 0, what: str = "the store") -> Path:
    """Return a folder that can hold `needed_bytes`, creating and cleaning it if necessary.

    Only the last component of `path` is created.

    Raises:
        NvmeError: it is missing, not a folder, not writable, or short of space (says both numbers).
    """
    folder = Path(os.path.abspath(path))
    if not folder.exists():
        if not folder.parent.is_dir():
            raise NvmeError(
                f"{folder}: neither it nor {folder.parent} exists. Create the folder, or mount "
                "its device."
            )
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise path_error("cannot make the folder", folder, error) from error
    if not folder.is_dir():
        raise NvmeError(f"{folder} is a file. The NVMe tier needs a folder. Give another path.")
    try_writing(folder)
    remove_left_behind(folder)
    need_space(folder, needed_bytes, what)
    return folder


def try_writing(folder: Path) -> None:
    """Test whether files can be created: permissions alone do not tell (root, read-only mounts)."""
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
    """Raise, with both numbers, if the file system has too little space left."""
    free = free_bytes(folder)
    if needed_bytes > free:
        raise NvmeError(
            f"{folder}: {what} needs {sized(needed_bytes)} but {sized(free)} are free. Free space "
            "there, choose another path, or offload less."
        )


def unique_name(label: str) -> str:
    """Return a file name that no other process or store uses, and that names its owner."""
    whose = f"{label[:64]}-{socket.gethostname().split('.')[0]}"
    safe = "".join(c if c.isalnum() or c in "._" else "-" for c in whose)
    return f"zerofx-{safe}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"


def lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file for as long as it is open; return False if another process holds it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def whoami() -> dict[str, Any]:
    """Return the description of the maker in a store's header."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot": _boot(),
        "time": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC",
    }


def _boot() -> str:
    """Return the ID of this boot of the kernel, which containers share despite their host names."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def remove_left_behind(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete the stores of dead processes, and return their paths.

    A file is deleted only if its content is that of a store, it is not locked, it was not kept on
    purpose (`close(delete=False)`), and it was made on this host: on a file system shared by
    several hosts, the locks of one host may not be visible on another.
    """
    paths = sorted(Path(folder).glob(f"zerofx-*{SUFFIX}"))
    return [path for path in paths if _remove_if_dead(path)]


def _remove_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # another process is cleaning too
        return False
    except OSError as error:  # it belongs to another user, or is a link
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
            log.warning("%s: left as it is: %s may still use it.", path, layout.maker)
            return False
        size = os.fstat(fd).st_size
        path.unlink(missing_ok=True)
    except OSError as error:  # no locks, or a damaged header
        log.warning("%s: left as it is: %s", path, as_sentence(error))
        return False
    finally:
        os.close(fd)
    log.warning("%s: removed, left behind by %s (%s).", path, layout.maker, sized(size))
    return True
