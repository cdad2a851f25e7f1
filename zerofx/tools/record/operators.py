"""torch.profiler during a recording: the most expensive operators in each call of the schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch

NUM_OPS = 5  # of each call


def profiler_for(device: torch.device) -> Any:
    """Return a profiler of the host, and of the device where it is not the host."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=kinds, acc_events=True)


def dearest_operators(
    profiler: Any, names: Collection[str]
) -> dict[str, tuple[tuple[str, float], ...]]:
    """Return, for each range of these names, its operators that took most: (name, us a run).

    An operator's time is its own, without that of those which it called: the device's time where it
    launched any.
    """
    sums: dict[str, dict[str, float]] = {}
    runs: dict[str, int] = defaultdict(int)
    for event in profiler.events():
        if event.name in names and not event.is_async:
            runs[event.name] += 1
            _add(event, sums.setdefault(event.name, defaultdict(float)))
    return {
        name: tuple(
            (op, us / runs[name])
            for op, us in sorted(by_op.items(), key=lambda kv: -kv[1])[:NUM_OPS]
        )
        for name, by_op in sums.items()
    }


def _add(event: Any, sums: dict[str, float]) -> None:
    """Add the own times of all operators below an event."""
    for child in event.cpu_children:
        sums[child.name] += child.self_device_time_total or child.self_cpu_time_total
        _add(child, sums)
