"""Say how far compiling is: nothing where it is quick, then a line from time to time."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import ClassVar

from zerofx.comm.meeting import from_environment

log = logging.getLogger("zerofx")

FIRST_S, NEXT_S, MOST_S = 1.0, 5.0, 60.0  # when the first line comes, and how long until others
SILENT_S = 5.0  # how long something that is waited for may take without a line


def say(text: str) -> None:
    """Log a line at INFO on rank 0; print it if no logger of the user's takes it."""
    if from_environment("RANK", 0, 2**31 - 1, 0) != 0:
        return
    if log.isEnabledFor(logging.INFO):
        log.info("%s", text)
    else:
        sys.stderr.write(f"zerofx: {text}\n")
        sys.stderr.flush()


class Wait:
    """Says what the caller waits for in a block, and for how long, once that takes long."""

    def __init__(self, what: str) -> None:
        self.what = what  # may change while the block runs
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerofx-wait", daemon=True)

    def __enter__(self) -> Wait:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        wait_s = SILENT_S
        while not self._ended.wait(wait_s):
            say(f"{self.what}: {time.monotonic() - self._began:.0f} s")
            wait_s = min(MOST_S, wait_s * 2)


class Progress:
    """Counts regions as they are compiled; a thread tells how many while that takes long.

    Of several at a time, only the one that began first is told of, with the number of the others.

    what: whose regions they are. meanwhile: what goes on until all are there, told once.
    """

    _running: ClassVar[list[Progress]] = []  # in the order in which they began

    def __init__(self, what: str, total: int, meanwhile: str = "") -> None:
        self.what, self.total = what, total
        self._meanwhile = f", {meanwhile}" if meanwhile else ""
        self._compiled = self._cached = self._failed = 0
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._has_said = False
        self._thread = threading.Thread(target=self._run, name="zerofx-progress", daemon=True)

    def __enter__(self) -> Progress:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.end(say_so=error is None)

    def begin(self) -> None:
        """Start to tell; the first line comes after `FIRST_S` seconds."""
        self._began = time.monotonic()
        self._running.append(self)
        self._thread.start()

    def count(self, how: str) -> None:
        """Note one more region: "compiled", "cached", or "failed", which stays on ATen."""
        self._compiled += how == "compiled"
        self._cached += how == "cached"
        self._failed += how == "failed"

    def end(self, say_so: bool = True) -> None:
        """Stop; say how it ended if anything was said before."""
        if self._ended.is_set() or not self._thread.is_alive():
            return
        self._ended.set()
        self._running.remove(self)
        self._thread.join()
        if self._has_said and say_so:
            say(f"compiled {self}")

    def __str__(self) -> str:
        done = self._compiled + self._cached + self._failed
        parts = [f"{self._cached} cached"] if self._cached else []
        parts += [f"{self._failed} on ATen"] if self._failed else []
        said = f" ({', '.join(parts)})" if parts else ""
        seconds = time.monotonic() - self._began
        return f"{self.what}: {done} of {self.total} regions{said}, {seconds:.1f} s"

    def _run(self) -> None:
        wait_s, following_s = FIRST_S, NEXT_S
        while not self._ended.wait(wait_s):
            if self._running[:1] == [self]:
                others = len(self._running) - 1
                noun = "program" if others == 1 else "programs"
                more = f"; {others} more {noun} to compile" if others else ""
                say(f"compiling {self}{'' if self._has_said else self._meanwhile}{more}")
                self._has_said = True
            wait_s, following_s = following_s, min(MOST_S, following_s * 2)
