"""Recording of background work: when each copy, read, write and update began and ended.

Updates have their own thread, disk requests the engine's threads, and copies on CUDA a stream. A
recording attaches a `Beside` to a model's host tier and its updates; without it nothing is
recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from zerofx.nvme.request import Moment

now_ns = time.perf_counter_ns
UPDATE = "update"  # the lane of updates; the others are the host tier's


@dataclass(frozen=True, slots=True)
class Note:
    """One time span of a lane.

    lane: UPDATE, or one of the host tier's.
    what: "b3" for a transfer of bucket 3, "" if the schedule's call names it.
    launched_ns: when the schedule or the optimizer launched it. For work launched by an update on
        its own thread, when that update was launched.
    span: when it began and ended, as marks of the recording's clock or times of the host.
    moment: used instead of `span` by disk requests; the engine fills it in.
    """

    lane: str
    what: str
    nbytes: int
    launched_ns: int
    span: tuple[Any, Any] = (0, 0)
    moment: Moment | None = None


class Beside:
    """Collects notes from any thread. mark: records when the current stream reaches this point."""

    def __init__(self, mark: Callable[[], Any]) -> None:
        self.mark = mark
        self.notes: list[Note] = []
        self._updates: dict[int, int] = {}  # thread -> launch time of the update that it runs
        self._parts: set[int] = set()  # threads whose update has recorded its parts

    def launched_ns(self) -> int:
        """Return the launch time of work that is launched now, to pass on to another thread."""
        return self._updates.get(threading.get_ident()) or now_ns()

    @contextmanager
    def updating(self, what: str, launched_ns: int) -> Iterator[None]:
        """Record an update that this thread runs in the block, unless its parts are recorded."""
        me, began = threading.get_ident(), now_ns()
        outer = self._updates.get(me)
        self._updates[me] = launched_ns
        try:
            yield
            if outer is not None:
                self._parts.add(me)
            if me not in self._parts or outer is not None:
                self.notes.append(Note(UPDATE, what, 0, launched_ns, (began, now_ns())))
        finally:
            if outer is None:
                del self._updates[me]
                self._parts.discard(me)
            else:
                self._updates[me] = outer

    def copied(self, lane: str, what: str, nbytes: int, marks: Sequence[Any]) -> None:
        """Record a copy; its lane has marked its begin and its end."""
        began, ended = marks
        self.notes.append(Note(lane, what, nbytes, self.launched_ns(), (began, ended)))

    def requested(
        self, lane: str, what: str, nbytes: int, moment: Moment, launched_ns: int
    ) -> None:
        """Record a request to the disk, which may still be running."""
        self.notes.append(Note(lane, what, nbytes, launched_ns, moment=moment))
