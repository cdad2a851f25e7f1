"""A stopwatch for one emitted schedule: the begin and end of each of its calls.

It replaces the schedule's functions during a recording only. It never synchronises: on CUDA it
puts events on the compute stream and reads them at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

import torch

Around = Callable[[str], AbstractContextManager[Any]]
REGION = "region"


class Clock(Protocol):
    """Tells when the device reaches the work that is launched now."""

    def mark(self) -> Any: ...

    def settle(self) -> None:
        """Make every mark readable."""

    def between_us(self, first: Any, second: Any) -> float: ...

    def until_us(self, first: Any, host_ns: int) -> float:
        """Return the time from a mark to one of the host's, by time.perf_counter_ns."""


class HostClock:
    """The host's own clock: on a CPU every call runs at once."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def settle(self) -> None:
        pass

    def between_us(self, first: int, second: int) -> float:
        return (second - first) / 1e3

    until_us = between_us


class CudaClock:
    """Events on the compute stream, whose times are read at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor: tuple[Any, int] | None = None  # an event, and the host's time then

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        anchor = self.mark(), time.perf_counter_ns()  # nothing is before it: it runs at once
        torch.cuda.synchronize(self._device)
        self._anchor = anchor

    def between_us(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) * 1e3

    def until_us(self, first: Any, host_ns: int) -> float:
        assert self._anchor is not None, "read before it was settled"
        event, at_ns = self._anchor
        return self.between_us(first, event) - (at_ns - host_ns) / 1e3


def clock_for(device: torch.device) -> Clock:
    """Return the clock for work on a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(slots=True)
class Run:
    """One run of a schedule's function: (verb, begin, end) of each of its calls, in order.

    host_us: how long the host was in each call. calls_ns, began_ns, ended_ns: when each call, and
        the run, began or ended on the host. wall_ns: when it began, by the clock on the wall.
    """

    graph: str
    began: Any
    wall_ns: int
    ended: Any = None
    calls: list[tuple[str, Any, Any]] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    calls_ns: list[int] = field(default_factory=list)
    began_ns: int = field(default_factory=time.perf_counter_ns)
    ended_ns: int = 0


class Stopwatch:
    """Times the calls that one function of a schedule makes.

    graph: "forward" or "backward". verbs: the engine's calls to time. starts: called before each
        run. done: called with each run, complete or not. names: of the calls in their order, for
        `around`, which returns the context of a call of that name, or None.
    """

    def __init__(
        self,
        graph: str,
        clock: Clock,
        verbs: Sequence[str],
        starts: Callable[[str], None],
        done: Callable[[Run], None],
        names: Sequence[str] = (),
        around: Callable[[], Around | None] = lambda: None,
    ) -> None:
        self.graph = graph
        self._clock, self._starts, self._done = clock, starts, done
        self._verbs = verbs
        self._names, self._around = names, around
        self._run: Run | None = None
        self._within: Around | None = None  # of the current run

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a copy of a schedule's function in which each call is timed."""
        assert isinstance(function, FunctionType), f"{function} is no function of a schedule"
        own = dict(function.__globals__)
        for name in vars(own["regions"]):
            own[name] = self.timed(REGION, own[name])
        if "kernels" in own:
            own["kernels"] = _Watched(own["kernels"], lambda f: self.timed(REGION, f))
        inner = FunctionType(function.__code__, own, function.__name__)
        watched_engines: dict[Any, _Watched] = {}

        def watched(engine: Any, *rest: Any) -> Any:
            rt = watched_engines.get(engine)
            if rt is None:
                rt = watched_engines[engine] = _Watched(engine, lambda f: f)
                for verb in self._verbs:
                    setattr(rt, verb, self.timed(verb, getattr(engine, verb)))
            self._starts(self.graph)
            self._within = self._around()
            self._run = run = Run(self.graph, self._clock.mark(), time.time_ns())
            try:
                return inner(rt, *rest)
            finally:
                run.ended, self._run = self._clock.mark(), None
                run.ended_ns = time.perf_counter_ns()
                self._done(run)

        return watched

    def timed(self, verb: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes its begin and end."""
        mark, now = self._clock.mark, time.perf_counter_ns

        def call(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            assert run is not None, f"{verb} was called outside its schedule"
            host = now()
            began = mark()
            if self._within is None:
                result = function(*args, **kwargs)
            else:
                with self._within(self._names[len(run.calls)]):
                    result = function(*args, **kwargs)
            run.calls.append((verb, began, mark()))
            run.host_us.append((now() - host) / 1e3)
            run.calls_ns.append(host)
            return result

        return call


class _Watched:
    """A proxy of an object that wraps its attributes when they are read."""

    def __init__(self, held: Any, wrap: Callable[[Any], Any]) -> None:
        self._held, self._wrap = held, wrap

    def __getattr__(self, name: str) -> Any:
        return self._wrap(getattr(self._held, name))
