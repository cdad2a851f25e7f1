"""The state that an I/O engine shares with its threads: queued pieces, and order of requests."""

from __future__ import annotations

import threading
from collections import deque

from zerofx.nvme.faults import Fault, fault_of
from zerofx.nvme.request import Piece, Request
from zerofx.nvme.transfer import Mover

MAX_MERGED = 256  # pieces per call; the system accepts 1024


class Work:
    """The state that an engine and its threads share; threads do not keep the engine alive."""

    def __init__(self, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self.lock = threading.RLock()  # a finalizer may run inside any call of this class
        self.has_work = threading.Condition(self.lock)
        self.queues: tuple[deque[Piece], deque[Piece]] = (deque(), deque())  # reads, writes
        self._next_is_write = False
        self._num_idle = 0
        self.is_closing = False
        self.num_under_way = 0
        self.movers: list[Mover] = []

    # -- called by threads ------------------------------------------------------------------
    def serve(self, mover: Mover) -> None:
        """Move pieces until the engine closes and no work is left."""
        moved: list[tuple[Piece, Fault | None]] = []
        while True:
            with self.lock:
                while moved:
                    piece, fault = moved.pop()
                    self._ended(piece.request, fault)
                    del piece, fault  # do not keep tensors alive while waiting
                while not any(self.queues):
                    if self.is_closing and not self.num_under_way:
                        return
                    self._num_idle += 1
                    self.has_work.wait()
                    self._num_idle -= 1
                group = self._take()
            for piece in group:
                piece.request.moment.begin()
                del piece  # do not keep tensors alive while waiting
            moved = list(zip(group, _moved(mover, group), strict=True))
            del group

    def _take(self) -> list[Piece]:
        """Take the next piece, and small pieces that continue it in the file.

        Reads and writes alternate, so that an urgent read does not wait for all writes before it,
        nor a write for all reads.
        """
        queue = self.queues[self._next_is_write] or self.queues[not self._next_is_write]
        self._next_is_write = queue is self.queues[False]
        group = [queue.popleft()]
        first = group[0].request
        begin, end = group[0].offset, group[0].end
        while queue and len(group) < MAX_MERGED:
            piece = queue[0]
            is_next = piece.request.handle is first.handle and piece.offset == end
            if not is_next or piece.end - begin > self.piece_bytes:
                break
            group.append(queue.popleft())
            end = piece.end
        return group

    def _ended(self, request: Request, fault: Fault | None) -> None:
        request.num_left -= 1
        request.fault = request.fault or fault
        if request.num_left > 0:
            return
        handle = request.handle
        handle.under_way.remove(request)
        self.num_under_way -= 1
        if request.fault is not None:
            handle.failed.append(request)
        for follower in request.followers:
            self._release(follower, request)
        request.followers = []
        request.end()
        if self.is_closing and not self.num_under_way:
            self.has_work.notify_all()

    def _release(self, follower: Request, ended: Request) -> None:
        """Release a request that waited for another one."""
        follower.num_before -= 1
        if ended.is_write and ended.fault is not None and not follower.is_write:
            fault = ended.fault
            text = f"read of {follower.where}: the write before it failed: {fault.text}"
            follower.fault = follower.fault or Fault(text, fault.cause)
        if not follower.num_before:
            self.enqueue(follower)

    # -- called by the engine ---------------------------------------------------------------
    def submit(self, request: Request, begin: int, end: int) -> None:
        """Queue a request after those that touch the same bytes; two reads need no order."""
        under_way = request.handle.under_way
        for other in under_way.overlapping(begin, end):
            if other.is_write or request.is_write:
                other.followers.append(request)
                request.num_before += 1
        under_way.add(begin, end, request)
        self.num_under_way += 1
        if not request.num_before:
            self.enqueue(request)

    def close(self) -> None:
        """Tell the threads to end once no request is in flight."""
        with self.lock:
            self.is_closing = True
            self.has_work.notify_all()

    def enqueue(self, request: Request) -> None:
        """Hand the pieces of a request to the threads."""
        self.queues[request.is_write].extend(request.pieces)
        if self._num_idle:
            self.has_work.notify(min(len(request.pieces), self._num_idle))


def _moved(mover: Mover, group: list[Piece]) -> list[Fault | None]:
    """Move pieces and return the fault, if any, of each."""
    if any(piece.request.fault for piece in group):  # another piece of the same request failed
        return [piece.request.fault or _moved(mover, [piece])[0] for piece in group]
    try:
        for piece in group:
            piece.begin()
        mover.move(group)
    except BaseException as error:  # noqa: BLE001  reported to the waiter; the thread goes on
        if len(group) > 1:  # move them one by one to find the piece at fault
            return [_moved(mover, [piece])[0] for piece in group]
        return [_fault(group[0], error)]
    return [_arrived(piece) for piece in group]


def _arrived(piece: Piece) -> Fault | None:
    try:
        piece.arrive()
    except BaseException as error:  # noqa: BLE001  as above
        return _fault(piece, error)
    return None


def _fault(piece: Piece, error: BaseException) -> Fault:
    request = piece.request
    where = request.where._replace(offset=piece.offset, nbytes=piece.view.size)
    return fault_of(request.is_write, where, error)
