"""A request: a transfer between memory and a file, in pieces, and the requests that wait for it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from zerofx.nvme.aligned import Bytes, down, up
from zerofx.nvme.faults import Fault, Stretch

if TYPE_CHECKING:
    from zerofx.nvme.handle import Handle


class Check(Protocol):
    """A check of the bytes that a request moves; raises Damaged."""

    def before_write(self, offset: int, block: Bytes) -> None:
        """Note that bytes of the file are about to change."""

    def after_write(self, offset: int, block: Bytes) -> None:
        """Note their new content."""

    def after_read(self, offset: int, block: Bytes) -> None:
        """Compare the bytes with what was noted."""


class Piece:
    """A part of a request that moves as one: `nbytes` at `offset` of the file."""

    __slots__ = ("address", "offset", "request", "view")

    def __init__(self, request: Request, offset: int, view: Bytes, address: int) -> None:
        self.request, self.offset, self.view, self.address = request, offset, view, address

    @property
    def end(self) -> int:
        """The end in the file, rounded up to a page if the file pads ends."""
        end = self.offset + self.view.size
        return up(end) if self.request.handle.pads else end

    def begin(self) -> None:
        """Tell the request's check that the transfer begins."""
        if self.request.check is not None and self.request.is_write:
            self.request.check.before_write(self.offset, self.view)

    def arrive(self) -> None:
        """Tell the request's check that the transfer has ended."""
        check = self.request.check
        if check is not None:
            (check.after_write if self.request.is_write else check.after_read)(
                self.offset, self.view
            )


class Moment:
    """When a request began and ended, by time.perf_counter_ns; 0 means not yet."""

    __slots__ = ("began_ns", "ended_ns")

    def __init__(self) -> None:
        self.began_ns = self.ended_ns = 0

    def begin(self) -> None:
        """Note that the first piece begins to move."""
        self.began_ns = self.began_ns or time.perf_counter_ns()


class Request:
    """A transfer in flight. The tensor must not be used or changed before `wait` returns."""

    def __init__(
        self,
        handle: Handle,
        is_write: bool,
        tensor: Tensor,
        where: Stretch,
        check: Check | None = None,
    ) -> None:
        self.handle, self.is_write, self.where, self.check = handle, is_write, where, check
        self.fault: Fault | None = None
        self.followers: list[Request] = []  # requests that wait for this one
        self.num_before = 0  # requests that this one waits for
        self.num_left = 0  # pieces that have not ended
        self.pieces: list[Piece] = []
        self._tensor = tensor
        self.is_done = False  # ended, with or without a fault
        self.moment = Moment()
        self._under_way = threading.Lock()  # an Event would cost ten times as much
        self._under_way.acquire()

    def split(self, view: Bytes, address: int, piece_bytes: int) -> None:
        """Split the transfer into pieces, each of which but the first begins at a page."""
        begin, nbytes = self.where.offset, view.size
        start, stop = 0, down(begin) + piece_bytes - begin
        while stop < nbytes:
            self.pieces.append(Piece(self, begin + start, view[start:stop], address + start))
            start, stop = stop, stop + piece_bytes
        self.pieces.append(Piece(self, begin + start, view[start:], address + start))
        self.num_left = len(self.pieces)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended, with or without a fault; False after `timeout_s`."""
        if not self._under_way.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        self._under_way.release()  # for other waiters
        return True

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Return the tensor once the whole transfer has ended.

        Raises:
            NvmeError: the transfer failed; names file, offset, bytes and label.
            TimeoutError: it was still in flight after `timeout_s`.
        """
        if not self.join(timeout_s):
            doing = "write" if self.is_write else "read"
            raise TimeoutError(f"{doing} of {self.where}: still in flight after {timeout_s} s.")
        if self.fault is not None:
            with suppress(ValueError):  # it was raised before
                self.handle.failed.remove(self)
            raise self.fault.error()
        return self._tensor

    def end(self) -> None:
        """Wake all waiters; called once, by the engine."""
        self.pieces = []
        self.moment.ended_ns = time.perf_counter_ns()
        self.is_done = True
        self._under_way.release()
