"""zerofx.record: measure a few steps of a compiled model, lane by lane, without synchronising.

    with zerofx.record(model) as recording:
        for x, y in batches[:6]:
            train_step(x, y)
    print(recording)
    recording.save("run.json.gz")

While the block runs, each schedule's functions are replaced by copies of themselves whose calls are
timed (`stopwatch.py`); afterwards the model is as before. On CUDA times are those of events on the
compute stream, else the host's. A collective is measured from its launch to the end of its wait.
Copies, reads and writes of files, and updates on their thread report their own begin and end
(`runtime/tiers/beside.py`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zerofx.analysis.time.measured import Measured, MeasuredMemory
from zerofx.analysis.time.steps import Step, schedule
from zerofx.compat.autograd import is_profiling
from zerofx.errors import RecordingError
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.spec import timed_calls
from zerofx.model.module import CompiledModule
from zerofx.model.programs import Bound
from zerofx.runtime.tiers.beside import Beside
from zerofx.runtime.tiers.host_tier import HostTier
from zerofx.runtime.tiers.host_updates import HostUpdates
from zerofx.tools.record.lanes import hand_out
from zerofx.tools.record.memory import Metering, meter_for
from zerofx.tools.record.steps import UPDATE, RecordedStep, measured
from zerofx.tools.record.stopwatch import Around, Run, Stopwatch, clock_for
from zerofx.tools.views.recording import RecordingView
from zerofx.tools.words import counted

# -- torch.profiler during a recording: the most expensive operators in each call of the schedule


NUM_OPS = 5  # of each call


def profiler_for(device: torch.device) -> Any:
    """Return a profiler of the host, and of the device if it is another one."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=kinds, acc_events=True)


