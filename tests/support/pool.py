"""A pool of real gloo ranks for tests: processes forked once a session from a warm server.

    def body(scale):                                  # in tests/test_x.py, runs on every rank
        world = World.connect()
        ...
        return result                                 # anything that pickles

    def test_x(pool):
        left, right = pool.run(2, body, 0.5)

Each job gets a fresh process group (10 ms), and the environment, the seed and the warning filters
it would have in a new process. A rank that raises, dies or hangs costs its team: the next job forks
new processes. Where a rank hangs, its stacks are told.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.checkpoint", "zerofx"]
GRACE_S = 3.0  # after one rank has failed, what the others get to report in


@dataclass(frozen=True)
class Died:
    """Stands for the result of a rank whose process ended before it returned one."""

    exitcode: int | None


class RemoteTraceback(Exception):
    """Carries the tracebacks of the ranks that failed, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass
class _Rank:
    process: Any
    pipe: multiprocessing.connection.Connection
    stacks: str  # the file it writes its stacks to at SIGUSR1

    def tell_stacks(self) -> str:
        """Return where each of its threads is now; "" of a process that has ended or is stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        with open(self.stacks) as file:
            return file.read()


class Pool:
    """Teams of worker processes, one team a world size, each started at its first job."""

    def __init__(self, warning_filters: tuple[str, ...] = ()) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._filters = warning_filters
        self._teams: dict[int, list[_Rank]] = {}

    def run(
        self,
        world_size: int,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout_s: float = 120.0,
        may_die: bool = False,
    ) -> list[Any]:
        """Run `function(*args)` on every rank; return the results in rank order.

        `function` is importable at its module's top level, or given as "module:function". With
        `may_die`, the result of a rank that was killed is a `Died`. On a machine that does other
        work too, ZEROFX_TEST_PATIENCE=4 in the environment gives ranks four times their time.

        Raises: what a rank raised, from its remote traceback; TimeoutError, naming the ranks.
        """
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        timeout_s *= float(os.environ.get("ZEROFX_TEST_PATIENCE", "1"))
        team = self._teams.get(world_size) or self._start(world_size)
        with tempfile.TemporaryDirectory(prefix="zerofx-pool-") as folder:
            store = os.path.join(folder, "store")
            for rank in team:
                rank.pipe.send_bytes(pickle.dumps((function, args, store)))
            answers = self._collect(team, timeout_s, may_die)
        stacks = {i: r.tell_stacks() for i, r in enumerate(team) if i not in answers}
        done = [a for kind, a in answers.values() if kind == "ok" and not isinstance(a, Died)]
        if len(done) < world_size:
            self._stop(world_size)
        _raise_failures(function, answers, stacks, world_size, timeout_s)
        return [answers[rank][1] for rank in range(world_size)]

    def renew(self) -> None:
        """Let the next jobs run in new processes, for tests that count what a process holds."""
        self.close()

    def close(self) -> None:
        """End every worker."""
        for world_size in list(self._teams):
            self._stop(world_size)

    def _start(self, world_size: int) -> list[_Rank]:
        team = []
        for rank in range(world_size):
            ours, theirs = self._context.Pipe()
            handle, stacks = tempfile.mkstemp(prefix="zerofx-pool-stacks-")
            os.close(handle)
            process = self._context.Process(
                target=_serve, args=(theirs, rank, world_size, self._filters, stacks), daemon=True
            )
            process.start()
            theirs.close()
            team.append(_Rank(process, ours, stacks))
        self._teams[world_size] = team
        return team

    def _stop(self, world_size: int) -> None:
        for rank in self._teams.pop(world_size):
            rank.process.kill()  # also ends one that a test has stopped
            rank.process.join()
            rank.pipe.close()
            os.unlink(rank.stacks)

    def _collect(
        self, team: list[_Rank], timeout_s: float, may_die: bool
    ) -> dict[int, tuple[str, Any]]:
        """Return each rank's ("ok", result), ("error", (exception, text)) or ("died", Died).

        Ends early, after a grace, once a rank has failed.
        """
        answers: dict[int, tuple[str, Any]] = {}
        by_pipe = {rank.pipe: i for i, rank in enumerate(team)}
        deadline = time.monotonic() + timeout_s
        while by_pipe and (left := deadline - time.monotonic()) > 0:
            ready: list[Any] = multiprocessing.connection.wait(list(by_pipe), left)
            for pipe in ready:
                i = by_pipe.pop(pipe)
                try:
                    answers[i] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    team[i].process.join()
                    answers[i] = ("ok" if may_die else "died", Died(team[i].process.exitcode))
                if answers[i][0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers


def _raise_failures(
    function: str,
    answers: dict[int, tuple[str, Any]],
    stacks: dict[int, str],
    world_size: int,
    timeout_s: float,
) -> None:
    """Raise the first failure that is not merely another rank's complaint about it."""
    errors = {r: a[1] for r, a in answers.items() if a[0] == "error"}
    text = "\n".join(f"rank {r} of {world_size}:\n{t}" for r, (_, t) in sorted(errors.items()))
    if errors:
        order = sorted(errors, key=lambda r: _is_echo(errors[r][0]))
        raise errors[order[0]][0] from RemoteTraceback(text)
    dead = {r: a[1].exitcode for r, a in answers.items() if a[0] == "died"}
    if dead:
        raise RuntimeError(f"{function}: ranks died with exit codes {dead}")
    absent = sorted(set(range(world_size)) - set(answers))
    if absent:
        where = "\n".join(f"rank {r} was at\n{stacks[r]}" for r in absent)
        raise TimeoutError(
            f"{function}: ranks {absent} of {world_size} ran over {timeout_s} s"
        ) from RemoteTraceback(where)


