"""Files that other processes may replace at any time: read exactly what was verified.

Files stay open while they are read (`HeldFiles`), and all ranks read the same state of them, or all
start again (`read_settled`).

A name may refer to other files at any time, because a save or an export replaces them. An open
descriptor does not: it keeps its file even after the file has been deleted. (NFS may return ESTALE
for a file that another host has deleted; this is reported as `Replaced` too.)
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from zerofx.comm.together import together
from zerofx.comm.world import World
from zerofx.errors import SnapshotError, as_sentence

T = TypeVar("T")
log = logging.getLogger("zerofx")


class Replaced(Exception):
    """Other files have replaced those that were being read; the read has to start again."""


class HeldFiles:
    """Files that are opened once each and read through their descriptors until `close`.

    folder: the directory of the files. It is opened first and stays open, so that all files are
        those of this very directory, even if it is moved. Without one, names are paths.

    At most a quarter of the descriptors that the process may have are used. If more files are
    needed, the least recently used are closed; a file that is opened again must be the same one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._open: dict[str, BinaryIO] = {}  # in the order of last use
        self._seen: dict[str, tuple[int, ...]] = {}
        self._dir: int | None = None
        if folder is not None:
            self._dir = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.most_open = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 4)

    def path(self, name: str) -> Path:
        """Return the path of a file for messages."""
        return Path(name) if self.folder is None else self.folder / name

    def stream(self, name: str) -> BinaryIO:
        """Return a file, positioned at its beginning. It stays open: do not close it.

        Raises:
            OSError: it cannot be opened; the error has its full path.
            SnapshotError: it is not a regular file.
            Replaced: it was open before, and another file has its name now.
        """
        file = self._open.pop(name, None)
        if file is None:
            while len(self._open) >= self.most_open:
                self._open.pop(next(iter(self._open))).close()
            file = self._opened(name)
        self._open[name] = file
        file.seek(0)
        return file

    def num_bytes(self, name: str) -> int:
        """Return the size of a file."""
        return os.fstat(self.stream(name).fileno()).st_size

    def _opened(self, name: str) -> BinaryIO:
        try:  # without O_NONBLOCK, opening a pipe would wait for its writer
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._dir)
        except OSError as error:
            error.filename = str(self.path(name))
            raise
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise SnapshotError(f"{self.path(name)}: not a file.")
        if self._seen.setdefault(name, _facts(found)) != _facts(found):
            os.close(fd)
            raise Replaced(f"{self.path(name)} is another file than before")
        return open(fd, "rb")

    def is_folder(self, path: Path) -> bool:
        """Return whether the open directory still has this path."""
        assert self._dir is not None
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._dir))
        except OSError:
            return False

    def check_names(self) -> None:
        """Check that every name still refers to the file that was opened under it.

        Each file is opened again, because NFS then asks the server; a stat might not.

        Raises:
            Replaced: names the first file that was replaced.
        """
        for name in list(self._seen):
            try:
                self._opened(name).close()
            except OSError as error:
                raise Replaced(f"{self.path(name)}: {error.strerror}") from error
            except SnapshotError as error:  # for example, a directory took its place
                raise Replaced(str(error)) from error

    def check_unwritten(self) -> None:
        """Check that no open file was written to since it was opened.

        Raises:
            Replaced: names the file.
        """
        for name, file in self._open.items():
            try:
                found = _facts(os.fstat(file.fileno()))
            except OSError as error:
                raise Replaced(f"{self.path(name)}: {error.strerror}") from error
            if found != self._seen[name]:
                raise Replaced(f"{self.path(name)} was written to while it was read")

    def close(self) -> None:
        """Close all files and the directory."""
        while self._open:
            self._open.popitem()[1].close()
        if self._dir is not None:
            os.close(self._dir)
            self._dir = None


def _facts(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def is_stale(error: BaseException) -> bool:
    """Return whether an error says that the file server no longer has the file."""
    return isinstance(error, OSError) and error.errno == errno.ESTALE


# -- a read on all ranks of one state of the files, restarted if they change -----------------------


TRIES = 24
_NAP_S = (1e-3, 0.5)  # first and longest sleep between tries; all sleeps together take 8 s


class Read(Protocol):
    """One rank's part of a read. Every step may raise `Replaced`."""

    def open(self) -> Any:
        """Find the files and open them; return a value that must be equal on all ranks."""

    def check(self) -> None:
        """Check everything; change nothing."""

    def fill(self) -> None:
        """Read everything into its place; may be repeated."""

    def close(self) -> None:
        """Close the files."""


def read_settled(world: World, what: str, job: Read) -> None:
    """Run the steps of a read on all ranks; a collective call.

    The steps start again on all ranks, at most `TRIES` times, if files were replaced meanwhile or
    if ranks have opened different files.

    Raises:
        SnapshotError: a step failed on some rank, or the files kept changing.
    """
    part = why = ""
    for number in range(TRIES):
        if number:
            time.sleep(min(_NAP_S[0] * 2 ** (number - 1), _NAP_S[1]))
        try:
            why = _open_and_check(world, what, job)
            if not why:
                why = _step(world, what, job.fill)
                if not why:
                    return
                part = " The model is loaded in part. Load again before going on."
        except SnapshotError as error:
            if part and "loaded in part" not in str(error):  # an earlier try has filled something
                raise SnapshotError(f"{as_sentence(error)}{part}") from error
            raise
        finally:
            job.close()
        log.info("%s: starting again: %s", what, why)
    raise SnapshotError(
        f"{what}: the files were replaced during each of {TRIES} attempts to read them. The last "
        f"time {why}. Read when no save or export to this place is running, and give all ranks one "
        f"file system.{part}"
    )


def _open_and_check(world: World, what: str, job: Read) -> str:
    """Return why these steps must start again, or "" if they succeeded."""
    found = together(world, what, lambda: _unless_replaced(job.open), SnapshotError)
    for rank, (seen, why) in enumerate(found):
        if why:
            return why
        if seen != found[0][0]:
            return f"rank {rank} found other files than rank 0"
    return _step(world, what, job.check)


def _step(world: World, what: str, step: Callable[[], None]) -> str:
    found = together(world, what, lambda: _unless_replaced(step), SnapshotError)
    return next((why for _, why in found if why), "")


def _unless_replaced(step: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return step(), ""
    except Replaced as replaced:
        return None, str(replaced)
