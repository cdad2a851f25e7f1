"""Regions compiled during training: the trainer's side of the foreman, one for all its programs.

A program asks for its regions, goes on with ATen, and looks now and then whether all are there.
Regions that several programs have are compiled once. The ranks of a host have a foreman each, which
begin at different regions; the locks of the cache see to it that each is compiled once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from zerofx.comm.meeting import from_environment
from zerofx.runtime.regions import foreman
from zerofx.runtime.regions.cache import is_at_hand, lock_limit_s, place_of, why_not_compiled
from zerofx.runtime.regions.progress import Progress

log = logging.getLogger("zerofx")

NICENESS = 19  # of the processes that compile
_STOP_S = 3.0  # that a foreman gets to end its processes in
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv.pop()); "
    "from zerofx.runtime.regions.foreman import main; main(*sys.argv[1:])"
)
_MOST = 2**31 - 1


@dataclass
class RegionJob:
    """One region that is being compiled: where its artifact will lie, and what became of it."""

    name: str
    source: str
    path: Path
    end: str = ""
    why: str = ""
    batches: list[Batch] = field(default_factory=list)


class Batch:
    """The regions of one program, and whether all of them have been compiled."""

    def __init__(self, label: str, units: Mapping[str, str], total: int) -> None:
        self.label, self.units = label, units
        self.jobs: list[RegionJob] = []
        self.progress = Progress(
            label, total, "at low priority: steps run on ATen until all are compiled "
            "(kernels='aten' compiles nothing)",
        )  # fmt: skip
        self._has_warned = False

    @property
    def is_over(self) -> bool:
        """Whether each region is compiled, or known to be of those that are not."""
        return all(job.end and not self._is_missing(job) for job in self.jobs)

    @property
    def is_lost(self) -> bool:
        """Whether a region is not compiled and no longer worked on."""
        return any(self._is_missing(job) for job in self.jobs)

    def __str__(self) -> str:
        done = sum(1 for job in self.jobs if job.end and not self._is_missing(job))
        before = self.progress.total - len(self.jobs)
        return f"{before + done} of {self.progress.total} regions compiled"

    @staticmethod
    def _is_missing(job: RegionJob) -> bool:
        """Tell whether a region was given up, and no other rank has compiled it since."""
        return job.end in (foreman.DIED, foreman.FAILED) and not is_at_hand(job.path)

    def note(self, job: RegionJob) -> None:
        """Take what became of a region; a first loss is told, with its name."""
        is_lost = job.end in (foreman.DIED, foreman.FAILED)
        stays = is_lost or bool(why_not_compiled(job.path))
        self.progress.count("failed" if stays else job.end)
        if is_lost and not self._has_warned:
            self._has_warned = True
            self.progress.end(say_so=False)
            unit = self.units.get(job.name) or "the model"
            log.warning(
                "%s goes on with ATen regions: the process that compiled its region %s (of %s) "
                "%s. The next run tries again; kernels='inductor' compiles before the first step, "
                "kernels='aten' compiles nothing.",
                self.label, job.name, unit, job.why,
            )  # fmt: skip
        if all(job.end for job in self.jobs):
            self.progress.end()


class Compilers:
    """The foreman of this process, started for the first region that it is asked for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._jobs: dict[Path, RegionJob] = {}
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._pid = os.getpid()
        atexit.register(self.close)

    def ask_for(
        self, label: str, modules: Mapping[str, ModuleType], units: Mapping[str, str]
    ) -> Batch:
        """Have the regions compiled that the cache lacks; return what tells when that is done."""
        batch = Batch(label, units, len(modules))
        new: list[RegionJob] = []
        with self._lock:
            for name, module in _in_turn(modules):
                path, source = place_of(module)
                if is_at_hand(path):
                    batch.progress.count("cached")
                    continue
                job = self._jobs.get(path)
                if job is None or job.end:
                    job = self._jobs[path] = RegionJob(name, source, path)
                    new.append(job)
                job.batches.append(batch)
                batch.jobs.append(job)
            if batch.jobs:
                batch.progress.begin()
                self._send(new)
        return batch

    def drop(self, batch: Batch) -> None:
        """Compile no more for a batch: regions that no other one waits for are not begun."""
        with self._lock:
            batch.progress.end(say_so=False)
            for job in batch.jobs:
                if batch not in job.batches:  # it has ended
                    continue
                job.batches.remove(batch)
                if not job.batches:
                    job.end, job.why = foreman.DIED, "is no longer needed"
                    self._orders.put(json.dumps({"id": str(job.path), "drop": True}) + "\n")

    def close(self) -> None:
        """End the foreman and its processes."""
        with self._lock:
            process, self._process = self._process, None
        if process is None or os.getpid() != self._pid:  # not of a fork of this process
            return
        for job in list(self._jobs.values()):
            for batch in job.batches:
                batch.progress.end(say_so=False)
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._reader is not None:
            self._reader.join(_STOP_S)

    @property
    def process_id(self) -> int | None:
        """The foreman's process, None where none runs."""
        return None if self._process is None else self._process.pid

    def _send(self, jobs: Sequence[RegionJob]) -> None:
        if not jobs:
            return
        try:
            if self._process is None:
                self._start()
            for job in jobs:
                self._orders.put(json.dumps(_order(job)) + "\n")
        except OSError as error:
            self._give_up(jobs, f"could not be started ({error.strerror})")

    def _start(self) -> None:
        local = from_environment("LOCAL_WORLD_SIZE", 1, _MOST, 1)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        most = max(1, (cores or 1) // local)
        args = [os.getpid(), most, lock_limit_s(), NICENESS, json.dumps(sys.path)]
        process = subprocess.Popen(
            [sys.executable or "python3", "-c", _START, *map(str, args)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCH_WARM_POOL": "0"},
        )  # fmt: skip
        self._process, self._orders = process, queue.SimpleQueue()
        self._reader = threading.Thread(
            target=self._read, args=(process, self._orders), name="zerofx-compilers", daemon=True
        )
        self._reader.start()
        threading.Thread(
            target=_write, args=(process, self._orders), name="zerofx-orders", daemon=True
        ).start()

    # -- on the reader's thread -----------------------------------------------------------------
    def _read(self, process: subprocess.Popen[str], orders: queue.SimpleQueue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._take(json.loads(line))
        code = process.wait()
        process.stdout.close()
        orders.put("")
        with self._lock:
            if self._process is not process:  # it was closed
                return
            self._process = None
            waiting = [job for job in self._jobs.values() if not job.end]
            if waiting and code == 0:  # asked for as it ended for want of work
                self._send(waiting)
            elif waiting:
                how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
                self._give_up(waiting, how)

    def _take(self, said: dict[str, Any]) -> None:
        with self._lock:
            if said["end"] == foreman.UNABLE:
                waiting = [job for job in self._jobs.values() if not job.end]
                self._give_up(waiting, f"cannot compile: {said['why']}")
                return
            job = self._jobs[Path(said["id"])]
            self._end(job, said["end"], said.get("why", ""))

    def _give_up(self, jobs: Sequence[RegionJob], why: str) -> None:
        for job in jobs:
            self._end(job, foreman.DIED, why)

    def _end(self, job: RegionJob, end: str, why: str) -> None:
        job.end, job.why = end, why
        for batch in job.batches:
            batch.note(job)
        job.batches = []


def _write(process: subprocess.Popen[str], orders: queue.SimpleQueue[str]) -> None:
    """Pass orders on, on a thread: a foreman that is still starting reads none yet."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended: the reader sees to the rest
        while order := orders.get():
            process.stdin.write(order)
            process.stdin.flush()
    with contextlib.suppress(OSError):
        process.stdin.close()


def _in_turn(modules: Mapping[str, ModuleType]) -> list[tuple[str, ModuleType]]:
    """Return regions in the order in which this rank compiles them: the others begin elsewhere."""
    names = sorted(modules)
    local = from_environment("LOCAL_WORLD_SIZE", 1, _MOST, 1)
    first = from_environment("LOCAL_RANK", 0, _MOST, 0) * len(names) // local
    return [(name, modules[name]) for name in names[first:] + names[:first]]


def _order(job: RegionJob) -> dict[str, Any]:
    return {
        "id": str(job.path),
        "name": job.name,
        "source": job.source,
        "path": str(job.path),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "products": torch.get_float32_matmul_precision(),
    }


_COMPILERS: list[Compilers] = []


def compilers() -> Compilers:
    """Return the compilers of this process; a fork of it has its own."""
    if not _COMPILERS or _COMPILERS[0]._pid != os.getpid():
        _COMPILERS[:] = [Compilers()]
    return _COMPILERS[0]
