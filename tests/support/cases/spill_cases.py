"""Models whose activations wait on NVMe: what the tests of that share."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from offload_cases import ALL, compiled
from torch import Tensor

import zerofx


def spilling(plan: dict[str, Any], folder: Any, case: str = "gpt") -> zerofx.CompiledModule:
    """Compile a case, all of whose saved values go to NVMe."""
    offload = {"activations": "nvme", "path": str(folder)}
    return compiled(case, {**ALL, "offload": offload, **plan})


class LateLane:
    """Copies that end some time after their launch, on a thread, as a device's do.

    The compute of these tests is the host's: behind `join` it may read what arrives from the host,
    while what goes to the host is under way still.
    """

    num_settled = 0

    def __init__(self, to_host: bool, delay_s: float = 0.001) -> None:
        self.to_host, self.delay_s = to_host, delay_s
        self._thread = ThreadPoolExecutor(1)

    def copy(self, out: Tensor, source: Tensor, behind: Any) -> Future[None]:
        if self.to_host:  # a device's compute would overwrite it behind the copy only
            source = source.clone()

        def late() -> None:
            if behind is not None:
                behind.result()
            time.sleep(self.delay_s)
            with torch.no_grad(), torch.inference_mode(False):
                out.copy_(source)

        return self._thread.submit(late)

    def join(self, event: Future[None]) -> None:
        if not self.to_host:
            event.result()

    def settle(self, event: Future[None]) -> None:
        self.num_settled += 1
        event.result()


def on_late_lanes(model: Any) -> tuple[LateLane, LateLane]:
    """Let a model's copies end late; return the lanes."""
    lanes = LateLane(to_host=True), LateLane(to_host=False)
    model._engine.host._lanes = lanes
    return lanes