def most_expensive_operators(
    profiler: Any, names: Collection[str]
) -> dict[str, tuple[tuple[str, float], ...]]:
    """Return the most expensive operators of each range of these names: (name, us per run).

    The time of an operator excludes the operators that it called. It is the device's time if the
    operator launched any kernel.
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


# -- zerofx.record: measure a few steps of a compiled model, lane by lane, without synchronising ---


log = logging.getLogger("zerofx")


@contextlib.contextmanager
def record(
    model: CompiledModule, *, warmup: int = 1, profile: bool = False, memory: bool = False
) -> Iterator[RecordingView]:
    """Record the steps that run in the block; the yielded view is filled at its end.

    model: a model that `zerofx.compile` returned. Programs compiled in the block are recorded too.
    warmup: steps left out at the start.
    profile: run torch.profiler too, each call a range of its own, and note the most expensive
        operators of each; this makes everything slower.
    memory: measure the memory of the first step after the warmup, call by call, and leave it out of
        the times; on a CPU torch.profiler runs up to its end. The warmup must include one whole
        step (all micro-batches and the optimizer).

    Raises:
        RecordingError: the model is not compiled by zerofx, replays CUDA graphs, or ran no whole
            step after the warmup (and that of `memory`); or `profile` and `memory` are both set.

    Example:
        with zerofx.record(model, warmup=2) as recording:
            for batch in itertools.islice(loader, 12):
                train(batch)
        recording.save(f"rank{rank}.json.gz")
    """
    recorder = _Recorder(model, warmup, profile, memory)
    found = RecordingView()
    with recorder.running():
        yield found
    found.programs += recorder.results()


def _check(model: Any, warmup: int, profile: bool, memory: bool) -> None:
    if not isinstance(model, CompiledModule):
        raise RecordingError(
            f"record was given a {type(model).__name__} that is not compiled. Pass the model that "
            "zerofx.compile returned."
        )
    if model._zerofx.setting.plan.cuda_graph:
        raise RecordingError(
            "record: Plan(cuda_graph=True) replays whole forwards and backwards, whose calls "
            "cannot be timed. Record with cuda_graph=False."
        )
    if model._zerofx.setting.plan.parallel.splits_backward:
        raise RecordingError(
            "record: Plan.parallel.schedule = 'zero-bubble' runs other micro-batches within a "
            "backward, whose calls are not timed as one. Record with schedule='1f1b'."
        )
    if (memory or profile) and is_profiling():
        what = "memory=True" if memory else "profile=True"
        raise RecordingError(
            f"record: {what} runs torch.profiler, and one is running here already (another such "
            "recording, or your own). End that first."
        )
    if memory and (profile or warmup < 1):
        what = "profile=True" if profile else "warmup=0"
        raise RecordingError(
            f"record: memory=True and {what} exclude each other: "
            + (
                "both run torch.profiler. Record twice."
                if profile
                else "frees of earlier tensors would not be seen. Set warmup=1 or more."
            )
        )


class _Recorder:
    """Wraps a model's programs in stopwatches, and unwraps them again."""

    def __init__(self, model: CompiledModule, warmup: int, profile: bool, memory: bool) -> None:
        _check(model, warmup, profile, memory)
        self._table, self._world = model._zerofx.table, model._zerofx.engine.world
        if self._table.on_bound is not None:
            raise RecordingError(
                "record: an outer block records this model already. Remove one of them."
            )
        self._clock = clock_for(self._world.device)
        self._warmup = warmup
        self._profiler = profiler_for(self._world.device) if profile else None
        self._metering = Metering(meter_for(self._world.device), warmup) if memory else None
        self._schedules: dict[int, tuple[Step, ...]] = {}
        self._steps: list[RecordedStep] = []
        self._before: list[tuple[Bound, Any, Any]] = []
        self._update: list[Any] = []
        self._beside = Beside(self._clock.mark)
        engine = model._zerofx.engine
        self._noting: tuple[HostTier, HostUpdates] = engine.host, engine.store.ledger.pending

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Time every program of the model, and all optimizer steps, during the block."""
        hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._begin_update()),
            register_optimizer_step_post_hook(lambda *_: self._end_update()),
        ]
        for bound in self._table.bound.values():
            self._watch(bound)
        self._table.on_bound = self._watch
        for noting in self._noting:
            noting.beside = self._beside
        try:
            running = None if self._metering is None else self._metering.running()
            with self._profiler or running or contextlib.nullcontext():
                yield
        finally:
            self._table.on_bound = None
            for noting in self._noting:
                noting.beside = None
            for bound, forward, backward in self._before:
                bound.executable.forward, bound.executable.backward = forward, backward
                bound.executable.keeps_form = False
            for hook in hooks:
                hook.remove()
        if self._steps:
            self._steps[-1].close(self._clock.mark())

    def _watch(self, bound: Bound) -> None:
        run = bound.executable
        run.keeps_form = True
        self._before.append((bound, run.forward, run.backward))
        take = partial(self._take, bound.program)
        over = {}
        for graph in (FORWARD, BACKWARD):
            is_named = self._profiler is not None or self._metering is not None
            steps = self._steps_of(bound.program) if is_named else ()
            names = [step.name for step in steps if step.graph == graph]
            over[graph] = Stopwatch(
                graph, self._clock, timed_calls(), self._starting, take, names, self._around
            )
        run.forward = over[FORWARD].over(run.forward)
        if run.backward is not None:
            run.backward = over[BACKWARD].over(run.backward)

    # -- events, in the order of time -----------------------------------------------------------
    def _starting(self, graph: str) -> None:
        if self._metering is not None and graph == FORWARD:
            self._metering.starting(len(self._steps))

    def _around(self) -> Around | None:
        """Return the context for the calls of a run."""
        if self._metering is not None:
            return self._metering.around if self._metering.is_under_way else None
        return None if self._profiler is None else torch.profiler.record_function

    def _take(self, program: Planned, run: Run) -> None:
        """Note a run; a forward ends the step before it and begins a new one."""
        if run.graph == FORWARD:
            if self._steps:
                self._steps[-1].close(run.began)
            self._steps.append(RecordedStep(program))
        if self._steps:
            self._steps[-1].runs.append((program, run))

    def _begin_update(self) -> None:
        if self._metering is not None:
            self._metering.enter(UPDATE)
        self._update = [self._clock.mark(), time.perf_counter_ns()]

    def _end_update(self) -> None:
        if self._metering is not None:
            self._metering.leave()
        if self._steps and self._update:
            began, host = self._update
            now = time.perf_counter_ns()
            self._steps[-1].updates.append((began, self._clock.mark(), (now - host) / 1e3))
            self._steps[-1].update_times.append((host, now))

    # -- results --------------------------------------------------------------------------------
    def results(self) -> list[Measured]:
        """Return the measurement of each program, in the order of their first steps."""
        self._clock.settle()
        _, updates = self._noting
        updates.settle()  # delayed updates run on after the block
        hand_out(self._beside.notes, self._steps)
        steps = self._steps[self._warmup + (self._metering is not None) :]
        if not steps:
            more = "" if self._metering is None else " and one for its memory"
            raise RecordingError(
                f"record: {counted(len(self._steps), 'step')} ran in the block, of which "
                f"warmup={self._warmup}{more} are left out. Run more steps, or lower warmup."
            )
        programs = {id(s.program): s.program for s in steps}
        found = []
        for program in programs.values():
            own, all_steps = [s for s in steps if s.program is program], self._steps_of(program)
            ops = {}
            if self._profiler is not None:
                ops = most_expensive_operators(self._profiler, {s.name for s in all_steps})
            held = self._held(program, all_steps)
            found.append(measured(all_steps, own, self._clock, self._world, ops, held))
        return found

    def _held(self, program: Planned, steps: Sequence[Step]) -> MeasuredMemory | None:
        """Return the memory of a program's metered step, if it had one that ran to its end."""
        if self._metering is None or self._metering.found is None:
            return None
        step, found = self._steps[self._warmup], self._metering.found
        if step.program is not program:
            return None
        graphs = step.own()
        is_whole = BACKWARD in graphs or BACKWARD not in program.graphs
        if not is_whole or any(s.name not in found.held for s in steps if s.graph in graphs):
            log.warning("record: the step whose memory was measured did not run to its end.")
            return None
        return found

    def _steps_of(self, program: Planned) -> tuple[Step, ...]:
        """Return the program's steps, one per call of its functions."""
        if id(program) not in self._schedules:
            self._schedules[id(program)] = schedule(program).steps
        return self._schedules[id(program)]
