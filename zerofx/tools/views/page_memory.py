"""The memory under a page's lanes: bytes by category at each step, and what takes most of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerofx.analysis.memory.memory import Memory
from zerofx.analysis.memory.storage import Category, Storage
from zerofx.analysis.time.steps import StepList
from zerofx.tools.views.bars import Track

STORAGES = 3000  # the largest, which are named where the pointer is
APART = (Category.HOST, Category.NVME)


class Texts:
    """Texts by number: layers have theirs alike, and a number is short."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._number: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._number:
            self._number[text] = len(self.texts)
            self.texts.append(text)
        return self._number[text]


def step_times(track: Track, schedule: StepList) -> list[tuple[float, float]]:
    """Return from when to when a track is at each step: a step lasts up to the next one's begin.

    Where a step has no bar of its own, it is where the compute stood before it.
    """
    by_name = {bar.name: bar for bar in track.bars}
    starts, at = [], 0.0
    for step in schedule.steps:
        own = by_name.get(f"{step.name} launch" if step.kind == "launch" else step.name)
        if own is not None and own.kind != "transfer":
            at = max(at, own.start_us)
            starts.append(at)
            at = max(at, own.end_us)
        else:
            starts.append(at)
    return list(zip(starts, [*starts[1:], max(at, track.step_us)], strict=True)) if starts else []


def memory_by_step(schedule: StepList) -> dict[str, Any]:
    """Return the bytes of each category where each step holds most."""
    report = schedule.memory
    times = [_fullest(report, *step.times) for step in schedule.steps]
    curves = {c: _curve(_all(report, c), len(report.curve)) for c in Category}
    shown = {c: [curve[t] for t in times] for c, curve in curves.items()}
    on_device = [c for c in Category if c not in APART and any(shown[c])]
    return {
        "categories": [c.value for c in on_device],
        "bytes": [shown[c] for c in on_device],
        "apart": {c.value: shown[c] for c in APART if any(shown[c])},
    }


def _fullest(report: Memory, first: int, end: int) -> int:
    return max(range(first, end), key=lambda t: report.curve[t])


def _all(report: Memory, category: Category) -> list[Storage]:
    every = (*report.storages, *report.on_host, *report.on_nvme)
    return [s for s in every if s.category is category]


def _curve(storages: Sequence[Storage], end: int) -> list[int]:
    change = [0] * (end + 1)
    for storage in storages:
        change[storage.birth] += storage.nbytes
        change[storage.death + 1] -= storage.nbytes
    curve, held = [], 0
    for step in change[:-1]:
        held += step
        curve.append(held)
    return curve


def largest_storages(schedule: StepList, table: Texts) -> list[list[int]]:
    """Return [name, place, category, bytes, first step, last step] of what takes most memory."""
    report = schedule.memory
    step_at = [0] * (len(report.curve) + 1)
    for step in schedule.steps:
        for t in range(step.times[0], len(step_at)):
            step_at[t] = step.index
            if t >= step.times[1]:
                break
    kinds = list(Category)
    largest = sorted(report.storages, key=lambda s: -s.nbytes)[:STORAGES]
    return [
        [table.number(s.name), table.number(f"{s.where.module or s.where.unit}  {s.where.line}"),
         kinds.index(s.category), s.nbytes, step_at[s.birth], step_at[s.death]]
        for s in largest if s.nbytes
    ]  # fmt: skip
