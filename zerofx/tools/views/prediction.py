"""A prediction as text: whether it fits, the time of a step, and its memory, with ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

from zerofx.analysis.memory.memory import ATEN
from zerofx.analysis.time.forecast import Forecast, Range, available_bytes
from zerofx.analysis.time.pipelines import PipelineForecast
from zerofx.hardware import Hardware
from zerofx.ir.text import as_text
from zerofx.plan.sizes import format_bytes
from zerofx.policy.schedules import FORWARD, WEIGHTS
from zerofx.tools.room import room
from zerofx.tools.views.memory import MemoryView
from zerofx.tools.views.schedule import title
from zerofx.tools.views.timeline import WIDTH, TimelineView, format_rate, format_us
from zerofx.tools.words import counted

LARGEST = 4  # tensors that are listed for a tier that is too small
_MARKS = {FORWARD: "/", WEIGHTS: "+"}


class WayOut(Protocol):
    """The changes that make a plan fit; `plan` is the nearest plan that fits."""

    @property
    def plan(self) -> Any: ...
    def lines(self) -> list[str]: ...
    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class PredictionView:
    """The prediction of a step: print it, or take `to_dict()` for JSON.

    basis: how memory inside regions is counted, "aten" or "compiled".
    seek: finds a plan that fits instead of one that does not; None if the plan is fixed.
    """

    forecast: Forecast
    memory: MemoryView
    basis: str = ATEN
    seek: Callable[[], WayOut] | None = None

    @property
    def fits(self) -> bool:
        """Whether devices, hosts and NVMe have the memory that the step needs."""
        return not self.forecast.shortages

    @property
    def missing_bytes(self) -> dict[str, int]:
        """The bytes that are missing, by tier; empty if the plan fits."""
        return {s.tier: s.missing_bytes for s in self.forecast.shortages}

    @cached_property
    def way_out(self) -> WayOut | None:
        """The nearest plan that fits, searched at the first access; None if this one fits."""
        return self.seek() if self.seek is not None and not self.fits else None

    @property
    def step_us(self) -> float:
        return self.forecast.timeline.step_us

    @property
    def peak_bytes(self) -> int:
        return self.forecast.memory.peak_bytes

    @property
    def timeline(self) -> TimelineView:
        """The lanes of the step over time."""
        return TimelineView(self.title, self.forecast.timeline)

    @property
    def title(self) -> str:
        """Name the program and where it would run."""
        return _title(self.forecast, self.basis)

    def __str__(self) -> str:
        return as_text(self.lines())

    def lines(self) -> list[str]:
        """Return the figures with their ranges, the lanes, and the largest tensors at the peak."""
        return [
            f"# {self.title}", *self._fit(), "", *_table(self.forecast), "",
            *self.timeline.lines()[1:], "", *self.memory.lines(),
        ]  # fmt: skip

    def _fit(self) -> list[str]:
        if self.fits:
            return _fitting(self.forecast.hardware, self.peak_bytes)
        found = []
        for shortage in self.forecast.shortages:
            found.append(f"does not fit: {shortage}")
            found += [f"  {line}" for line in self.memory.largest(shortage.tier, LARGEST)]
        if self.way_out is None:
            return [
                *found,
                "its plan is fixed. Run zerofx search on its model to find one that fits",
            ]
        return [*found, *self.way_out.lines()]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        found = self.forecast
        return {
            "title": self.title,
            **_plain(found, self.basis),
            "way_out": self.way_out.to_dict() if self.way_out is not None else None,
            "memory": self.memory.to_dict(),
            "timeline": found.timeline.to_dict(),
        }


@dataclass(frozen=True)
class BetterCuts:
    """Cuts that make the longest stage shorter, by the predicted times of its units.

    before_us, after_us: compute time of the longest stage in a step.
    """

    cuts: tuple[str, ...]
    before_us: float
    after_us: float


@dataclass(frozen=True)
class PipelineView:
    """The prediction of a pipeline's step: print it, or take `to_dict()` for JSON.

    memories: of a rank of each pipeline stage. units: of each stage, in order. better: None if no
    other cuts gain much. basis: how memory inside regions is counted. seek: finds a plan that fits
    instead of one that does not.
    """

    forecast: PipelineForecast
    memories: tuple[MemoryView, ...]
    units: tuple[tuple[str, ...], ...]
    better: BetterCuts | None = None
    basis: str = ATEN
    seek: Callable[[], WayOut] | None = None

    @property
    def fits(self) -> bool:
        """Whether devices, hosts and NVMe have the memory that the step needs."""
        return not self.forecast.shortages

    @property
    def missing_bytes(self) -> dict[str, int]:
        """The bytes that are missing, by tier and stage; empty if the plan fits."""
        return {s.tier: s.missing_bytes for s in self.forecast.shortages}

    @cached_property
    def way_out(self) -> WayOut | None:
        """The nearest plan that fits, searched at the first access; None if this one fits."""
        return self.seek() if self.seek is not None and not self.fits else None

    @property
    def step_us(self) -> float:
        return self.forecast.step_us.middle

    @property
    def peak_bytes(self) -> int:
        """The peak of a rank of the fullest pipeline stage."""
        return max(memory.peak_bytes for memory in self.memories)

    @property
    def title(self) -> str:
        """Name the model, its schedule, and where it would run."""
        return _title(self.forecast, self.basis)

    def __str__(self) -> str:
        return as_text(self.lines())

    def lines(self) -> list[str]:
        """Return the figures with ranges, the stages, and the memory of the fullest."""
        found = self.forecast
        parallel = found.program.plan.parallel
        num = counted(found.micro_batches, "micro-batch", "micro-batches")
        calls = f" in each of {found.calls} calls" if found.calls > 1 else ""
        stages = counted(len(found.stages), "stage")
        said = f"pipeline of {stages}, {parallel.schedule}, {num}{calls}"
        if parallel.interleave > 1:
            said += f", {parallel.interleave} stages on each rank"
        fit = [f"does not fit: {shortage}" for shortage in found.shortages]
        fit += self.way_out.lines() if self.way_out is not None else []
        return [
            f"# {self.title}", said, *(fit or _fitting(found.hardware, self.peak_bytes)), "",
            *_table(found), "", *self._stages(), "", *self._chart(), "",
            f"memory of pipeline stage {found.fullest}, the fullest:",
            *self.memories[found.fullest].lines()[1:],
        ]  # fmt: skip

    def _stages(self) -> list[str]:
        """Return a line per pipeline stage, and better cuts if there are any."""
        found = self.forecast
        head = ("peak", "forward", "backward", "busy", "idle")
        lines = [f"{'stage':<8}{''.join(f'{name:>12}' for name in head)}   units"]
        for position, times in enumerate(found.times):
            rank = found.rank_of(position)  # which works, and waits, for all of its stages
            cells = (
                format_bytes(self.memories[position].peak_bytes), format_us(times.forward),
                format_us(times.backward), format_us(found.busy_us[rank]),
                f"{found.idle[rank]:.0%}",
            )  # fmt: skip
            row = "".join(f"{cell:>12}" for cell in cells)
            lines.append(f"{position:<8}{row}   {self._units(position)}")
        better = self.better
        if better is not None:
            lines.append(
                f"cuts={list(better.cuts)} would balance better: the longest stage computes "
                f"{format_us(better.after_us)} instead of {format_us(better.before_us)}"
            )
        return lines

    def _chart(self) -> list[str]:
        """Return a line over time per rank: / forward, # backward, = the optimizer's step.

        Of a backward in two parts the second one is +.
        """
        found = self.forecast
        ends = [runs[-1].end_us + end for runs, end in zip(found.runs, found.end_us, strict=True)]
        step = max(ends)
        columns = room(WIDTH, 8, 24)
        which = "a step" if found.calls == 1 else "the step's last call"
        kinds = "/ forward  # backward  = step"
        if found.program.plan.parallel.splits_backward:
            kinds = "/ forward  # gradients of inputs  + gradients of weights  = step"
        lines = [f"{which}: 0 .. {format_us(step)}   {kinds}"]
        for position, runs in enumerate(found.runs):
            bar = ["."] * columns
            marks = [(r.start_us, r.end_us, _MARKS.get(r.action.graph, "#")) for r in runs]
            marks.append((runs[-1].end_us, ends[position], "="))
            for start, end, mark in marks:
                first, last = (round(columns * us / step) for us in (start, end))
                bar[first:last] = mark * (last - first)
            lines.append(f"{position:<8}{''.join(bar)}")
        return lines

    def _units(self, position: int) -> str:
        """Name the first and the last unit of a stage."""
        own = self.units[position]
        return own[0] if len(own) == 1 else f"{own[0]} .. {own[-1]}"

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        found, better = self.forecast, self.better
        return {
            "title": self.title,
            **_plain(found, self.basis),
            "micro_batches": found.micro_batches,
            "idle_us": asdict(found.idle_us),
            "better_cuts": list(better.cuts) if better is not None else None,
            "way_out": self.way_out.to_dict() if self.way_out is not None else None,
            "sent_bytes": found.sent_bytes,
            "stages": [
                {
                    "units": list(self.units[i]), "peak_bytes": memory.peak_bytes,
                    "forward_us": times.forward, "backward_us": times.backward,
                    "end_us": times.end, "busy_us": found.busy_us[found.rank_of(i)],
                    "idle": found.idle[found.rank_of(i)],
                    "memory": memory.to_dict(),
                }
                for i, (times, memory) in enumerate(zip(found.times, self.memories, strict=True))
            ],
            "timeline": [
                [
                    {
                        "action": str(run.action), "stage": run.stage,
                        "start_us": run.start_us, "end_us": run.end_us,
                    }
                    for run in runs
                ]
                for runs in found.runs
            ],
        }  # fmt: skip


# -- Shared by both views --------------------------------------------------------------------------
def _title(found: Forecast | PipelineForecast, basis: str) -> str:
    ranks, hardware = found.program.world_size, found.hardware
    nodes = -(-ranks // hardware.devices_per_node)
    where = f"{hardware.name}, {counted(nodes, 'node')}"
    return title(found.program, basis, where)


def _table(found: Forecast | PipelineForecast) -> list[str]:
    """Return each figure with the ends of its range and its middle."""
    rate = format_rate
    shown: list[tuple[str, Range, Callable[[Any], str]]] = [
        ("peak memory per rank", found.peak_bytes, lambda v: format_bytes(round(v))),
        ("step", found.step_us, format_us),
        ("exposed communication", found.exposed_us, format_us),
    ]
    if isinstance(found, PipelineForecast):
        shown.append(("waiting for other stages", found.idle_us, format_us))
    shown.append(("samples/s", found.samples_per_s, rate))
    if found.tokens:
        shown.append(("tokens/s", found.tokens_per_s, rate))
    shown += [
        ("TFLOPS per device", found.flops_per_s, lambda v: rate(v / 1e12)),
        ("model FLOPS utilisation", found.mfu, "{:.1%}".format),
    ]
    rows = [(name, [write(v) for v in asdict(r).values()]) for name, r, write in shown]
    head = f"{'':<26}{'from':>12}{'predicted':>12}{'to':>12}"
    return [head, *(f"{name:<26}{''.join(f'{t:>12}' for t in texts)}" for name, texts in rows)]


def _fitting(hardware: Hardware, peak_bytes: int) -> list[str]:
    """Return the line of a plan that fits: its peak next to the memory of a device."""
    there = available_bytes(hardware)
    return [
        f"fits: {format_bytes(peak_bytes)} of {format_bytes(there)} per device ({hardware.device})"
    ]


def _plain(found: Forecast | PipelineForecast, basis: str) -> dict[str, Any]:
    """Return the figures of a step as plain values."""
    ranges = {
        "peak_bytes": found.peak_bytes,
        "step_us": found.step_us,
        "exposed_us": found.exposed_us,
        "samples_per_s": found.samples_per_s,
        "tokens_per_s": found.tokens_per_s,
        "flops_per_s": found.flops_per_s,
        "mfu": found.mfu,
    }
    shortages = found.shortages
    return {
        "hardware": found.hardware.name,
        "basis": basis,
        "world_size": found.program.world_size,
        "fits": not shortages,
        "shortages": [{**asdict(s), "missing_bytes": s.missing_bytes} for s in shortages],
        **{name: asdict(r) for name, r in ranges.items()},
        "lane_bytes": {lane.value: n for lane, n in found.lane_bytes().items()},
    }
