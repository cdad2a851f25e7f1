"""Waits in collectives, with a limit: what is stuck, and which ranks have not arrived.

A wait in gloo cannot be interrupted by another thread, and its own timeout does not say which rank
is missing. So a thread looks at the board while the main thread waits. If a rank has left, died,
begun another call, or not arrived in time, the thread posts the diagnosis for the other ranks and
breaks this rank's connections. The wait then ends, here and, one by one, on all other ranks.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from zerofx.comm.agreement import Agreement
from zerofx.comm.differences import STUCK, name_ranks
from zerofx.errors import DesyncError, as_sentence

log = logging.getLogger("zerofx")
Waiting = tuple[int, str]
"""The number of a collective on this rank, and its label."""

_LOOK_S = 0.25  # how often the thread looks
_PROGRESS_S = 10.0  # how often it posts this host's progress for the others
_FAREWELL_S = 2.0  # how long the cause of a lost connection may take to show on the board


def last_resort_s(timeout_s: float) -> float:
    """Return the limit of a single transfer, before which the watchdog acts."""
    return 2 * timeout_s + 60


class Watchdog(ABC):
    """The counter of launches on the board, which also watches this rank while it waits."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self._board = agreement.board
        self._last_resort = timedelta(seconds=last_resort_s(agreement.timeout_s))
        self._waiting: Waiting | None = None
        self.waited_s = 0.0  # by the host, in all collectives so far
        self._diagnosis: DesyncError | None = None
        self._interrupt: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def start(self, interrupt: Callable[[], None]) -> None:
        """Start the thread; `interrupt` ends every wait of this rank."""
        self._interrupt = interrupt
        me = weakref.ref(self), self._ended
        self._thread = threading.Thread(
            target=_stand_by, args=me, name="zerofx-watchdog", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, because a process that exits while it is inside gloo would abort."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_FAREWELL_S)

    def launched(self, handles: Sequence[Any], label: str) -> int:
        """Count a collective on the board; return its number on this rank."""
        number = self._board.launch()
        self.agreement.record.note(self.agreement.call, number, label)
        return number

    def wait(self, handles: Sequence[Any], number: int, label: str) -> None:
        """Wait for `handles`, the transfers of collective `number`.

        Raises:
            DesyncError: a rank is lost or late; names it.
        """
        self._waiting = (number, label)
        began = time.perf_counter()
        try:
            for handle in handles:
                self.wait_for(handle)
        except DesyncError:
            raise
        except RuntimeError as error:
            raise self.explain(number, label, error) from error
        finally:
            self._waiting = None
            self.waited_s += time.perf_counter() - began

    @abstractmethod
    def wait_for(self, handle: Any) -> None:
        """Wait for one transfer."""

    @property
    @abstractmethod
    def waiting(self) -> Waiting | None:
        """The number and label of the collective for which this rank waits."""

    def look(self, waited_s: float) -> str | None:
        """Return what is wrong with a wait that has lasted `waited_s`; None if nothing is."""
        waiting = self.waiting
        if waiting is None:
            return None
        number, label = waiting
        agreement, board = self.agreement, self._board
        here = self._here(label)
        lost = agreement.lost(number)
        if lost is not None:
            return f"{as_sentence(lost)} {here[0].upper()}{here[1:]}."
        for row, rank in enumerate(agreement.ranks):
            if board.call(row) > agreement.call and board.launched(row) < number:
                entry = board.entry(row, board.call(row))
                doing = f"{entry.what} (call {entry.call})" if entry else "another call"
                reason = board.broke_off(row, agreement.call)
                if reason is not None:
                    doing += f", after {reason},"
                return f"{agreement.name(rank)} is about to run {doing} while {here}."
        if waited_s < agreement.timeout_s:
            return None
        limit = f"{agreement.timeout_s:g} s (ZEROFX_TIMEOUT_S)"
        return f"{here}: {self._absent(number)} within {limit}."

    def _here(self, label: str) -> str:
        agreement = self.agreement
        name = agreement.name(agreement.rank)
        return f"{name} waits in {label} of {agreement.what} (call {agreement.call})"

    def _absent(self, number: int) -> str:
        """Name the ranks that have not launched collective `number`, and where they are."""
        agreement, board = self.agreement, self._board
        launched = {rank: board.launched(row) for row, rank in enumerate(agreement.ranks)}
        if agreement.link is not None:
            try:
                launched = {**agreement.link.progress(), **launched}
            except DesyncError as error:
                return f"the ranks that have not arrived are unknown ({error})"
        absent = [rank for rank, count in launched.items() if count < number]
        stopped = agreement.stopped()
        if not absent:
            return f"every rank has launched it, but {STUCK}" + (f": {stopped}" if stopped else "")
        places = "" if len(absent) > 8 else ", ".join(agreement.name(rank) for rank in absent)
        verb = "has" if len(absent) == 1 else "have"
        return f"{places or name_ranks(absent, '', '').strip()} {verb} not arrived" + (
            f" ({stopped})" if stopped else ""
        )

    def tick(self, waited_s: float) -> None:
        """Look once; if something is wrong, post it and end the wait.

        If looking itself fails, the wait still ends at its limit.
        """
        if self._diagnosis is not None or self._interrupt is None:
            return
        try:
            problem = self.look(waited_s)
        except Exception as error:
            if waited_s < self.agreement.timeout_s:
                raise
            problem = f"rank {self.agreement.rank} waits, and its watchdog fails: {error!r}."
        if problem is not None:
            self._diagnosis = self.agreement.fail(problem)
            self._interrupt()

    def note_failure(self) -> None:
        """Complete the record once another rank has given up, whatever this one does.

        This rank may hang outside all collectives, or its launcher may end it before the next one.
        """
        failure = self.agreement.failed_elsewhere()
        if failure is not None:
            self.agreement.record.end(f"another rank has given up: {failure}", is_own=False)

    def post_progress(self) -> None:
        """Tell other hosts how many collectives the ranks of this one have launched."""
        link, board = self.agreement.link, self._board
        if link is not None and link.is_leader:
            ranks = enumerate(self.agreement.ranks)
            link.post_progress({rank: board.launched(row) for row, rank in ranks})

    def explain(self, number: int, label: str, error: RuntimeError) -> DesyncError:
        """Turn gloo's error into one that names the rank, after a search for its cause."""
        agreement = self.agreement
        here = self._here(label)
        deadline = time.monotonic() + _FAREWELL_S
        while self._diagnosis is None and time.monotonic() < deadline:
            lost = agreement.lost(number, broken=True)
            if lost is not None:
                return agreement.fail(f"{as_sentence(lost)} {here[0].upper()}{here[1:]}.")
            time.sleep(0.02)
        said = as_sentence(error)
        return self._diagnosis or agreement.fail(f"{here}, and the transfer failed: {said}")


class HostWatchdog(Watchdog):
    """The watchdog of collectives for which the host waits."""

    def wait_for(self, handle: Any) -> None:
        """Wait for one transfer, beyond gloo's own limit, which is that of connecting."""
        handle.wait(self._last_resort)

    @property
    def waiting(self) -> Waiting | None:
        return self._waiting


class StreamWatchdog(Watchdog):
    """The watchdog of collectives on device streams, for which the host never waits.

    It aborts collectives that are stuck. The next launch, wait or call of this world raises the
    error.
    """

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self._running: deque[tuple[Waiting, Sequence[Any]]] = deque()

    def launched(self, handles: Sequence[Any], label: str) -> int:
        if self._diagnosis is not None:
            raise self._diagnosis
        number = super().launched(handles, label)
        self._running.append(((number, label), handles))
        return number

    def wait(self, handles: Sequence[Any], number: int, label: str) -> None:
        super().wait(handles, number, label)
        if self._diagnosis is not None:
            raise self._diagnosis

    def wait_for(self, handle: Any) -> None:
        handle.wait()  # with a limit, it would block the host

    @property
    def waiting(self) -> Waiting | None:
        """The oldest collective that the device has not finished."""
        while self._running and all(h.is_completed() for h in self._running[0][1]):
            self._running.popleft()
        return self._running[0][0] if self._running else None


def _stand_by(reference: weakref.ref[Watchdog], ended: threading.Event) -> None:
    """Look at a watchdog's wait a few times per second, until it is stopped or dropped.

    No error ends this loop: without it, a lost rank would be waited for until gloo's own limit.
    """
    round_ = _Round()
    while not ended.wait(_LOOK_S):
        watchdog = reference()
        if watchdog is None:
            return
        try:
            round_.look_at(watchdog)
        except Exception as error:  # noqa: BLE001  (whatever it is, the next look may succeed)
            round_.report(error)
        del watchdog


class _Round:
    """The state that the thread keeps between looks."""

    def __init__(self) -> None:
        self._last: Waiting | None = None
        self._since = self._posted = time.monotonic()
        self._reported = ""

    def look_at(self, watchdog: Watchdog) -> None:
        now = time.monotonic()
        watchdog.note_failure()
        waiting = watchdog.waiting
        if waiting is not self._last or waiting is None:
            self._last, self._since = waiting, now
        else:
            watchdog.tick(now - self._since)
        if now - self._posted > _PROGRESS_S:
            self._posted = now
            watchdog.post_progress()

    def report(self, error: Exception) -> None:
        """Log the error of a look, but only once while it repeats."""
        if repr(error) != self._reported:
            self._reported = repr(error)
            log.warning("zerofx: the watchdog failed to check the ranks: %r.", error)
