"""Timelines: when each task of a step runs on its lane, and what it waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import networkx as nx

from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.tasks import Task

Which = Literal["low_us", "high_us"]
COMMUNICATION = frozenset({Lane.GATHER, Lane.REDUCE, Lane.VALUES})


@dataclass(frozen=True)
class Span:
    """One task's time.

    waited_for: the task whose end let it start: the previous one of its lane, or one that it needs;
        None at the beginning. idle_reason: why its lane was idle before it: the lane waited for, or
        "".
    """

    task: Task
    start_us: float
    end_us: float
    waited_for: int | None = None
    idle_reason: str = ""


@dataclass(frozen=True)
class Timeline:
    """All tasks of one step with their times, at the middle of each price.

    low_us, high_us: the time of the step if every task takes its lower or its upper bound.
    """

    spans: tuple[Span, ...]
    low_us: float
    high_us: float

    @property
    def step_us(self) -> float:
        return max((s.end_us for s in self.spans), default=0.0)

    @cached_property
    def busy_us(self) -> dict[Lane, float]:
        """The busy time of each lane."""
        found = dict.fromkeys(Lane, 0.0)
        for span in self.spans:
            found[span.task.lane] += span.task.us
        return found

    @cached_property
    def exposed_us(self) -> dict[Lane, float]:
        """The time per lane in which the compute lane is idle because of its tasks.

        Each stretch without compute is divided along the chain of tasks that its end waited for, so
        that a gather which waited for a read from NVMe is not counted for both.
        """
        found = dict.fromkeys(Lane, 0.0)
        for start, end, last in self._gaps():
            for lane, us in self._blamed(start, end, last):
                found[lane] += us
        return found

    @property
    def exposed_communication_us(self) -> float:
        """The time in which nothing is computed because a collective is in flight."""
        return sum(self.exposed_us[lane] for lane in COMMUNICATION)

    @property
    def idle(self) -> dict[str, float]:
        """The compute lane's time by activity or cause of idleness."""
        waits = {f"waits: {k.value}": us for k, us in self.exposed_us.items() if us > 0.0}
        return {"computes": self.busy_us[Lane.COMPUTE], **waits}

    def _gaps(self) -> list[tuple[float, float, Span]]:
        """Return (start, end, the span that ended last) for each stretch without compute."""
        found, at = [], 0.0
        for span in self.spans:
            if span.task.lane is not Lane.COMPUTE:
                continue
            if span.start_us > at and span.waited_for is not None:
                found.append((at, span.start_us, self.spans[span.waited_for]))
            at = max(at, span.end_us)
        if self.step_us > at:
            found.append((at, self.step_us, max(self.spans, key=lambda s: s.end_us)))
        return found

    def _blamed(self, start: float, end: float, last: Span) -> list[tuple[Lane, float]]:
        """Divide start..end among the chain of tasks that ends with `last`."""
        found = []
        span: Span | None = last
        while span is not None and end > start:
            begin = max(span.start_us, start)
            found.append((span.task.lane, end - begin))
            end = begin
            span = None if span.waited_for is None else self.spans[span.waited_for]
        return found

    def critical_path(self) -> list[Span]:
        """Return the spans whose times add up to the step; shortening any other gains nothing."""
        graph = nx.DiGraph()
        previous: dict[Lane, int] = {}
        for span in self.spans:
            task = span.task
            before = {*task.needs, *([previous[task.lane]] if task.lane in previous else [])}
            graph.add_node(task.index)
            graph.add_weighted_edges_from((b, task.index, self.spans[b].task.us) for b in before)
            previous[task.lane] = task.index
        ends = [(s.task.index, -1, s.task.us) for s in self.spans]
        graph.add_weighted_edges_from(ends)
        return [self.spans[i] for i in nx.dag_longest_path(graph)[:-1]] if self.spans else []

    def to_dict(self) -> dict[str, Any]:
        """Return every span and their totals, as plain values."""
        spans = [
            {
                **asdict(span.task), "lane": span.task.lane.value, "needs": list(span.task.needs),
                "start_us": span.start_us,
                "end_us": span.end_us, "waited_for": span.waited_for,
                "idle_reason": span.idle_reason,
            }
            for span in self.spans
        ]  # fmt: skip
        return {
            "step_us": self.step_us,
            "low_us": self.low_us,
            "high_us": self.high_us,
            "busy_us": {k.value: us for k, us in self.busy_us.items() if us},
            "exposed_us": {k.value: us for k, us in self.exposed_us.items() if us},
            "critical_path": [span.task.index for span in self.critical_path()],
            "spans": spans,
        }


def timeline(tasks: Sequence[Task]) -> Timeline:
    """Run each lane's tasks in order, each as soon as its needs have ended."""
    return Timeline(tuple(_run(tasks)), _step_us(tasks, "low_us"), _step_us(tasks, "high_us"))


def _step_us(tasks: Sequence[Task], which: Which) -> float:
    """Return when the last task ends if each takes its lower, or its upper, bound."""
    ends: list[float] = []
    free: dict[Lane, float] = {}
    for task in tasks:
        start = max((ends[i] for i in task.needs), default=0.0)
        end = free[task.lane] = max(start, free.get(task.lane, 0.0)) + getattr(task, which)
        ends.append(end)
    return max(ends, default=0.0)


def _run(tasks: Sequence[Task]) -> list[Span]:
    spans: list[Span] = []
    last: dict[Lane, int] = {}
    for task in tasks:
        own = last.get(task.lane)
        before = [*task.needs] if own is None else [own, *task.needs]
        # if two end together, the lane's own comes first: then the lane was not idle
        blocker = max(before, key=lambda i: spans[i].end_us, default=None)
        start = 0.0 if blocker is None else spans[blocker].end_us
        free = 0.0 if own is None else spans[own].end_us
        reason = ""
        if blocker is not None and start > free:
            reason = f"waits for {spans[blocker].task.lane.value}"
        spans.append(Span(task, start, start + task.us, blocker, reason))
        last[task.lane] = task.index
    return spans
