"""Preemption: a notice that the job must end soon, seen by all ranks at the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import nn

from zerofx.comm.world import World
from zerofx.errors import ArgumentError


class Preemption:
    """Tells a training loop that the job has been asked to end, so that it can save and exit.

    torchrun forwards SIGTERM to its ranks when it is asked to end. SLURM and Kubernetes send it
    before they kill a job, and `kill` sends it by default. It reaches ranks at different times, but
    the loop ends at the same step on all of them. A second signal ends the process as usual.

    model: the result of `zerofx.compile`.
    signals: the signals to listen to.

    Raises:
        ArgumentError: the model is not compiled, or this is not the main thread of the process.

    Example:
        preemption = zerofx.Preemption(model)
        for step, batch in enumerate(loader, start=1):
            train(batch)
            if preemption.is_requested():
                zerofx.save("run", model, optimizer, {"step": step}, step=step)
                break
    """

    def __init__(
        self, model: nn.Module, signals: Sequence[signal.Signals] = (signal.SIGTERM,)
    ) -> None:
        own = model.__dict__.get("_zerofx") if isinstance(model, nn.Module) else None
        world = getattr(own, "world", None)
        if not isinstance(world, World):
            raise ArgumentError(
                f"zerofx.Preemption was given a {type(model).__name__} that is not compiled. Give "
                "it the result of zerofx.compile."
            )
        if threading.current_thread() is not threading.main_thread():
            raise ArgumentError(
                "zerofx.Preemption was called in a thread. Python handles signals in the main "
                "thread. Call it there."
            )
        self._world = world
        self._is_here = False
        self._is_known = False
        self._before: dict[int, Any] = {}
        for number in signals:
            self._before[number] = signal.signal(number, self._note)

    def is_requested(self) -> bool:
        """Return whether any rank has been asked to end; the answer is the same on all ranks.

        Call it on all ranks. It launches no collective: ranks read each other's notes, as they do
        before each call of the model.
        """
        if not self._is_known:
            is_well = self._world.all_well("zerofx.Preemption.is_requested", not self._is_here)
            self._is_known = not is_well
        return self._is_known

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_here:  # asked twice
            self.close()
            signal.raise_signal(number)
        self._is_here = True
