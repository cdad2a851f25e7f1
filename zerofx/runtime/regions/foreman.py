"""The foreman: a process next to training that compiles regions, each in a process forked from it.

It imports the compiler once, and lets itself be told of regions by lines of JSON. Every fork has
what it imported, and takes its memory with it when it ends or is killed. All of this has the lowest
priority. No process of it outlives the one that trains, and what one that is stopped has begun to
write is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

COMPILED, CACHED, BUSY, FAILED = "compiled", "cached", "busy", "failed"
HERE = "here"  # only the process that trains can compile it: it uses an operator of the user's
DIED = "died"
UNABLE = "unable"  # the machine cannot compile anything

_LOOK_S = 0.1  # between looks at what runs
_BUSY_S = 0.5  # before a region is tried again that another process compiles
_IDLE_S = 30.0  # without work, before the foreman ends
_SIGNALS = (signal.SIGTERM, signal.SIGALRM)
_ON_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG
_GRACE_S = 1.0  # for a compiler to remove what it has begun to write
_INDUCTOR_S = 600.0  # for which Inductor's own locks are waited for: at this priority all is slow


@dataclass
class Work:
    """One region in a process of its own."""

    job: dict[str, Any]
    result: int  # where its process says what became of it


class Foreman:
    """Takes jobs and has at most `most` of them done at a time, until the trainer closes its side.

    trainer: the process for which it compiles.
    """

    def __init__(self, trainer: int, most: int, lock_wait_s: float) -> None:
        self._trainer, self._most, self._lock_wait_s = trainer, most, lock_wait_s
        self._waiting: deque[dict[str, Any]] = deque()
        self._running: dict[int, Work] = {}
        self._text = b""
        self._is_closed = False
        # Whatever else prints goes to stderr.
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def run(self) -> None:
        """Work until the trainer ends or needs nothing for a while."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_signal)
        signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
        os.set_blocking(0, False)
        self._prepare()
        idle_since = time.monotonic()
        while not self._is_closed:
            if self._running or self._waiting:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > _IDLE_S:
                break
            self._start_waiting()
            with contextlib.suppress(OSError):
                select.select([0], [], [], _LOOK_S)
            self._take_orders()
            self._take_results()
        self.stop()

    def stop(self) -> None:
        """End all processes; a compiler that is told to removes what it was writing."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for pid in self._running:
            _signal_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        left = set(self._running)
        while left and time.monotonic() < deadline:
            for pid in list(left):
                _reaped(pid)
                if not _signal_group(pid, 0):
                    left.discard(pid)
            time.sleep(0.02)
        for pid, work in self._running.items():
            _signal_group(pid, signal.SIGKILL)
            _remove_unfinished(work.job, pid)

    # -- what the trainer is told ---------------------------------------------------------------
    def _say(self, **what: Any) -> None:
        try:
            print(json.dumps(what), file=self._out, flush=True)
        except OSError:
            self._is_closed = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM and os.getppid() == self._trainer:
            return
        self.stop()
        if number == signal.SIGALRM:  # a compiler of its own may still run
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)
        os._exit(0)

    # -- compiling ------------------------------------------------------------------------------
    def _prepare(self) -> None:
        """Import the compiler and ask it what every region asks, before anything is forked."""
        from zerofx.compat.inductor import import_inductor, inductor_problem, probe_compiler

        if problem := inductor_problem():
            self._say(end=UNABLE, why=problem)
            self._is_closed = True
            return
        import_inductor()
        import zerofx.kernels
        import zerofx.runtime  # noqa: F401  - operators that regions call

        probe_compiler(_INDUCTOR_S)

    def _take_orders(self) -> None:
        try:
            while piece := os.read(0, 1 << 16):
                self._text += piece
            self._is_closed = True  # the trainer has closed its side
        except BlockingIOError:
            pass
        *lines, self._text = self._text.split(b"\n")
        for order in map(json.loads, lines):
            if order.get("drop"):
                kept = [job for job in self._waiting if job["id"] != order["id"]]
                self._waiting = deque(kept)
            else:
                self._waiting.append(order)

    def _start_waiting(self) -> None:
        now = time.monotonic()
        for _ in range(len(self._waiting)):
            if len(self._running) >= self._most:
                return
            job = self._waiting.popleft()
            if job.get("not_before", 0.0) > now:
                self._waiting.append(job)
            else:
                self._start(job)

    def _start(self, job: dict[str, Any]) -> None:
        from zerofx.runtime.regions.cache import is_at_hand

        if is_at_hand(Path(job["path"])):
            self._say(id=job["id"], end=CACHED)
            return
        job.setdefault("first", time.monotonic())
        job["patient"] = time.monotonic() - job["first"] < self._lock_wait_s
        ours, theirs = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                self._be_a_worker()
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                os.write(theirs, json.dumps(_done(job)).encode())
                status = 0
            os._exit(status)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        os.close(theirs)
        self._running[pid] = Work(job, ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _be_a_worker(self) -> None:
        """Leave the foreman's group, signals and pipes behind in a process forked from it."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        _end_with_parent()
        for each in (self._out.fileno(), *(work.result for work in self._running.values())):
            os.close(each)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)

    def _take_results(self) -> None:
        for pid, work in list(self._running.items()):
            status = _reaped(pid)
            if status is None:
                continue
            del self._running[pid]
            with os.fdopen(work.result, "rb") as file:
                said = file.read()
            _signal_group(pid, signal.SIGTERM)  # a compiler whose worker was killed
            _remove_unfinished(work.job, pid)
            answer = json.loads(said) if said else {"end": DIED, "why": _how(status)}
            if answer["end"] == BUSY:
                self._waiting.append({**work.job, "not_before": time.monotonic() + _BUSY_S})
                continue
            self._say(id=work.job["id"], **answer)


