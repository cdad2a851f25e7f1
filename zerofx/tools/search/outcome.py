"""The outcome of a choice, from the figures of two short programs, and of a whole search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from zerofx.analysis.memory.memory import ADAMW_STATE_BYTES, Memory, memory
from zerofx.analysis.memory.standing import with_other_stages
from zerofx.analysis.time.forecast import Forecast, Shortage, available_bytes, forecast
from zerofx.analysis.time.pipelines import (
    STEADY,
    StageTimes,
    of_all,
    paper_step,
    part_of_step,
    steady,
    times_of,
    wire_us,
)
from zerofx.analysis.time.prices import Roofline
from zerofx.analysis.time.steps import Lane
from zerofx.errors import PlanError
from zerofx.hardware import Hardware
from zerofx.ir.program import Loop, Planned, Wire
from zerofx.passes.order import Setting
from zerofx.plan.parts import Parallel
from zerofx.tools.search.family import Family, RankPrograms
from zerofx.tools.search.space import Choice, Space

if TYPE_CHECKING:
    from zerofx.tools.search.reasons import Verdict

# Every further micro-batch adds as much as the last one of this many.
LOOPED = 3
OTHERS = "other stages"  # what ranks of a pipeline wait for, next to their lanes


@dataclass(frozen=True)
class Outcome:
    """Figures of one rank's step for one choice.

    tokens: of one sample, 0 if inputs are no sequences.
    figures: by name; `busy`, `exposed` and `bytes` of a lane follow its name after a colon.
    """

    choice: Choice
    hardware: Hardware
    world_size: int
    tokens: int
    figures: dict[str, float]

    @property
    def step_us(self) -> float:
        return self.figures["step_us"]

    @property
    def peak_bytes(self) -> int:
        return round(self.figures["peak_bytes"])

    @property
    def host_bytes(self) -> int:
        return round(self.figures["host_bytes"])

    @property
    def nvme_bytes(self) -> int:
        return round(self.figures["nvme_bytes"])

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks."""
        choice = self.choice
        ranks = self.world_size // choice.plan.parallel.num_shared  # the others have the same ones
        return 1e6 * choice.samples * choice.accumulation * ranks / self.step_us

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks; 0 if inputs are no sequences."""
        return self.tokens * self.samples_per_s

    def lane(self, what: str) -> dict[str, float]:
        """Return `busy` or `exposed` microseconds, or `bytes`, by lane."""
        start = f"{what}:"
        return {k[len(start) :]: v for k, v in self.figures.items() if k.startswith(start)}

    @cached_property
    def shortages(self) -> tuple[Shortage, ...]:
        """The tiers with too little memory, of one device or of one node."""
        h = self.hardware
        sharing = min(self.world_size, h.devices_per_node)
        host = self.host_bytes + (self.peak_bytes if h.device_type == "cpu" else 0)
        there = available_bytes(h)
        found = (
            Shortage("each device", self.peak_bytes, there),
            Shortage("host memory of a node", host * sharing, h.host_memory_bytes),
            Shortage("nvme of a node", self.nvme_bytes * sharing, h.nvme_bytes),
        )
        return tuple(s for s in found if s.needed_bytes > s.available_bytes)

    @property
    def fits(self) -> bool:
        """Whether devices, hosts and NVMe have the memory that the step needs."""
        return not self.shortages

    @property
    def covered_us(self) -> float:
        """The time of the step without waits for transfers, which better overlap could reach."""
        waits = self.lane("exposed")
        stays = (Lane.HOST.value, OTHERS)
        return self.step_us - sum(us for lane, us in waits.items() if lane not in stays)

    @property
    def missing_bytes(self) -> int:
        return sum(s.missing_bytes for s in self.shortages)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan, the loop and the figures as plain values."""
        loop = {
            "samples": self.choice.samples,
            "accumulation": self.choice.accumulation,
            "no_sync": self.choice.no_sync,
        }
        rates = {"samples_per_s": self.samples_per_s, "tokens_per_s": self.tokens_per_s}
        found = {**rates, **self.figures}
        return {"words": self.choice.words(), **loop, **found, "plan": self.choice.plan.to_dict()}


def outcome(choice: Choice, family: Family, hardware: Hardware, world_size: int) -> Outcome:
    """Run the passes for `choice` on the family's short programs, and extrapolate to all layers.

    Raises:
        ZerofxError: the plan is not valid for this model.
    """
    hardware.check_format(choice.plan.precision.compute)
    if choice.plan.parallel.pipeline > 1:
        figures = _of_pipeline(choice, family, hardware, world_size)
        return Outcome(choice, hardware, world_size, family.tokens, figures)
    setting = Setting(
        choice.plan, world_size, hardware, loop=Loop(choice.accumulation, choice.no_sync)
    )
    programs = family.finished(choice.samples, setting)
    found = [_looped(choice, program, hardware, family.loop) for program in programs]
    if _shrinks(found):
        if family.longer is not None:  # so few layers do not show what many need
            return outcome(choice, family.longer, hardware, world_size)
        raise _unsteady(choice)
    names = dict.fromkeys(name for figures in found for name in figures)
    figures = {n: family.extrapolated(tuple(f.get(n, 0.0) for f in found)) for n in names}
    return Outcome(choice, hardware, world_size, family.tokens, figures)


