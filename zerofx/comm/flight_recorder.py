"""Flight records: the last actions of a rank, in a small file that survives its process.

Each rank of a world writes its calls and the collectives that it launches to a file as they happen,
through a mapping of the file into memory, which takes about two microseconds each and no system
call. Nothing has to be written at the end, so a process that is killed or runs out of memory leaves
its record too. A rank that ends normally removes it. A rank that raises adds the reason and the
stacks of its threads.

The file has JSON lines of fixed lengths, padded with blanks: a head, the reason, and a ring of the
last `NUM_EVENTS` events. `zerofx doctor --postmortem` reads the records of all ranks.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import mmap
import os
import re
import socket
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from zerofx.comm.board import process_started

log = logging.getLogger("zerofx")

VARIABLE = "ZEROFX_FLIGHT_DIR"
NUM_EVENTS, EVENT_BYTES = 128, 512
HEAD_BYTES, REASON_BYTES = 4096, 16384  # the reason includes the stacks of all threads
_NUM_BYTES = HEAD_BYTES + REASON_BYTES + NUM_EVENTS * EVENT_BYTES
_KEPT_JOBS = 20  # in the default folder; records of older jobs are removed
_FRAMES, _THREADS = 24, 12  # innermost frames per stack; threads per process
JOB = re.compile(r"[\w.-]{1,128}")
FORMAT = 1


class FlightRecorder:
    """The record of one rank in one world; without a folder it writes nothing.

    folder: the folder of the job, which is created if necessary.
    """

    def __init__(self, folder: Path | None, name: str, about: dict[str, Any]) -> None:
        self.path = None if folder is None else folder / f"{name}.jsonl"
        self._owner = os.getpid()
        self._count = 0
        self._lock = threading.Lock()
        self._reason = ""
        self._file = -1
        self._events: mmap.mmap | None = None
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o600)
            # All of its bytes are written now, so that a full disk is an error here, not a signal
            # in the middle of training.
            if os.pwrite(self._file, bytes(_NUM_BYTES), 0) < _NUM_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self._write(0, HEAD_BYTES, {"format": FORMAT, **about})
            self._events = mmap.mmap(self._file, _NUM_BYTES)
        except OSError as error:
            self._stop(error)

    def note(self, call: int, launch: int, what: str) -> None:
        """Record a call, or the `launch`-th collective, that begins now."""
        events = self._events
        if events is None:
            return
        number = self._count
        self._count = number + 1
        line = b'{"event":%d,"at":%.6f,"call":%d,"launch":%d,"what":%s}' % (
            *(number, time.time(), call, launch),
            _quoted(what),
        )
        at = HEAD_BYTES + REASON_BYTES + number % NUM_EVENTS * EVENT_BYTES
        events[at : at + EVENT_BYTES] = line.ljust(EVENT_BYTES - 1) + b"\n"

    def end(self, reason: str, is_own: bool, error: BaseException | None = None) -> None:
        """Write why the rank ends and the stacks of its threads; the first reason is kept.

        is_own: the cause is on this rank, not something that another rank did or failed to do.
        error: the exception that ended it, if its stack has already been unwound.
        """
        with self._lock:
            if self._file < 0 or self._reason or os.getpid() != self._owner:
                return
            self._reason = reason
            said = {"at": time.time(), "reason": reason[:4000], "is_own": is_own}
            try:
                self._write(HEAD_BYTES, REASON_BYTES, {**said, "stacks": _stacks(error)})
            except OSError as error:
                self._stop(error)
                return
        assert self.path is not None
        log.warning(
            "zerofx: the last calls of this rank are in %s; once all ranks have ended: "
            "zerofx doctor --postmortem %s.", self.path, self.path.parent,
        )  # fmt: skip

    def close(self) -> None:
        """Close the record; remove it if it has no reason, and the job's folder if it is empty."""
        if self._file < 0 or os.getpid() != self._owner:
            return
        os.close(self._file)
        self._file, self._events = -1, None
        if not self._reason and self.path is not None:
            with contextlib.suppress(OSError):  # the file or the folder may be gone already
                self.path.unlink()
                self.path.parent.rmdir()

    def _write(self, at: int, num_bytes: int, values: dict[str, Any]) -> None:
        line = json.dumps(values).encode()
        while len(line) >= num_bytes:  # cut the longest texts
            values = {k: _shortened(v) for k, v in values.items()}
            line = json.dumps(values).encode()
        os.pwrite(self._file, line.ljust(num_bytes - 1) + b"\n", at)

    def _stop(self, error: OSError) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._events = -1, None
        log.warning(
            "zerofx: no flight record of this rank is kept: %s. Set %s to another folder.",
            error, VARIABLE,
        )  # fmt: skip


