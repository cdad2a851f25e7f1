"""Updates of parameters on the host, next to the compute: one thread, in launch order."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from zerofx.errors import as_sentence
from zerofx.runtime.tiers.beside import Beside

log = logging.getLogger("zerofx")


class HostUpdates:
    """Runs updates on a thread of its own, while the schedule continues.

    There is one thread, so that an optimizer's states and step counts change in the order of the
    schedule. torch's fused kernels use as many threads as they are allowed anyway.

    beside: the recorder of each update, while one records.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._launched: dict[int, Future[None]] = {}  # by bucket
        self.beside: Beside | None = None

    def launch(self, bucket: int, update: Callable[[], None], at_most: int | None = None) -> None:
        """Run an update after those launched before. `join` raises any exception from it.

        at_most: the maximum number of unfinished updates including this one, since each holds
            memory; waits for the others if necessary.
        """
        assert bucket not in self._launched, f"bucket {bucket} has two updates in flight"
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
        """Wait for all launched updates, whether they succeed or fail; `join` reports failures."""
        wait(list(self._launched.values()))

    @property
    def is_idle(self) -> bool:
        """Whether every launched update has been waited for."""
        return not self._launched

    def join(self, bucket: int | None = None) -> None:
        """Wait for a bucket's update, or for all launched ones; raise the first failure."""
        if failures := self._failures(bucket):
            raise failures[0]

    def drain(self) -> None:
        """Wait for all launched updates after an exception, which takes precedence over theirs."""
        for error in self._failures():
            log.error("an update on the host failed as well: %s", as_sentence(error))

    def _failures(self, bucket: int | None = None) -> list[BaseException]:
        if bucket is None:
            launched, self._launched = [*self._launched.values()], {}
        else:
            one = self._launched.pop(bucket, None)
            launched = [] if one is None else [one]
        errors = [future.exception() for future in launched]
        return [error for error in errors if error is not None]


def _run(update: Callable[[], None]) -> None:
    with torch.inference_mode(False), torch.no_grad():  # both modes are per thread
        update()
