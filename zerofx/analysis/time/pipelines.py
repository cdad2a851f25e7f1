"""Pipeline forecasts: the schedule of all stages, run on paper with prices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from zerofx.analysis.memory.memory import ADAMW_STATE_BYTES
from zerofx.analysis.memory.standing import with_other_stages
from zerofx.analysis.time.forecast import (
    MEMORY_HIGH,
    MEMORY_LOW,
    Forecast,
    Range,
    Shortage,
    forecast,
    utilisation,
)
from zerofx.analysis.time.prices import Roofline, collective_us
from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.tasks import tasks
from zerofx.analysis.time.timeline import Span, Timeline, timeline
from zerofx.hardware import Hardware
from zerofx.ir.meta import nbytes
from zerofx.ir.program import BACKWARD, FORWARD, Loop, Planned, Wire
from zerofx.layout.buckets import Layout
from zerofx.plan.parts import Parallel
from zerofx.policy import schedules
from zerofx.policy.schedules import INPUT, WEIGHTS, Action

STEADY = 3  # micro-batches needed to price the first, the middle and the last one


@dataclass(frozen=True)
class StageTimes:
    """The times of one pipeline stage by itself, in microseconds.

    forward, backward: of a micro-batch. last_backward: of the one that reduces the gradients.
    weights: of a backward in two parts, the time of the second one.
    end: the time after it: reductions in flight, and the optimizer's step. lane_bytes: the bytes
        that each lane moves in the first micro-batch, in a middle one, and in the last one with the
        step.
    """

    forward: float
    backward: float
    last_backward: float
    end: float
    lane_bytes: tuple[Mapping[Lane, int], ...]
    weights: float = 0.0

    def moved(self, micro_batches: int) -> dict[Lane, int]:
        """Return the bytes that each lane moves in a step."""
        lanes = dict.fromkeys(lane for part in self.lane_bytes for lane in part)
        parts = {lane: [part.get(lane, 0) for part in self.lane_bytes] for lane in lanes}
        return {lane: round(of_all(each, micro_batches)) for lane, each in parts.items()}

    def of(self, action: Action, micro_batches: int) -> float:
        """Return the time of an action."""
        if action.graph == FORWARD:
            return self.forward
        if action.graph == INPUT:
            return self.backward - self.weights
        if action.graph == WEIGHTS:
            is_last = action.micro_batch == micro_batches - 1
            return self.weights + (self.last_backward - self.backward if is_last else 0.0)
        return self.last_backward if action.micro_batch == micro_batches - 1 else self.backward


@dataclass(frozen=True)
class TimedAction:
    """One action of a rank with its time. stage: of the pipeline, whose program runs."""

    action: Action
    stage: int
    start_us: float
    end_us: float


def stage_times(program: Planned, prices: Roofline, clips: bool = False) -> StageTimes:
    """Return the times of a stage's forward, backward and step if all its inputs have arrived."""
    return times_of(steady(program, prices, clips))


def steady(program: Planned, prices: Roofline, clips: bool = False) -> Timeline:
    """Return the timeline of a first, a middle and a last micro-batch, and of the step."""
    looped = replace(program, loop=Loop(STEADY, no_sync=True))
    return timeline(tasks(looped, prices, clips))


def times_of(found: Timeline) -> StageTimes:
    """Return the times of a stage from its `steady` timeline."""
    ends: dict[tuple[str, int], float] = {}
    paused: dict[int, float] = {}
    at = 0.0
    moved: list[Counter[Lane]] = [Counter() for _ in range(STEADY)]
    for span in found.spans:
        moved[part_of_step(span)][span.task.lane] += span.task.nbytes
        if span.task.lane in (Lane.COMPUTE, Lane.HOST):
            key = span.task.graph, _micro(span)
            ends[key] = at = max(at, span.end_us)
            if span.task.kind == "pause":
                paused[_micro(span)] = at
    last = STEADY - 1
    if (BACKWARD, last) not in ends:
        return StageTimes(ends.get((FORWARD, 0), 0.0), 0.0, 0.0, 0.0, (moved[0],) * STEADY)
    return StageTimes(
        forward=ends[FORWARD, 1] - ends[BACKWARD, 0],
        backward=ends[BACKWARD, 1] - ends[FORWARD, 1],
        last_backward=ends[BACKWARD, last] - ends[FORWARD, last],
        end=found.step_us - ends[BACKWARD, last],
        lane_bytes=tuple(moved),
        weights=ends[BACKWARD, 1] - paused.get(1, ends[BACKWARD, 1]),
    )