_TIERS = ("peak_bytes", "host_bytes", "nvme_bytes")


def _shrinks(found: Sequence[Mapping[str, float]]) -> bool:
    """Return whether more layers need less memory of some tier, from the fewest to the most."""
    return any(longer[n] < short[n] for n in _TIERS for short, longer in pairwise(found))


def _unsteady(choice: Choice) -> PlanError:
    return PlanError(
        f"the memory of {choice.words()} does not grow steadily with the number of layers, so that "
        "it cannot be told from a few. Use zerofx predict."
    )


def _looped(
    choice: Choice, finished: Planned, hardware: Hardware, known: Mapping[str, Any]
) -> dict[str, float]:
    """Return a step's figures; many micro-batches are extrapolated from a few."""

    def of(accumulation: int, held: Memory | None = None) -> Forecast:
        finished.loop = Loop(accumulation, choice.no_sync)
        return forecast(finished, hardware, **known, held=held)

    if choice.accumulation <= LOOPED + 1:
        return _figures(of(choice.accumulation))
    found = of(LOOPED)
    few, more = _figures(found), _figures(of(LOOPED + 1, found.memory))  # which it is from 3 on
    left = choice.accumulation - LOOPED
    return {n: v + left * (more.get(n, 0.0) - v) for n, v in few.items()}


def _figures(found: Forecast) -> dict[str, float]:
    step, memory = found.step_us, found.memory
    figures = {
        "step_us": step.middle, "low_us": step.low, "high_us": step.high,
        "peak_bytes": float(memory.peak_bytes), "host_bytes": float(memory.host_bytes),
        "nvme_bytes": float(memory.nvme_bytes), "flops": found.flops,
    }  # fmt: skip
    for what, lanes in (
        ("busy", found.timeline.busy_us),
        ("exposed", found.timeline.exposed_us),
        ("bytes", found.lane_bytes()),
    ):
        figures |= {f"{what}:{lane.value}": float(v) for lane, v in lanes.items() if v}
    return figures


# -- A pipeline: the schedule of all ranks, with the times of one rank of each kind ----------------


def _of_pipeline(
    choice: Choice, family: Family, hardware: Hardware, world_size: int
) -> dict[str, float]:
    """Return the figures of a pipeline's step: times on average over ranks, the most memory."""
    parallel, num = choice.plan.parallel, choice.accumulation
    setting = Setting(choice.plan, world_size, hardware)
    prices = Roofline.of(choice.plan, hardware, world_size)
    size, turns = parallel.pipeline, parallel.interleave
    of_rank: dict[int, dict[str, float]] = {}
    wires: dict[Wire, float] = {}
    for kind in family.ranks(choice.samples, setting, num):
        found = [_of_rank(programs, prices, num, family.loop) for programs in kind.variants]
        if _shrinks(found):
            raise _unsteady(choice)
        names = dict.fromkeys(name for figures in found for name in figures)
        figures = {n: kind.extrapolated(tuple(f.get(n, 0.0) for f in found)) for n in names}
        of_rank |= dict.fromkeys(kind.positions, figures)
        wires |= _wires(kind, parallel, hardware)
    times = []
    for stage in range(size * turns):
        turn, rank = divmod(stage, size)
        figures = {what: of_rank[rank][f"{what}:{turn}"] for what in TIMES}
        times.append(StageTimes(lane_bytes=(), **figures))
    paper = paper_step(parallel, num, times, wires)
    slowest = max(of_rank.values(), key=lambda f: f["alone_us"])
    step = paper.step_us
    total: dict[str, float] = {}
    for rank, figures in sorted(of_rank.items()):
        waits = max(paper.busy_us[rank] - figures["computes"], 0.0)
        exposed = {n: us for n, us in figures.items() if n.startswith("exposed:")}
        share = waits / sum(exposed.values()) if any(exposed.values()) else 0.0
        summed = {n: v for n, v in figures.items() if n.startswith(("busy:", "bytes:", "flops"))}
        summed |= {name: us * share for name, us in exposed.items()}
        for name, value in summed.items():
            total[name] = total.get(name, 0.0) + value / size
    return {
        "step_us": step, "low_us": step * slowest["low_us"] / slowest["alone_us"],
        "high_us": step * slowest["high_us"] / slowest["alone_us"],
        **{n: max(f[n] for f in of_rank.values()) for n in ("peak_bytes", "host_bytes")},
        "nvme_bytes": max(f["nvme_bytes"] for f in of_rank.values()), **total,
        f"exposed:{OTHERS}": step * sum(paper.idle) / size,
    }  # fmt: skip


