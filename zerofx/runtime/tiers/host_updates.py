"""Updates of parameters on the host, beside the compute: one thread, in the order of launches."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from zerofx.runtime.tiers.beside import Beside

log = logging.getLogger("zerofx")


class HostUpdates:
    """Runs updates on a thread of its own, so that the schedule goes on meanwhile.

    One thread: the order in which an optimizer's states and step counts change is that of the
    schedule, and torch's fused kernels use as many threads as they are allowed anyway.

    beside: what notes each, while one records.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._launched: dict[int, Future[None]] = {}  # by bucket
        self.beside: Beside | None = None

    def launch(self, bucket: int, update: Callable[[], None], at_most: int | None = None) -> None:
        """Run an update behind those launched before. What it raises, `join` raises.

        at_most: how many may be unfinished with it, since each holds memory; waits for the others.
        """
        assert bucket not in self._launched, f"bucket {bucket} is updated twice at a time"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="zerofx-update")
            weakref.finalize(self, self._thread.shutdown, wait=False)
        unfinished = [future for future in self._launched.values() if not future.done()]
        if at_most is not None and len(unfinished) >= at_most:
            wait(unfinished[: len(unfinished) - at_most + 1])
        run = self._noted(bucket, update)
        self._launched[bucket] = self._thread.submit(_run, run)

    def _noted(self, bucket: int, update: Callable[[], None]) -> Callable[[], None]:
        if (beside := self.beside) is None:
            return update
        launched_ns = beside.launched_ns()

        def run() -> None:
            with beside.updating(f"b{bucket}", launched_ns):
                update()

        return run

    def settle(self) -> None:
        """Wait for all that was launched, well or not; `join` tells."""
        wait(list(self._launched.values()))

    @property
    def is_idle(self) -> bool:
        """Whether every update that was launched has been waited for."""
        return not self._launched

    def join(self, bucket: int | None = None) -> None:
        """Wait for a bucket's update, or for all that was launched; raise the first failure."""
        if failures := self._failures(bucket):
            raise failures[0]

    def drain(self) -> None:
        """Wait for all that was launched, behind an exception which is the one to see."""
        for error in self._failures():
            log.error("an update on the host failed as well: %s", error)

    def _failures(self, bucket: int | None = None) -> list[BaseException]:
        if bucket is None:
            launched, self._launched = [*self._launched.values()], {}
        else:
            one = self._launched.pop(bucket, None)
            launched = [] if one is None else [one]
        errors = [future.exception() for future in launched]
        return [error for error in errors if error is not None]


def _run(update: Callable[[], None]) -> None:
    with torch.inference_mode(False), torch.no_grad():  # both are a thread's own
        update()