def part_of_step(span: Span) -> int:
    """Return the micro-batch of a task of a `steady` timeline; the last one has the step's."""
    return _micro(span) if span.task.graph in (FORWARD, BACKWARD) else STEADY - 1


def of_all(parts: Sequence[float], micro_batches: int) -> float:
    """Return a step's amount from that of its first, a middle and its last micro-batch."""
    first, between, last = parts
    return (first if micro_batches > 1 else 0) + max(micro_batches - 2, 0) * between + last


def _micro(span: Span) -> int:
    """Return the micro-batch of a task, from its name; the name of the first one has no number."""
    found = re.search(r" #(\d+)", span.task.name)
    return int(found[1]) if found else 0


def run_on_paper(
    orders: Sequence[Sequence[Action]], times: Sequence[StageTimes], wires: Mapping[Wire, float]
) -> list[list[TimedAction]]:
    """Return when each rank runs its actions: each once the one before it is done, and all that
    it reads has come.

    orders: of each rank. times: of each stage. wires: what travels, with the time that it is on
    its way. What is sent is taken to wait for no receiver: `verify` proves that none waits for
    good.
    """
    size = len(orders)
    micro_batches = 1 + max((a.micro_batch for order in orders for a in order), default=0)
    done: dict[tuple[int, str, int], float] = {}  # (stage, graph, micro-batch) -> when
    found: list[list[TimedAction]] = [[] for _ in orders]
    into: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for wire, us in wires.items():
        us = 0.0 if (wire.source - wire.target) % size == 0 else us
        into.setdefault((wire.target, wire.graph), []).append((wire.source, us))
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while len(found[rank]) < len(order):
                action = order[len(found[rank])]
                stage, number = action.turn * size + rank, action.micro_batch
                before = into.get((stage, action.reads), [])
                if any((source, action.reads, number) not in done for source, _ in before):
                    break
                arrived = [done[source, action.reads, number] + us for source, us in before]
                free = found[rank][-1].end_us if found[rank] else 0.0
                start = max([free, *arrived])
                end = start + times[stage].of(action, micro_batches)
                found[rank].append(TimedAction(action, stage, start, end))
                done[stage, action.reads, number] = end
                moved = True
    assert all(len(f) == len(o) for f, o in zip(found, orders, strict=True)), "the schedule hangs"
    return found


@dataclass(frozen=True)
class PaperStep:
    """A pipeline's step on paper: when each rank works, and when it waits for others.

    times: of each stage. runs: the actions of each rank in one call, with their times; with an
    interleaved schedule a rank has several stages. calls: of a step.
    """

    times: tuple[StageTimes, ...]
    runs: tuple[tuple[TimedAction, ...], ...] = field(repr=False)
    calls: int = 1

    @cached_property
    def end_us(self) -> tuple[float, ...]:
        """What each rank does after its last action: of each of its stages, one by one."""
        size = len(self.runs)
        return tuple(sum(t.end for t in self.times[rank::size]) for rank in range(size))

    @cached_property
    def ends_us(self) -> tuple[float, ...]:
        """When each rank has ended its step."""
        before = (self.calls - 1) * max(runs[-1].end_us for runs in self.runs)
        pairs = zip(self.runs, self.end_us, strict=True)
        return tuple(before + runs[-1].end_us + end for runs, end in pairs)

    @cached_property
    def busy_us(self) -> tuple[float, ...]:
        """What each rank works in a step, the optimizer's step with it."""
        pairs = zip(self.runs, self.end_us, strict=True)
        works = ((sum(r.end_us - r.start_us for r in runs), end) for runs, end in pairs)
        return tuple(self.calls * each + end for each, end in works)

    @property
    def step_us(self) -> float:
        return max(self.ends_us)

    @property
    def idle(self) -> tuple[float, ...]:
        """The share of the step in which each rank waits for others."""
        step = self.step_us
        return tuple(1 - busy / step if step else 0.0 for busy in self.busy_us)