def _is_echo(error: BaseException) -> bool:
    """Return whether `error` is what a rank sees when another one has failed."""
    return type(error).__name__ == "DesyncError" or "gloo/transport" in str(error)


def _serve(
    pipe: multiprocessing.connection.Connection,
    rank: int,
    size: int,
    filters: tuple[str, ...],
    stacks: str,
) -> None:
    """Run jobs until the pipe closes."""
    import torch

    faulthandler.register(signal.SIGUSR1, open(stacks, "w"))  # noqa: SIM115 (open while it runs)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            function, args, store = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            with _as_errors(filters):
                answer = pickle.dumps(("ok", _job(function, args, store, rank, size)))
        except BaseException as error:
            answer = pickle.dumps(("error", (_portable(error), traceback.format_exc())))
        pipe.send_bytes(answer)


def _job(function: str, args: tuple, store: str, rank: int, size: int) -> Any:
    import torch
    import torch.distributed as dist
    from leftovers import python_dispatches

    module, name = function.split(":")
    body = getattr(importlib.import_module(module), name)
    environment = dict(os.environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    meeting = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size)
    # A rank that ended before another has connected to it would break that one's connections.
    meeting.set(f"ready/{rank}", "")
    meeting.wait([f"ready/{other}" for other in range(size)])
    torch.manual_seed(0)
    try:
        answer = body(*args)
        assert not python_dispatches(), "each operator of this rank goes through Python from now on"
        return answer
    finally:
        os.environ.clear()
        os.environ.update(environment)
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()
        gc.collect()
        _end_groups()


def _forget_meshes() -> None:
    """Let torch forget what it worked out for DTensors of meshes whose process groups are gone.

    It finds a result's placement by the equality of meshes, which does not look at their groups: a
    later job's tensors would come to lie on a mesh of an earlier one, whose groups are dead.
    """
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()


def _end_groups() -> None:
    """Drop the process groups that zerofx keeps for a next world: their job is over.

    Each has threads that wake up a hundred times a second, in workers that wait for a job, too.
    """
    groups = sys.modules.get("zerofx.comm.groups")
    if groups is not None:
        groups._KEPT.clear()
        gc.collect()  # of the meshes that hold them


def _portable(error: BaseException) -> BaseException:
    """Return `error` if it survives pickling, else its text in a RuntimeError."""
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _as_errors(filters: tuple[str, ...]) -> Iterator[None]:
    """Warn by the session's filters, whatever libraries that earlier jobs imported have set."""
    from _pytest.config import parse_warning_filter

    with warnings.catch_warnings():
        for text in filters:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))
        yield


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """The session's pool; its workers turn warnings into errors as the session does."""
    filters = (
        *pytestconfig.getini("filterwarnings"),
        *(pytestconfig.known_args_namespace.pythonwarnings or ()),
    )
    shared = Pool(tuple(filters))
    yield shared
    shared.close()
