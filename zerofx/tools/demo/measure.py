"""Measure live tensor bytes at the peak of a step, from the events of torch's own allocator."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zerofx.tools.record.blocks import NEVER, Levels, replay

STEP = "measured step"


@dataclass(frozen=True)
class Peak:
    """Peak of one step. The two differ only by blocks that another thread freed unseen:

    low_bytes counts those not at all, high_bytes until their addresses are used again.
    left_low_bytes, left_high_bytes: what is left when the step has ended.
    """

    low_bytes: int
    high_bytes: int
    left_low_bytes: int
    left_high_bytes: int


class PeakMemory:
    """High-water mark of live tensor bytes within each `step()`, over all tensors of the process.

    Enter it before the model is made: the CPU allocator reports only blocks it saw allocated. Run
    one step or more before the measured ones, so that what lives on (optimizer states) is made.
    On CUDA the caching allocator's own peak is taken.

    steps: the peak of each measured step, in order, once the context is closed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[Peak] = []
        self._profile = profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cpu":
            self._profile.start()
        return self

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark a step to be measured."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        with record_function(STEP):
            yield
        if self.device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self.device)
            left_bytes = torch.cuda.memory_allocated(self.device)
            self.steps.append(Peak(peak_bytes, peak_bytes, left_bytes, left_bytes))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type == "cpu":
            self._profile.stop()
            if error is None:
                self.steps = peaks(self._events())

    def _events(self) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return json.loads(path.read_text())["traceEvents"]


def peaks(events: list[dict[str, Any]]) -> list[Peak]:
    """Return the peak of each measured step of a profiler trace (trace-event JSON)."""
    memory = [
        (e["ts"], e["args"]["Addr"], e["args"]["Bytes"])
        for e in events
        if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0
    ]
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == STEP)
    if not steps:
        return []
    blocks = replay(sorted(memory, key=lambda m: m[0]))
    for b in blocks:  # in a steady state nothing that a step allocates outlives the run
        b.is_ghost |= b.made_at >= steps[0][0] and b.freed_at == NEVER
    sure = Levels([b for b in blocks if not b.is_ghost], 0.0)
    unsure = Levels(blocks, 0.0)
    return [
        Peak(sure.most(*s), unsure.most(*s), sure.most(s[1], s[1]), unsure.most(s[1], s[1]))
        for s in steps
    ]
