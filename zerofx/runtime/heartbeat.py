"""Signs of life from a rank that is busy with something long: the others go on waiting for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from zerofx.runtime.board import MemoryBoard
from zerofx.runtime.hosts import HostLink

_BEAT_S = 0.25  # how often a sign is given on the board
_POST_S = 2.0  # and to the other hosts


class Heartbeat:
    """The signs of one rank, given by a thread: a process that is stopped or gone gives none."""

    def __init__(self, board: MemoryBoard, link: HostLink | None) -> None:
        self._board, self._link = board, link

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Give signs of life while the body runs."""
        ended = threading.Event()
        thread = threading.Thread(
            target=self._beat, args=(ended,), name="zerofx-heartbeat", daemon=True
        )
        self._board.set_busy(what)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._board.set_busy("")

    def count(self) -> int:
        """Return how many signs of life all ranks have given; it grows while one is busy."""
        here = sum(self._board.beats(row) for row in range(self._board.size))
        return here + (self._link.beats() if self._link is not None else 0)

    def _beat(self, ended: threading.Event) -> None:
        posted = time.monotonic() - _POST_S
        while not ended.wait(_BEAT_S):
            self._board.beat()
            now = time.monotonic()
            if self._link is not None and now - posted >= _POST_S:
                posted = now
                self._link.beat()
