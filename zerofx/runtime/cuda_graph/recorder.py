"""Who records functions for replay, and the recorder of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from zerofx.errors import PlanError

T = TypeVar("T")


class Recorder(Protocol):
    """Who records.

    warm_up: runs a function so that a later recording finds everything made that is made once.
    capture: records a function without its effects on memory; returns its results, which every
        replay writes again, and the replay. Recordings share one pool of memory.
    """

    def warm_up(self, function: Callable[[], T]) -> T: ...
    def capture(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]: ...


class CudaRecorder:
    """Records CUDA graphs of one model on a stream and in a memory pool of their own.

    Random numbers come from the device's default generator, which torch advances with every replay
    as the same draws would without one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # torch gives a pool up with its last graph: this one stays.
        self._anchor = self.capture(lambda: torch.zeros((), device=device))

    def warm_up(self, function: Callable[[], T]) -> T:
        """Run on the stream of the recordings: libraries keep workspaces by stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",  # a loader's thread may pin memory meanwhile
            ),
        ):
            result = function()
        return result, graph.replay


def check_recordable(num_ranks: int, device: torch.device) -> None:
    """Raise unless a model on this device, one of so many ranks, can be recorded.

    Raises:
        PlanError: there are several ranks, or it is no CUDA device.
    """
    if num_ranks > 1:
        raise PlanError(
            f"Plan.cuda_graph = True is for a single process, this world has {num_ranks} ranks: "
            "they agree on every launch and watch over it on the host, which a replay leaves out; "
            "use cuda_graph=False"
        )
    if device.type != "cuda":
        raise PlanError(
            f"Plan.cuda_graph = True needs a CUDA device, but the model is on {device}; "
            "pass device= to zerofx.compile, or use cuda_graph=False"
        )
