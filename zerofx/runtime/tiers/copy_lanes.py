"""Lanes of copies between device and host: a stream each on CUDA, inline on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Mark = Callable[[], None]


class Lane(Protocol):
    """Copies one after another, beside the compute."""

    def copy(self, out: Tensor, source: Tensor, behind: Any, mark: Mark | None = None) -> Any:
        """Launch a copy behind the compute launched so far, and behind an event of a lane.

        mark: called before the copy and behind it, where the lane gets to both.
        Returns what `join` takes, None where the copy has ended already.
        """

    def join(self, event: Any) -> None:
        """Let the compute launched from now on wait for a copy. The host does not wait."""

    def settle(self, event: Any) -> None:
        """Let the host wait for a copy, what it is about to read or overwrite."""


class InlineLane:
    """Copies at the launch.

    A thread would take from the compute the cores and the memory bandwidth that it copies with:
    nothing is gained by it, and a launch would no longer be where its time is spent.
    """

    def copy(self, out: Tensor, source: Tensor, behind: Any, mark: Mark | None = None) -> None:
        if mark:
            mark()
        with torch.no_grad():
            out.copy_(source)
        if mark:
            mark()

    def join(self, event: Any) -> None:
        pass

    def settle(self, event: Any) -> None:
        pass


class StreamLane:
    """Copies on a stream of its own, ordered by events alone.

    The memory of neither side is reused before its copy has ended, although the allocator does not
    know of this stream: the schedule holds the source until `join`, behind which the compute stream
    stands; the destination was last used by what the copy waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, out: Tensor, source: Tensor, behind: Any, mark: Mark | None = None) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if behind is not None:
            self._stream.wait_event(behind)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if mark:
                mark()
            out.copy_(source, non_blocking=True)
            if mark:
                mark()
            return self._stream.record_event()

    def join(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def settle(self, event: Any) -> None:
        event.synchronize()


def lanes_for(device: torch.device) -> tuple[Lane, Lane]:
    """Return the lanes to the host and back from it."""
    if device.type == "cuda":
        return StreamLane(device), StreamLane(device)
    return InlineLane(), InlineLane()
