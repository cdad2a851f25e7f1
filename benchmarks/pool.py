"""Groups of processes, one group per measured system, of which one runs while the others sleep."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class WorkerError(RuntimeError):
    """A worker raised, died or did not answer in time; the message contains its own text."""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Group:
    """`ranks` processes that serve the same job, each blocked on its pipe unless called.

    root: the checkout whose zerofx and benchmarks they run.
    """

    def __init__(
        self,
        name: str,
        job: str,
        args: dict[str, Any],
        ranks: int,
        env: Mapping[str, str],
        python: str = sys.executable,
        root: Path = ROOT,
    ) -> None:
        self.name = name
        # open as long as the workers write to them: close() closes them
        self._logs = [tempfile.TemporaryFile() for _ in range(ranks)]  # noqa: SIM115
        shared = os.environ | ONE_THREAD | dict(env)
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self._workers = [
            subprocess.Popen(
                [python, "-m", "benchmarks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=root,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, log in enumerate(self._logs)
        ]
        self._send({"job": job, "args": args})

    def ready(self, timeout_s: float = 600) -> None:
        """Wait until every rank has created its job."""
        self._receive(timeout_s)

    def call(self, method: str, timeout_s: float = 600, **args: Any) -> list[Any]:
        """Call a method of the job on every rank and return their results in rank order."""
        self._send({"method": method, "args": args})
        return self._receive(timeout_s)

    def close(self) -> None:
        """Close the pipes, which ends the workers, and reap them."""
        for worker in self._workers:
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                pipe.close()
        for worker in self._workers:
            try:
                worker.wait(timeout=10)
            except subprocess.TimeoutExpired:  # busy in a step that will never end
                worker.kill()
                worker.wait()
        for log in self._logs:
            log.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: dict[str, Any]) -> None:
        line = (json.dumps(message) + "\n").encode()
        for rank, worker in enumerate(self._workers):
            assert worker.stdin is not None
            try:
                worker.stdin.write(line)
                worker.stdin.flush()
            except BrokenPipeError as e:
                raise self._failure(rank, "died") from e

    def _receive(self, timeout_s: float) -> list[Any]:
        results = []
        for rank, worker in enumerate(self._workers):
            assert worker.stdout is not None
            if not select.select([worker.stdout], [], [], timeout_s)[0]:
                raise self._failure(rank, f"did not answer within {timeout_s:.0f} s")
            line = worker.stdout.readline()
            if not line:
                raise self._failure(rank, "died")
            answer = json.loads(line)
            if "error" in answer:
                raise self._failure(rank, f"raised\n{answer['error']}")
            results.append(answer["result"])
        return results

    def _failure(self, rank: int, what: str) -> WorkerError:
        self._logs[rank].seek(0)
        tail = self._logs[rank].read()[-3000:].decode(errors="replace")
        return WorkerError(f"{self.name}: rank {rank} {what}\n{tail}")