def paper_step(
    parallel: Parallel, micro_batches: int, times: Sequence[StageTimes],
    wires: Mapping[Wire, float], calls: int = 1, is_training: bool = True,
) -> PaperStep:  # fmt: skip
    """Run a step of the plan's schedule on paper, with the times of all stages."""
    size, turns = parallel.pipeline, parallel.interleave
    orders = schedules.orders(parallel.schedule, size, micro_batches, turns)
    if not is_training:
        orders = [tuple(Action(FORWARD, 0, turn) for turn in range(turns))] * size
    runs = run_on_paper(orders, times, wires)
    return PaperStep(tuple(times), tuple(map(tuple, runs)), calls)


@dataclass(frozen=True)
class PipelineForecast:
    """A step of all stages of a pipeline: the memory of each, and when each runs.

    stages: the forecast of each stage's program by itself, as if it waited for no other.
    micro_batches: of a call.
    """

    stages: tuple[Forecast, ...]
    paper: PaperStep
    micro_batches: int

    @property
    def times(self) -> tuple[StageTimes, ...]:
        """What each stage takes of a step."""
        return self.paper.times

    @property
    def runs(self) -> tuple[tuple[TimedAction, ...], ...]:
        """The actions of each rank in one call, with their times."""
        return self.paper.runs

    @property
    def calls(self) -> int:
        """The calls of a step."""
        return self.paper.calls

    @property
    def program(self) -> Planned:
        """The first stage's program; plan, world and hardware are the same for all."""
        return self.stages[0].program

    @property
    def hardware(self) -> Hardware:
        return self.stages[0].hardware

    @property
    def fullest(self) -> int:
        """The position of the stage with the highest peak memory."""
        return max(range(len(self.stages)), key=lambda i: self.stages[i].memory.peak_bytes)

    @property
    def samples(self) -> int:
        return self.stages[0].samples

    @property
    def tokens(self) -> int:
        return self.stages[0].tokens

    def rank_of(self, stage: int) -> int:
        """Return the position of the ranks that have a stage."""
        return stage % len(self.runs)

    @property
    def end_us(self) -> tuple[float, ...]:
        """What each rank does after its last action."""
        return self.paper.end_us

    @property
    def busy_us(self) -> tuple[float, ...]:
        """What each rank works in a step."""
        return self.paper.busy_us

    @property
    def idle(self) -> tuple[float, ...]:
        """The share of the step in which each rank waits for others."""
        return self.paper.idle

    @property
    def step_us(self) -> Range:
        """The step, with the relative bounds of the slowest stage's own tasks."""
        slowest = max(self.stages, key=lambda f: f.step_us.middle).step_us
        return self._like(slowest, self.paper.step_us)

    @property
    def idle_us(self) -> Range:
        """What ranks wait for others in a step, on average."""
        waits = self.paper.step_us * sum(self.idle) / len(self.runs)
        return self._like(self.step_us, waits)

    @staticmethod
    def _like(bounds: Range, middle: float) -> Range:
        if not bounds.middle:
            return Range(middle, middle, middle)
        low, high = bounds.low / bounds.middle, bounds.high / bounds.middle
        return Range(low * middle, middle, high * middle)

    @property
    def exposed_us(self) -> Range:
        """Exposed communication within a stage, overlapped by no compute: of the worst stage."""
        return max((f.exposed_us for f in self.stages), key=lambda found: found.middle)

    @property
    def peak_bytes(self) -> Range:
        peak = self.stages[self.fullest].memory.peak_bytes
        return Range(MEMORY_LOW * peak, peak, MEMORY_HIGH * peak)

    @property
    def _flops(self) -> float:
        """The operations of a step, on average over the ranks."""
        return sum(f.flops for f in self.stages) / len(self.runs)

    @property
    def samples_per_s(self) -> Range:
        return self.step_us.inverse(self._of_all(self.samples))

    @property
    def tokens_per_s(self) -> Range:
        return self.step_us.inverse(self._of_all(self.tokens))

    def _of_all(self, of_one: int) -> float:
        ranks = self.program.layout.mesh.num_data_ranks
        return 1e6 * of_one * self.program.loop.accumulation * ranks

    @property
    def flops_per_s(self) -> Range:
        """Operations a second and device, recomputed ones included, on average over the ranks."""
        return self.step_us.inverse(1e6 * self._flops)

    @property
    def mfu(self) -> Range:
        """The fraction of `peak_flops_per_s` that the model's own operations reach."""
        model = sum(f.model_flops for f in self.stages) / len(self.runs)
        programs = [f.program for f in self.stages]
        return utilisation(self.step_us, model, programs, self.hardware)

    @property
    def shortages(self) -> tuple[Shortage, ...]:
        """The tiers that are too small for their content; for each, the stage that lacks most."""
        worst: dict[str, Shortage] = {}
        for position, found in enumerate(self.stages):
            for each in found.shortages:
                named = replace(each, tier=f"{each.tier} of pipeline stage {position}")
                known = worst.get(each.tier)
                if known is None or named.missing_bytes > known.missing_bytes:
                    worst[each.tier] = named
        return tuple(worst.values())

    def lane_bytes(self) -> dict[Lane, int]:
        """Return the bytes that each lane moves in a step, of the rank that moves most on it."""
        found: dict[Lane, int] = {}
        for rank in range(len(self.runs)):
            own = Counter[Lane]()
            for times in self.times[rank :: len(self.runs)]:
                own.update(times.moved(self.program.loop.accumulation))
            for lane, moved in own.items():
                if lane not in (Lane.COMPUTE, Lane.HOST) and moved:
                    found[lane] = max(found.get(lane, 0), moved)
        return found

    @property
    def sent_bytes(self) -> int:
        """The most bytes that a rank sends to other stages in a step."""
        wires = self.program.stage.wires
        each = Counter[int]()
        for wire in wires:
            if (wire.source - wire.target) % len(self.runs):
                each[self.rank_of(wire.source)] += nbytes(wire.value)
        return self.program.loop.accumulation * max(each.values(), default=0)