def _done(job: dict[str, Any]) -> dict[str, str]:
    """Compile a region into the cache; return what became of it."""
    import torch

    from zerofx.errors import ProgramError
    from zerofx.runtime.regions.cache import compile_for_trainer

    torch.set_num_threads(job["threads"])
    torch.set_default_dtype(getattr(torch, job["dtype"]))
    torch.set_float32_matmul_precision(job["products"])
    module = ModuleType(job["name"])
    try:
        exec(compile(job["source"], f"{job['name']}.py", "exec"), module.__dict__)
        return {"end": compile_for_trainer(job["name"], module, Path(job["path"]), job["patient"])}
    except ProgramError as error:
        return {"end": FAILED, "why": str(error)}
    except Exception as error:  # noqa: BLE001 - the trainer meets it again, in its own process
        return {"end": HERE, "why": f"{type(error).__name__}: {error}"[:2000]}


def _end_with_parent() -> None:
    """Have this process end when its parent does, also when that is killed (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_ON_DEATH_OF_PARENT, signal.SIGTERM)


# -- processes ------------------------------------------------------------------------------------
def _reaped(pid: int) -> int | None:
    """Return how a child has ended, None while it runs."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if found else None


def _signal_group(pid: int, number: int) -> bool:
    """Signal a worker and its compilers; return whether there are any left."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        memory = ", as when the machine runs out of memory" if name == "SIGKILL" else ""
        return f"was ended by {name}{memory}"
    return f"ended with status {os.waitstatus_to_exitcode(status)}"


def _remove_unfinished(job: dict[str, Any], pid: int) -> None:
    """Remove what a process had begun to write for a region, and had not put in its place."""
    path = Path(job["path"])
    for pattern in (f"{path.stem}*.{pid}-*", f".{path.stem}*.{pid}-*"):
        for file in path.parent.glob(pattern):
            file.unlink(missing_ok=True)


def main(trainer: str, most: str, lock_wait_s: str, niceness: str) -> None:
    """Serve the process with this id."""
    os.nice(int(niceness))
    Foreman(int(trainer), int(most), float(lock_wait_s)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
