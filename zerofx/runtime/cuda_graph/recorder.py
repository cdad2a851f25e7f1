"""Recorders: the protocol for recording functions for replay, and the recorder of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from zerofx.errors import PlanError

T = TypeVar("T")


class Recorder(Protocol):
    """Protocol for recording functions.

    warm_up: runs a function, so that a later recording finds all one-time setup done.
    capture: records a function without its effects on memory. Returns its results, which every
        replay overwrites, and the replay function. Recordings share one memory pool.
    """

    def warm_up(self, function: Callable[[], T]) -> T: ...
    def capture(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]: ...


class CudaRecorder:
    """Records CUDA graphs of one model on a stream and in a memory pool of its own.

    Random numbers come from the device's default generator. torch advances it with every replay as
    if the same draws were made without a graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # torch frees a pool with its last graph; this graph keeps the pool alive.
        self._anchor = self.capture(lambda: torch.zeros((), device=device))

    def warm_up(self, function: Callable[[], T]) -> T:
        """Run on the recordings' stream, because libraries keep workspaces per stream."""
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
                # A loader's thread may pin memory during the capture.
                capture_error_mode="thread_local",
            ),
        ):
            result = function()
        return result, graph.replay


def check_recordable(num_ranks: int, device: torch.device) -> None:
    """Raise unless a model on this device, in a world of `num_ranks`, can be recorded.

    Raises:
        PlanError: there are several ranks, or the device is not a CUDA device.
    """
    if num_ranks > 1:
        raise PlanError(
            f"Plan.cuda_graph = True needs a single process, but this world has {num_ranks} ranks. "
            "They agree on every launch and watch over it on the host, which a replay skips. Use "
            "cuda_graph=False."
        )
    if device.type != "cuda":
        raise PlanError(
            f"Plan.cuda_graph = True needs a CUDA device, but the model is on {device}. Pass "
            "device= to zerofx.compile, or use cuda_graph=False."
        )