def pipeline_forecast(
    programs: Sequence[Planned],
    hardware: Hardware,
    clips: bool = False,
    optimizer_bytes: int = ADAMW_STATE_BYTES,
    keeps_results: bool = False,
    compiled: Sequence[Any] | None = None,
) -> PipelineForecast:
    """Predict the memory and time of a pipeline's step; arguments are those of `forecast`.

    programs: the programs of all stages, in order, each of one micro-batch.
    """
    parallel, layout = programs[0].plan.parallel, programs[0].layout
    num = schedules.expected_micro_batches(parallel.micro_batches, parallel.pipeline)
    for rank in range(parallel.pipeline):
        with_other_stages(programs[rank :: parallel.pipeline])
    each = compiled or [None] * len(programs)
    stages = tuple(
        forecast(program, hardware, clips, optimizer_bytes, keeps_results, regions)
        for program, regions in zip(programs, each, strict=True)
    )
    times = [stage_times(p, Roofline.of(p.plan, hardware, p.world_size), clips) for p in programs]
    wires = {w: wire_us(w, hardware, layout) for w in programs[0].stage.wires}
    calls = max(1, programs[0].loop.accumulation // num)
    is_training = BACKWARD in programs[0].graphs
    paper = paper_step(parallel, num, times, wires, calls, is_training)
    return PipelineForecast(stages, paper, num)


def wire_us(wire: Wire, hardware: Hardware, layout: Layout) -> float:
    """Return how long a value is on its way between the ranks of two stages."""
    size = layout.pipeline_size
    stride = layout.mesh.stride("pipeline") * abs(wire.target % size - wire.source % size)
    if not stride:  # two stages of one rank
        return 0.0
    # each of two ranks that gather receives as much from the other
    return collective_us(hardware, "all_gather", 2 * nbytes(wire.value), 2, stride)
