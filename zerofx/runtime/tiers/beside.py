"""What runs beside a schedule's calls: when each copy, read, write and update began and ended.

Updates have a thread of their own, requests to the disk the engine's, copies on CUDA a stream. A
recording hangs one of these in a model's host tier and its updates; without one nothing is noted.
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
    """One stretch of a lane.

    lane: UPDATE, or one of the host tier's. what: "b3" for what moves of bucket 3, "" where the
        schedule's call says it. launched_ns: when the schedule or the optimizer launched it; of
        what an update on its own thread launches, when that update was.
    span: when it began and ended: marks of the recording's clock, or times of the host. moment:
        in place of it, of a request to the disk: what the engine fills in.
    """

    lane: str
    what: str
    nbytes: int
    launched_ns: int
    span: tuple[Any, Any] = (0, 0)
    moment: Moment | None = None


class Beside:
    """Collects notes, from any thread. mark: tells when the current stream gets to here."""

    def __init__(self, mark: Callable[[], Any]) -> None:
        self.mark = mark
        self.notes: list[Note] = []
        self._updates: dict[int, int] = {}  # thread -> when the update that it runs was launched
        self._parts: set[int] = set()  # threads whose update has noted parts of itself

    def launched_ns(self) -> int:
        """Return when what is launched now was; to take along where another thread does it."""
        return self._updates.get(threading.get_ident()) or now_ns()

    @contextmanager
    def updating(self, what: str, launched_ns: int) -> Iterator[None]:
        """Note an update that runs on this thread in the block, or in its place parts of it."""
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
        """Note a copy; its lane has marked its begin and its end."""
        began, ended = marks
        self.notes.append(Note(lane, what, nbytes, self.launched_ns(), (began, ended)))

    def requested(
        self, lane: str, what: str, nbytes: int, moment: Moment, launched_ns: int
    ) -> None:
        """Note a request to the disk, which may not have ended yet."""
        self.notes.append(Note(lane, what, nbytes, launched_ns, moment=moment))
