"""The I/O engine: non-blocking requests, moved by threads in the order of submission.

Requests that touch the same bytes of a file keep their order; all others may overtake each other.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref

from torch import Tensor

from zerofx.errors import NvmeError
from zerofx.nvme.aligned import bytes_of, up
from zerofx.nvme.checksum import BLOCK_BYTES
from zerofx.nvme.faults import Stretch, path_error
from zerofx.nvme.handle import Handle
from zerofx.nvme.request import Check, Request
from zerofx.nvme.transfer import Counts, Mover
from zerofx.nvme.work import Work

PIECE_BYTES = 4 << 20
NUM_THREADS = 4


class IOEngine:
    """Threads that move tensors to and from files.

    num_threads: the number of groups of pieces that move at the same time.
    piece_bytes: larger requests are split into pieces of this size, and smaller neighbouring ones
        are merged up to it; a multiple of 256 KiB. Each thread keeps one buffer of this size.
    """

    def __init__(self, num_threads: int = NUM_THREADS, piece_bytes: int = PIECE_BYTES) -> None:
        if num_threads < 1:
            raise NvmeError(f"num_threads = {num_threads} is too small. Give at least 1.")
        if piece_bytes < BLOCK_BYTES or piece_bytes % BLOCK_BYTES:
            raise NvmeError(
                f"piece_bytes = {piece_bytes} is not a multiple of {BLOCK_BYTES} (256 KiB), the "
                "size of a block with a checksum. Round it up."
            )
        self.num_threads, self.piece_bytes, self._pid = num_threads, piece_bytes, os.getpid()
        self._work = Work(piece_bytes)
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, self._work.close).atexit = False  # close() joins them at exit
        _ENGINES.add(self)

    def submit_read(
        self, handle: Handle, tensor: Tensor, offset: int, label: str, check: Check | None = None
    ) -> Request:
        """Begin to fill `tensor` from the file's bytes at `offset`; `label` is used in errors."""
        return self._submit(handle, False, tensor, offset, label, check)

    def submit_write(
        self, handle: Handle, tensor: Tensor, offset: int, label: str, check: Check | None = None
    ) -> Request:
        """Begin to write `tensor` to the file at `offset`; `label` is used in errors."""
        return self._submit(handle, True, tensor, offset, label, check)

    def _submit(
        self,
        handle: Handle,
        is_write: bool,
        tensor: Tensor,
        offset: int,
        label: str,
        check: Check | None,
    ) -> Request:
        self._need_here(handle)
        view, address = bytes_of(tensor, handle.path, label)
        if offset < 0:
            raise NvmeError(f"{handle.path}: offset {offset} is negative. Give 0 or more.")
        where = Stretch(handle.path, offset, view.size, label)
        request = Request(handle, is_write, tensor, where, check)
        request.split(view, address, self.piece_bytes)
        end = offset + view.size
        with self._work.lock:
            handle.need_open()
            if self._work.is_closing:
                raise NvmeError(f"{handle.path}: the engine is closed. Create another.")
            self._start()
            self._work.submit(request, offset, up(end) if handle.pads else end)
        return request

    def _need_here(self, handle: Handle) -> None:
        here = os.getpid()
        if here != self._pid or here != handle.pid:
            raise NvmeError(
                f"{handle.path}: opened in process {handle.pid}, with an engine of {self._pid}, "
                f"but used in {here}: threads and locks do not survive a fork. Open it again there."
            )

    def _start(self) -> None:
        while len(self._threads) < self.num_threads:
            name = f"zerofx-nvme-{len(self._threads)}"
            mover = Mover(self.piece_bytes)
            thread = threading.Thread(
                target=self._work.serve, args=(mover,), name=name, daemon=True
            )
            thread.start()
            self._work.movers.append(mover)
            self._threads.append(thread)

    # -- waiting ----------------------------------------------------------------------------
    def drain(self, handle: Handle) -> None:
        """Wait until no request is in flight on a file, whether or not it succeeds."""
        self._need_here(handle)
        with self._work.lock:
            under_way = handle.under_way.all()
        for request in under_way:
            request.join()

    def flush(self, handle: Handle) -> None:
        """Wait for all requests of a file, and until the device has stored their bytes.

        Raises:
            NvmeError: the flush failed, or a request failed for which nothing has waited yet.
        """
        self.drain(handle)
        self.raise_unseen(handle)
        handle.need_open()
        try:
            os.fdatasync(handle.buffered)
        except OSError as error:
            raise path_error("cannot flush", handle.path, error) from error

    def raise_unseen(self, handle: Handle) -> None:
        """Raise the first unreported fault of a file, and forget the others."""
        with self._work.lock:
            unseen = [request.fault for request in handle.failed]
            handle.failed.clear()
        if unseen:
            assert unseen[0] is not None
            error = unseen[0].error()
            if len(unseen) > 1:
                error.args = (f"{error} (and {len(unseen) - 1} more requests failed)",)
            raise error

    def wait(self, handle: Handle) -> None:
        """Wait until no request is in flight on a file.

        Raises:
            NvmeError: a request failed for which nothing has waited yet.
        """
        self.drain(handle)
        self.raise_unseen(handle)

    def finish(self, handle: Handle) -> None:
        """Refuse new requests for a file, and wait for those in flight."""
        with self._work.lock:
            handle.is_closing = True
        self.wait(handle)

    @property
    def counts(self) -> Counts:
        """The counts of all threads so far."""
        with self._work.lock:
            return sum((mover.counts for mover in self._work.movers), Counts())

    def close(self) -> None:
        """Finish everything that was submitted, and end the threads. May be called repeatedly."""
        if os.getpid() != self._pid:
            return
        self._work.close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> IOEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ENGINES: weakref.WeakSet[IOEngine] = weakref.WeakSet()
_DEFAULT: dict[int, IOEngine] = {}  # by process
_MAKING = threading.Lock()


@atexit.register
def _close_engines() -> None:
    for engine in list(_ENGINES):
        engine.close()


def default_engine() -> IOEngine:
    """Return the engine that all files of a process share unless they are given another one."""
    with _MAKING:
        pid = os.getpid()
        if pid not in _DEFAULT:
            _DEFAULT[pid] = IOEngine()
        return _DEFAULT[pid]
