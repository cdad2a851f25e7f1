"""One open file: through the page cache and, if the file system allows it, past it."""

from __future__ import annotations

import errno
import os
import weakref
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from zerofx.errors import NvmeError
from zerofx.nvme.aligned import PAGE
from zerofx.nvme.faults import path_error

if TYPE_CHECKING:
    from zerofx.nvme.request import Request


# -- The requests in flight that touch a range of a file -------------------------------------------


Entry = tuple[int, int, int, "Request"]  # begin, end, sequence number, request


class RangeIndex:
    """Requests by the half-open byte ranges that they move.

    There is one sorted list per power of two of their lengths. Requests in a list that overlap
    [begin, end) begin less than that power before `begin`, so no list is searched as a whole.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[Entry]] = {}
        self._entries: dict[Request, Entry] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, begin: int, end: int, request: Request) -> None:
        """Add a request."""
        self._added += 1
        entry = (begin, end, self._added, request)
        self._entries[request] = entry
        insort(self._lists.setdefault((end - begin).bit_length(), []), entry)

    def remove(self, request: Request) -> None:
        """Remove a request."""
        entry = self._entries.pop(request)
        size = (entry[1] - entry[0]).bit_length()
        entries = self._lists[size]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._lists[size]

    def overlapping(self, begin: int, end: int) -> list[Request]:
        """Return the requests that touch [begin, end), oldest first."""
        found: list[Entry] = []
        for size, entries in self._lists.items():
            first = bisect_left(entries, (begin - (1 << size),))
            near = entries[first : bisect_left(entries, (end,))]
            found += [entry for entry in near if entry[1] > begin]
        return [entry[3] for entry in sorted(found, key=lambda entry: entry[2])]

    def all(self) -> list[Request]:
        """Return all requests, oldest first."""
        return list(self._entries)


# -- One open file: through the page cache and, if the file system allows it, past it --------------


# The alignments that direct transfers may require of memory, in ascending order. No standard call
# tells which one a file needs; a refused transfer means that it needs a larger one.
ALIGNMENTS = (64, 512, PAGE)
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class Handle:
    """An open file, and the requests in flight on it.

    pads: the owner of a page's first byte owns the whole page, so that ends may be padded.
    """

    def __init__(self, path: str, flags: int, *, pads: bool = False, direct: bool = True) -> None:
        self.path, self.pads, self.pid = path, pads, os.getpid()
        self.under_way = RangeIndex()
        self.is_closing = False  # accepts no more requests
        self.failed: list[Request] = []  # until their faults have been reported
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
        """Require more alignment for direct transfers, or give them up, after a refused one.

        alignment: that of the memory of the refused transfer.
        """
        larger = [a for a in ALIGNMENTS if a > alignment]
        if larger:
            self.alignment = max(self.alignment, larger[0])
        else:
            self.direct = None

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self.direct is not None

    @property
    def is_closed(self) -> bool:
        """Whether it has been closed, or was inherited by a fork."""
        return not self._close.alive

    def need_open(self) -> None:
        """Raise if the file is closed, or about to be."""
        if self.is_closing or self.is_closed:
            raise NvmeError(f"{self.path}: the file is closed. Open it again.")

    def close(self) -> None:
        """Close the file; no request may be in flight."""
        self._close()


def _close_all(fds: list[int], pid: int) -> None:
    if os.getpid() == pid:
        for fd in fds:
            os.close(fd)


_OPEN: weakref.WeakSet[Handle] = weakref.WeakSet()


def _close_in_child() -> None:
    """Release locks: a lock lasts as long as any process that inherited its file."""
    for handle in list(_OPEN):
        if (close := handle._close.detach()) is not None:
            for fd in close[2][0]:
                os.close(fd)


os.register_at_fork(after_in_child=_close_in_child)