TIMES = ("forward", "backward", "last_backward", "end", "weights")


def _of_rank(
    programs: tuple[Planned, ...], prices: Roofline, num: int, known: Mapping[str, Any]
) -> dict[str, float]:
    """Return the figures of one rank, which has these stages of a pipeline."""
    with_other_stages(programs)
    figures: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        figures[name] = figures.get(name, 0.0) + value

    for turn, program in enumerate(programs):
        held = memory(
            program,
            known.get("optimizer_bytes", ADAMW_STATE_BYTES),
            keeps_results=known.get("keeps_results", False),
        )
        for name in ("peak_bytes", "host_bytes", "nvme_bytes"):
            figures[name] = max(figures.get(name, 0.0), float(getattr(held, name)))
        found = steady(program, prices, known.get("clips", False))
        times = times_of(found)
        for name in TIMES:
            figures[f"{name}:{turn}"] = getattr(times, name)
        parts: dict[str, list[float]] = {}
        for span in found.spans:
            part, task = part_of_step(span), span.task
            amounts = {"busy": task.us, "bytes": float(task.nbytes)}
            for name, amount in amounts.items():
                parts.setdefault(f"{name}:{task.lane.value}", [0.0] * STEADY)[part] += amount
            parts.setdefault("flops", [0.0] * STEADY)[part] += task.flops
        for name, each in parts.items():
            if any(each):
                add(name, of_all(each, num))
        add("computes", of_all(parts[f"busy:{Lane.COMPUTE.value}"], num))
        for lane, us in found.exposed_us.items():
            if us:
                add(f"exposed:{lane.value}", us)
        add("alone_us", found.step_us)
        add("low_us", found.low_us)
        add("high_us", found.high_us)
    return figures


def _wires(kind: RankPrograms, parallel: Parallel, hardware: Hardware) -> dict[Wire, float]:
    """Return what ranks of a kind send and receive, with the time that it is on its way."""
    found: dict[Wire, float] = {}
    for program in kind.variants[-1]:
        stage = program.stage
        for wire in (w for w in stage.wires if stage.position in (w.source, w.target)):
            us = wire_us(wire, hardware, program.layout)
            for rank in kind.positions:
                ahead = rank - kind.positions[0]
                found[replace(wire, source=wire.source + ahead, target=wire.target + ahead)] = us
    return found


# -- The outcome of a search: the plans that fit, the front of memory against time, the others -----


# Times that differ by less are equal; a plan that saves a smaller share of memory is not on the
# front.
TIE, WORTH = 0.001, 0.01
MIB = 2**20


@dataclass(frozen=True)
class Counts:
    """Numbers of plans: considered, left out by a bound on memory, priced, not valid.

    All others were left out because they could not have been the fastest, or because as many
    more promising ones were priced for their part of the memory.
    """

    considered: int
    too_large: int
    priced: int
    refused: int

    @property
    def too_slow(self) -> int:
        return max(self.considered - self.too_large - self.priced - self.refused, 0)


@dataclass(frozen=True)
class Found:
    """The result of a search. fits: the fastest first. priced: all with figures.

    refusal: the reason why the first invalid plan is not valid. verdicts: on each family of plans
    with the same axes; empty if axes were not searched. least_left_us: if enough plans were priced
    before all others could be left out, what the most promising of these would take at least.
    """

    space: Space
    fits: tuple[Outcome, ...]
    priced: tuple[Outcome, ...]
    counts: Counts
    refusal: str = ""
    verdicts: tuple[Verdict, ...] = ()
    least_left_us: float | None = None

    @cached_property
    def best(self) -> Outcome:
        """The plan with the least memory of the fastest ones."""
        as_fast = [o for o in self.fits if o.step_us <= self.fits[0].step_us * (1 + TIE)]
        return min(as_fast, key=lambda o: (o.peak_bytes // MIB, o.choice.place))

    @cached_property
    def front(self) -> tuple[Outcome, ...]:
        """The plans that fit of which no faster one needs as little memory, the best first."""
        found = [self.best]
        for each in self.fits:
            if each.peak_bytes < found[-1].peak_bytes * (1 - WORTH):
                found.append(each)
        return tuple(found)

    @cached_property
    def runner_up(self) -> Outcome | None:
        """The fastest plan that is slower than the best, or another one if all are as fast."""
        slower = [o for o in self.fits if o.step_us > self.fits[0].step_us * (1 + TIE)]
        others = [o for o in self.fits if o is not self.best]
        return next(iter([*slower, *others]), None)
