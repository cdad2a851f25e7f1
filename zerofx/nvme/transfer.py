"""Moving neighbouring pieces between memory and a file, in as few system calls as possible."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from zerofx.nvme.aligned import PAGE, Bytes, aligned_bytes, down, up
from zerofx.nvme.faults import EndOfFile
from zerofx.nvme.handle import REFUSED, Handle
from zerofx.nvme.request import Piece


@dataclass
class Counts:
    """The counters of a thread."""

    num_calls: int = 0  # to the operating system
    num_pieces: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    bounced_bytes: int = 0  # also copied in memory, for lack of alignment
    buffered_bytes: int = 0  # through the page cache

    def __add__(self, other: Counts) -> Counts:
        theirs = vars(other)
        return Counts(**{name: mine + theirs[name] for name, mine in vars(self).items()})


class Mover:
    """The means of a thread to move pieces: a buffer, allocated once, and its counters."""

    def __init__(self, piece_bytes: int) -> None:
        self.counts = Counts()
        self.bounce = aligned_bytes(up(piece_bytes) + 2 * PAGE).numpy()

    def move(self, group: list[Piece]) -> None:
        """Move pieces that are consecutive in one file; raises the errors of the system."""
        handle, is_write = group[0].request.handle, group[0].request.is_write
        nbytes = sum(piece.view.size for piece in group)
        while handle.direct is not None:
            alignment = _alignment_of(group, handle.alignment)
            try:
                self._move_directly(handle, handle.direct, group, is_write)
                break
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                handle.lower(alignment)
        else:
            views = [piece.view for piece in group]
            self.counts.buffered_bytes += nbytes
            self._move_all(handle, None, views, group[0].offset, nbytes, is_write)
        self.counts.num_pieces += len(group)
        if is_write:
            self.counts.written_bytes += nbytes
        else:
            self.counts.read_bytes += nbytes

    # -- past the page cache ----------------------------------------------------------------
    def _move_directly(self, handle: Handle, fd: int, group: list[Piece], is_write: bool) -> None:
        begin, end = group[0].offset, group[-1].end
        inner = all(piece.offset % PAGE == 0 and piece.end % PAGE == 0 for piece in group)
        if inner:
            self._move_pages(handle, fd, group, is_write)
        elif is_write:
            self._write_ragged(handle, fd, group, begin, end)
        else:
            self._read_ragged(handle, fd, group, begin, end)

    def _move_pages(self, handle: Handle, fd: int, group: list[Piece], is_write: bool) -> None:
        """Move whole pages: from their own memory if it is aligned, else through the bounce."""
        segments: list[Bytes] = []
        bounced: list[tuple[Bytes, Bytes]] = []  # bounce, memory
        used = 0
        for piece in group:
            own = down(piece.view.size) if piece.address % handle.alignment == 0 else 0
            if own:
                segments.append(piece.view[:own])
            if own < piece.view.size:
                rest = piece.view[own:]
                room = self.bounce[used : used + up(rest.size)]
                used += room.size
                segments.append(room)
                bounced.append((room, rest))
        if is_write:
            for room, rest in bounced:
                room[: rest.size] = rest
                room[rest.size :] = 0
        begin, end = group[0].offset, group[-1].end
        self._move_all(handle, fd, segments, begin, end - begin, is_write)
        for room, rest in bounced:
            self.counts.bounced_bytes += rest.size
            if not is_write:
                rest[:] = room[: rest.size]

    def _read_ragged(
        self, handle: Handle, fd: int, group: list[Piece], begin: int, end: int
    ) -> None:
        """Read the surrounding pages, and copy the requested bytes out."""
        outer = self.bounce[: up(end) - down(begin)]
        self._move_all(handle, fd, [outer], down(begin), end - down(begin), is_write=False)
        for piece in group:
            start = piece.offset - down(begin)
            piece.view[:] = outer[start : start + piece.view.size]
            self.counts.bounced_bytes += piece.view.size

    def _write_ragged(
        self, handle: Handle, fd: int, group: list[Piece], begin: int, end: int
    ) -> None:
        """Write whole pages directly, and partial pages at the ends through the page cache."""
        base = down(begin)
        for piece in group:
            start = piece.offset - base
            self.bounce[start : start + piece.view.size] = piece.view
            self.counts.bounced_bytes += piece.view.size
        first, last = min(up(begin), end), max(down(end), begin)
        if first >= last:  # there is no whole page
            first = last = end
        for start, stop, to in ((begin, first, None), (first, last, fd), (last, end, None)):
            if start < stop:
                part = self.bounce[start - base : stop - base]
                self._move_all(handle, to, [part], start, stop - start, is_write=True)
                self.counts.buffered_bytes += 0 if to is not None else stop - start

    # -- calls ------------------------------------------------------------------------------
    def _move_all(
        self,
        handle: Handle,
        direct: int | None,
        segments: list[Any],  # of Bytes, which the types of Python 3.12 and later accept as buffers
        offset: int,
        needed: int,
        is_write: bool,
    ) -> None:
        """Repeat the call until `needed` bytes have moved: the system may move fewer at a time."""
        done = 0
        fd = handle.buffered if direct is None else direct
        call = os.pwritev if is_write else os.preadv
        while done < needed:
            moved = call(fd, segments, offset + done)
            self.counts.num_calls += 1
            done += moved
            if moved == 0:
                raise EndOfFile(offset + done)
            segments = _after(segments, moved)
            if moved % PAGE:  # the rest no longer begins at a page
                fd = handle.buffered


def _after(segments: list[Any], moved: int) -> list[Any]:
    """Return the segments that remain after their first `moved` bytes have moved."""
    left = []
    for segment in segments:
        if moved < segment.size:
            left.append(segment[moved:])
        moved = max(0, moved - segment.size)
    return left


def _alignment_of(group: list[Piece], asked: int) -> int:
    """Return the smallest alignment of the memory that a direct transfer of the group uses."""
    used = [piece.address for piece in group if piece.address % asked == 0]
    return min((_largest_power(address) for address in used), default=PAGE)


def _largest_power(address: int) -> int:
    return min(address & -address, PAGE) if address else PAGE
