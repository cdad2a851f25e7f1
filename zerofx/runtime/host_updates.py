"""Updates of parameters on the host, beside the compute: one thread, in the order of launches."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

log = logging.getLogger("zerofx")


class HostUpdates:
    """Runs updates on a thread of its own, so that backward goes on meanwhile.

    One thread: the order in which an optimizer's states and step counts change is that of the
    schedule, and torch's fused kernels use as many threads as they are allowed anyway.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._launched: list[Future[None]] = []

    def launch(self, update: Callable[[], None]) -> None:
        """Run an update behind those launched before. What it raises, `join` raises."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="zerofx-update")
            weakref.finalize(self, self._thread.shutdown, wait=False)
        self._launched.append(self._thread.submit(_run, update))

    def join(self) -> None:
        """Wait for all that was launched; raise the first failure."""
        if failures := self._failures():
            raise failures[0]

    def drain(self) -> None:
        """Wait for all that was launched, behind an exception which is the one to see."""
        for error in self._failures():
            log.error("an update on the host failed as well: %s", error)

    def _failures(self) -> list[BaseException]:
        launched, self._launched = self._launched, []
        errors = [future.exception() for future in launched]
        return [error for error in errors if error is not None]


def _run(update: Callable[[], None]) -> None:
    with torch.inference_mode(False), torch.no_grad():  # both are a thread's own
        update()
