"""Read on all ranks what another process may replace at any time: all of it, on every rank, from
one state of the files, or again from the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from zerofx.comm.together import together
from zerofx.comm.world import World
from zerofx.errors import SnapshotError
from zerofx.snapshot.held import Replaced

T = TypeVar("T")
log = logging.getLogger("zerofx")

TRIES = 24
_NAP_S = (1e-3, 0.5)  # after the first try, and at most; all tries together nap 8 s


class Read(Protocol):
    """One rank's part of a read. Every step may raise `Replaced`."""

    def open(self) -> Any:
        """Find the files and hold them open; return what must be equal on all ranks."""

    def check(self) -> None:
        """Check everything; change nothing."""

    def fill(self) -> None:
        """Read everything into its place; may be repeated."""

    def close(self) -> None:
        """Let go of the files."""


def read_settled(world: World, what: str, job: Read) -> None:
    """Take the steps of a read on all ranks; a collective call.

    The steps start again, on all ranks, if the files were replaced meanwhile or ranks have opened
    different ones: at most `TRIES` times.

    Raises:
        SnapshotError: a step failed on a rank, or the files did not stay long enough.
    """
    part = why = ""
    for number in range(TRIES):
        if number:
            time.sleep(min(_NAP_S[0] * 2 ** (number - 1), _NAP_S[1]))
        try:
            why = _open_and_check(world, what, job)
            if not why:
                why = _step(world, what, job.fill)
                if not why:
                    return
                part = "; the model is loaded in part: load again before going on"
        except SnapshotError as error:
            if part and "loaded in part" not in str(error):  # by the fill of an earlier try
                raise SnapshotError(f"{error}{part}") from error
            raise
        finally:
            job.close()
        log.info("%s: starting again: %s", what, why)
    raise SnapshotError(
        f"{what}: the files were replaced during each of {TRIES} attempts to read them. The last "
        f"time {why}. Read when no save or export to this place is running, and give all ranks one "
        f"file system{part}"
    )


def _open_and_check(world: World, what: str, job: Read) -> str:
    """Return why these steps have to start again, "" if they succeeded."""
    found = together(world, what, lambda: _unless_replaced(job.open), SnapshotError)
    for rank, (seen, why) in enumerate(found):
        if why:
            return why
        if seen != found[0][0]:
            return f"rank {rank} found other files there than rank 0"
    return _step(world, what, job.check)


def _step(world: World, what: str, step: Callable[[], None]) -> str:
    found = together(world, what, lambda: _unless_replaced(step), SnapshotError)
    return next((why for _, why in found if why), "")


def _unless_replaced(step: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return step(), ""
    except Replaced as replaced:
        return None, str(replaced)
