"""One open file: through the page cache and, where the file system allows it, past it."""

from __future__ import annotations

import errno
import os
import weakref
from typing import TYPE_CHECKING

from zerofx.errors import NvmeError
from zerofx.nvme.aligned import PAGE
from zerofx.nvme.faults import path_error
from zerofx.nvme.ranges import RangeIndex

if TYPE_CHECKING:
    from zerofx.nvme.request import Request

# What direct transfers may ask of memory, the least first. A refused transfer says that its file
# needs more: found out by trying, because no standard call tells.
ALIGNMENTS = (64, 512, PAGE)
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class Handle:
    """An open file, and the requests under way on it.

    pads: whoever owns a page's first byte here owns the whole page, so that ends may be filled up.
    """

    def __init__(self, path: str, flags: int, *, pads: bool = False, direct: bool = True) -> None:
        self.path, self.pads, self.pid = path, pads, os.getpid()
        self.under_way = RangeIndex()
        self.is_closing = False  # takes no more requests
        self.failed: list[Request] = []  # until their faults are seen
        flags |= os.O_CLOEXEC
        try:
            self.buffered = os.open(path, flags, 0o600)
        except OSError as error:
            raise path_error("cannot open", path, error) from error
        self.direct = self._open_direct(flags) if direct else None
        self.alignment = ALIGNMENTS[0]
        opened = [fd for fd in (self.buffered, self.direct) if fd is not None]
        self._close = weakref.finalize(self, _close_all, opened, self.pid)
        self._close.atexit = False  # threads may still use it then; the system closes it
        _OPEN.add(self)

    def _open_direct(self, flags: int) -> int | None:
        if not hasattr(os, "O_DIRECT"):
            return None
        try:
            return os.open(self.path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC) | os.O_DIRECT)
        except OSError as error:
            if error.errno in REFUSED:
                return None
            os.close(self.buffered)
            raise path_error("cannot open", self.path, error) from error

    def lower(self, alignment: int) -> None:
        """Ask less of direct transfers, after one from memory of this alignment was refused."""
        larger = [a for a in ALIGNMENTS if a > alignment]
        if larger:
            self.alignment = max(self.alignment, larger[0])
        else:
            self.direct = None

    @property
    def is_direct(self) -> bool:
        """Say whether transfers go past the page cache."""
        return self.direct is not None

    @property
    def is_closed(self) -> bool:
        """Say whether it has been closed, or was inherited by a fork."""
        return not self._close.alive

    def need_open(self) -> None:
        """Raise where it is closed, or about to be."""
        if self.is_closing or self.is_closed:
            raise NvmeError(f"{self.path}: the file is closed; open it again")

    def close(self) -> None:
        """Close the file; nothing may be under way."""
        self._close()


def _close_all(fds: list[int], pid: int) -> None:
    if os.getpid() == pid:
        for fd in fds:
            os.close(fd)


_OPEN: weakref.WeakSet[Handle] = weakref.WeakSet()


def _close_in_child() -> None:
    """Let go of locks: a lock lives as long as any process that inherited its file."""
    for handle in list(_OPEN):
        if (close := handle._close.detach()) is not None:
            for fd in close[2][0]:
                os.close(fd)


os.register_at_fork(after_in_child=_close_in_child)
