"""Files that stay open while they are read: what was verified is what is read.

A name may lead to other files at any time, because a save or an export replaces them. An open
descriptor does not: it keeps its file even after the file has been deleted. (NFS may answer ESTALE
for a file that another host has deleted; that too is reported as `Replaced`.)
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path
from typing import BinaryIO

from zerofx.errors import SnapshotError


class Replaced(Exception):
    """Other files took the place of those that were being read; the read has to start again."""


class HeldFiles:
    """Files opened once each and read through their descriptors until `close`.

    folder: a directory that names are looked up in. It is opened first and stays open, so that all
        files are those of this very directory, wherever it is moved. Without one, names are paths.

    At most a quarter of the descriptors that the process may have are in use. Of more files, those
    not used for longest are closed; a file that is opened again must be the same one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._open: dict[str, BinaryIO] = {}  # the last used one is last
        self._seen: dict[str, tuple[int, ...]] = {}
        self._dir: int | None = None
        if folder is not None:
            self._dir = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.most_open = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 4)

    def path(self, name: str) -> Path:
        """Return what to call a file in messages."""
        return Path(name) if self.folder is None else self.folder / name

    def stream(self, name: str) -> BinaryIO:
        """Return a file at its beginning. It stays open: do not close it.

        Raises:
            OSError: it cannot be opened; has its full path.
            SnapshotError: it is no regular file.
            Replaced: it was open before, and another one is there now.
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
            raise SnapshotError(f"{self.path(name)}: not a file")
        if self._seen.setdefault(name, _facts(found)) != _facts(found):
            os.close(fd)
            raise Replaced(f"{self.path(name)} is another file than before")
        return open(fd, "rb")

    def is_folder(self, path: Path) -> bool:
        """Return whether the directory that is held open still has this name."""
        assert self._dir is not None
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._dir))
        except OSError:
            return False

    def check_names(self) -> None:
        """Raise unless every name still leads to the file that was opened under it.

        Each is opened again rather than asked for: NFS then asks the server.

        Raises:
            Replaced: names the first that does not.
        """
        for name in list(self._seen):
            try:
                self._opened(name).close()
            except OSError as error:
                raise Replaced(f"{self.path(name)}: {error.strerror}") from error
            except SnapshotError as error:  # a directory took its place, say
                raise Replaced(str(error)) from error

    def check_unwritten(self) -> None:
        """Raise if a file that is open was written to since it was opened.

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
        """Let go of everything."""
        while self._open:
            self._open.popitem()[1].close()
        if self._dir is not None:
            os.close(self._dir)
            self._dir = None


def _facts(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def is_stale(error: BaseException) -> bool:
    """Return whether an error says that a file server no longer has the file."""
    return isinstance(error, OSError) and error.errno == errno.ESTALE
