"""Measured memory of one step: live tensor bytes, call by call.

On CUDA the peak of the caching allocator is read around each call, without a synchronisation. The
CPU's allocator has no such count, so torch.profiler records every allocation, and that step is left
out of the times. Tensors that exist before the step are found among Python's objects.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zerofx.analysis.time.measured import MeasuredMemory
from zerofx.compat.autograd import is_profiling
from zerofx.compat.tensors import raw_grad
from zerofx.errors import RecordingError
from zerofx.tools.record.blocks import Levels, most_of, replay

_PLAIN = torch.Tensor.__torch_dispatch__
_BEGIN, _END = "zerofx: memory from here", "zerofx: memory up to here"


class MemoryMeter(Protocol):
    """Measures the memory of one step: `start`, some steps, `begin`, that step, `end`."""

    def start(self) -> None:
        """Begin to watch: allocations from here on may be freed in the measured step."""

    def begin(self) -> None: ...

    def around(self, name: str) -> AbstractContextManager[Any]:
        """Return the context in which a call of that step runs."""

    def end(self) -> MeasuredMemory: ...

    def stop(self) -> None:
        """Stop watching after an exception has ended the block."""


def meter_for(device: torch.device) -> MemoryMeter:
    """Return the memory meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else HostMeter()


class Metering:
    """The step of a recording whose memory is measured. found: set once it has ended.

    step: its number, from 0 on.
    """

    def __init__(self, meter: MemoryMeter, step: int) -> None:
        self._meter, self._step = meter, step
        self.is_under_way = False
        self._entered: AbstractContextManager[Any] | None = None
        self.found: MeasuredMemory | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch during the block; a step that ends with an exception is not measured."""
        self._meter.start()
        try:
            yield
            self._end()
        finally:
            self._meter.stop()

    def starting(self, step: int) -> None:
        """Begin or end measuring, before the step of this number starts."""
        self._end()
        if step == self._step:
            self._meter.begin()
            self.is_under_way = True

    def _end(self) -> None:
        if self.is_under_way:
            self.is_under_way = False
            self.found = self._meter.end()

    def around(self, name: str) -> AbstractContextManager[Any]:
        """Return the context in which a call runs."""
        return self._meter.around(name) if self.is_under_way else nullcontext()

    def enter(self, name: str) -> None:
        """Begin a call, which `leave` ends."""
        self._entered = self.around(name)
        self._entered.__enter__()

    def leave(self) -> None:
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None


class CudaMeter:
    """Reads and resets the caching allocator's peak around each call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, int] = {}
        self._peak_bytes = 0

    def start(self) -> None:
        pass

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def _take(self) -> int:
        """Return the peak since the last call of this."""
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak_bytes = max(self._peak_bytes, most)
        return most

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        self._take()
        yield
        self._held[name] = self._take()

    def end(self) -> MeasuredMemory:
        self._take()
        return MeasuredMemory(self._peak_bytes, self._held)

    def stop(self) -> None:
        pass


class HostMeter:
    """Replays every allocation of a step, starting with the tensors that exist at its begin.

    A block that another thread freed unseen is recognised by its absence at the end; the time of
    its free is unknown.
    """

    def __init__(self) -> None:
        self._profile = profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self._held_bytes = 0
        self._is_running = False

    def start(self) -> None:
        self._profile.start()
        self._is_running = True

    def _check(self) -> None:
        """Refuse to go on after another profiler or another thread has ended this one."""
        if not is_profiling():
            raise RecordingError(
                "record: memory=True has lost its torch.profiler: another one ran within the "
                "block, or this step runs on another thread. Remove the other profiler, or enter "
                "the block on the thread of the loop."
            )

    def begin(self) -> None:
        gc.collect()  # so that the step frees no garbage of earlier ones
        self._held_bytes = sum(living().values())
        with record_function(_BEGIN):
            pass

    def around(self, name: str) -> AbstractContextManager[Any]:
        return record_function(name)

    def stop(self) -> None:
        if self._is_running and is_profiling():  # else it was stopped by another
            self._is_running = False
            self._profile.stop()

    def end(self) -> MeasuredMemory:
        self._check()
        with record_function(_END):
            pass
        alive = living()
        self.stop()
        events = self._events()
        memory = sorted(
            (e["ts"], e["args"]["Addr"], e["args"]["Bytes"])
            for e in events
            if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0
        )
        if not memory:
            raise RecordingError(
                "record: memory=True has seen no allocation: another torch.profiler was started "
                "within the block. Remove it."
            )
        ranges = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events
                  if e.get("cat") == "user_annotation"]  # fmt: skip
        begin = next(start for name, start, _ in ranges if name == _BEGIN)
        end = next(start for name, start, _ in ranges if name == _END)
        blocks = replay(m for m in memory if m[0] <= end)
        for block in blocks:
            block.is_ghost |= block.freed_at > end and block.address not in alive
        sure = Levels((b for b in blocks if not b.is_ghost), begin, self._held_bytes)
        unsure = Levels(blocks, begin, self._held_bytes)
        calls = [r for r in ranges if begin <= r[1] <= end and r[0] not in (_BEGIN, _END)]
        peak_bytes = sure.most(begin, end)
        return MeasuredMemory(
            peak_bytes, most_of(sure, calls), unsure.most(begin, end) - peak_bytes
        )

    def _events(self) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return list(json.loads(path.read_text())["traceEvents"])


def living() -> dict[int, int]:
    """Return the live storages of torch's CPU allocator: address -> bytes."""
    found = {}
    for tensor in gc.get_objects():
        kind = type(tensor)
        if not issubclass(kind, torch.Tensor) or kind.__torch_dispatch__ is not _PLAIN:
            continue  # a wrapper of tensors has no storage
        for each in (tensor, raw_grad.__get__(tensor) if tensor.is_leaf else None):
            if each is None or each.layout is not torch.strided or each.device.type != "cpu":
                continue
            storage = each.untyped_storage()
            # memory that is not torch's own (maps, numpy) cannot be resized by it
            if storage.device.type == "cpu" and storage.resizable() and storage.data_ptr():
                found[storage.data_ptr()] = storage.nbytes()
    return found