def recorder(job: str, world: str, rank: int, ranks: Sequence[int]) -> FlightRecorder:
    """Return the recorder of a rank.

    job: a name that the ranks have agreed on. ranks: those of the world, as numbered in the job.
    """
    folder = None if not JOB.fullmatch(job) else _folder()
    about = {
        "job": job,
        "world": world,
        "rank": rank,
        "ranks": list(ranks)[:64],
        "size": len(ranks),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "process_started": process_started(os.getpid()),
        "started": time.time(),
        "command": sys.argv[:8],
        "torch": sys.modules["torch"].__version__ if "torch" in sys.modules else "",
    }
    name = f"rank-{ranks[rank]}-{next(_NUMBERS)}"
    return FlightRecorder(None if folder is None else folder / job, name, about)


_NUMBERS = itertools.count(1)  # of this process's records


def new_job() -> str:
    """Return a name for a job that begins now, made by its first rank."""
    return f"{time.strftime('%Y%m%d-%H%M%S', _STARTED)}-{os.getpid()}"


_STARTED = time.localtime()


def _folder() -> Path | None:
    """Return the folder of all jobs' folders; None if no records are wanted or possible."""
    if (chosen := os.environ.get(VARIABLE)) is not None:
        return Path(chosen).absolute() if chosen else None
    folder = Path(tempfile.gettempdir()) / f"zerofx-flight-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_ours or found.st_mode & 0o022:
            log.warning(
                "zerofx: no flight records are kept: %s is not a folder that only you can write "
                "to. Set %s to one.", folder, VARIABLE,
            )  # fmt: skip
            return None
        _prune(folder)
    except OSError as error:
        log.warning("zerofx: no flight records are kept: %s. Set %s.", error, VARIABLE)
        return None
    return folder


def _prune(folder: Path) -> None:
    """Remove the records of all but the newest jobs."""
    jobs = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=lambda e: e.name)
    for job in jobs[:-_KEPT_JOBS]:
        with contextlib.suppress(OSError):  # another rank may remove it too
            for record in job.glob("rank-*.jsonl"):
                record.unlink()
            job.rmdir()


@lru_cache(maxsize=4096)
def _quoted(what: str) -> bytes:
    """Return a text as JSON, shortened to fit into an event."""
    text = json.dumps(what).encode()
    while len(text) > EVENT_BYTES - 128:
        what = what[: len(what) * 3 // 4]
        text = json.dumps(f"{what}...").encode()
    return text


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value[: max(64, len(value) * 3 // 4)]
    if isinstance(value, list):
        return value[-max(1, len(value) * 3 // 4) :]
    if isinstance(value, dict):
        return {k: _shortened(v) for k, v in value.items()}
    return value


def _stacks(error: BaseException | None) -> dict[str, list[str]]:
    """Return the stack of an error, or else those of all threads, the main thread first.

    The innermost line of each stack comes last.
    """
    if error is not None:
        return {"MainThread": _lines(traceback.extract_tb(error.__traceback__))}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda each: each[0] != main)
    return {
        names.get(ident, str(ident)): _lines(traceback.extract_stack(top))
        for ident, top in frames[:_THREADS]
    }


def _lines(stack: traceback.StackSummary) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack[-_FRAMES:]]
