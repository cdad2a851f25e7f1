"""One process of `benchmarks.gpu` as seen by the command: its answers, or its failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.pool import Group, WorkerError

ROUND_S = 15  # a round of any system takes less
QUIET = {"KINETO_LOG_LEVEL": "99"}


class Budget:
    """The time limit of the whole command."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._end = limit_s, time.monotonic() + limit_s

    def left_s(self) -> float:
        """Return the remaining seconds.

        Raises:
            WorkerError: none remain.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise WorkerError(
                f"not run: --limit {self._limit_s:.0f} s is used up. Choose fewer cases with "
                "--only, or a larger limit"
            )
        return left

    @property
    def is_spent(self) -> bool:
        """Whether no further round should begin: it would be cut short and spoil earlier ones."""
        return time.monotonic() >= self._end - ROUND_S


class Runner:
    """One process, until something in it fails; from then on only its error."""

    def __init__(self, name: str, job: str, args: dict[str, Any], budget: Budget) -> None:
        self.name, self.error = name, None
        self.facts: dict[str, Any] = {}
        self.rounds: dict[str, list[float]] = {}
        self._budget, self._group = budget, None
        self._group = self._try(lambda: self._start(job, args))

    def _start(self, job: str, args: dict[str, Any]) -> Group:
        self._budget.left_s()
        return Group(self.name, f"benchmarks.gpu_jobs:{job}", args, 1, QUIET)

    def ready(self) -> None:
        if self._group is not None:
            self._try(lambda: self._group.ready(self._budget.left_s()))

    def call(self, method: str, **args: Any) -> Any:
        """Return the result of a job's method; None if it, or an earlier call, has failed."""
        if self._group is None:
            return None
        answers = self._try(lambda: self._group.call(method, self._budget.left_s(), **args))
        return None if answers is None else answers[0]

    def ask(self, method: str) -> tuple[Any, str | None]:
        """Return a method's result, or its error, which leaves the process usable."""
        if self._group is None:
            return None, self.error
        try:
            return self._group.call(method, self._budget.left_s())[0], None
        except WorkerError as e:
            return None, str(e)

    def round(self, number: int) -> None:
        for key, value in (self.call("round", number=number) or {}).items():
            self.rounds.setdefault(key, []).append(value)

    def fail(self, error: str) -> None:
        self.error = error
        self.close()

    def close(self) -> None:
        """End the process, which frees its device memory."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _try(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except WorkerError as e:
            self.fail(str(e))
            return None
