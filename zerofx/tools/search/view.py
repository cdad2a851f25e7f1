"""The result of a search as text: the front of memory against time, and why the next one lost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zerofx.plan.plan import Plan
from zerofx.plan.sizes import format_bytes
from zerofx.tools.search.outcome import TIE, Found, Outcome
from zerofx.tools.search.reasons import reasons
from zerofx.tools.views.timeline import format_rate, format_us
from zerofx.tools.words import counted

LEAST_SHARE = 0.002  # of a step: smaller differences of a lane are not listed


@dataclass(frozen=True)
class SearchView:
    """The result of a search: print it, take `plan`, or `to_dict()` for JSON.

    notes: changes of the arguments.
    """

    found: Found
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Outcome:
        return self.found.best

    @property
    def plan(self) -> Plan:
        """The fastest plan, as `zerofx.compile` takes it."""
        return self.best.choice.plan

    def __str__(self) -> str:
        space, counts = self.found.space, self.found.counts
        lines = [
            f"{counted(space.world_size, 'rank')} of {space.hardware.name}, "
            f"{counted(space.global_samples, 'sample')} per step, in "
            f"{space.base.precision.compute}; memory: regions as ATen",
            f"{counted(counts.considered, 'plan')} considered: {counts.too_large} too large by a "
            f"bound, {counts.too_slow} too slow by a bound, {counts.priced} priced, "
            f"{counts.refused} not valid",
            *([f"the first that is not valid: {self.found.refusal}"] if counts.refused else []),
            *self._left,
            *self._without_outputs,
            *self.notes,
            "",
            f"{'step':>10} {self._rate:>10} {'device':>10} {'host':>10}  plan",
        ]
        lines += [_row(each) for each in self.found.front]
        if self.found.runner_up is not None:
            lines += ["", f"next: {_row(self.found.runner_up).strip()}"]
            lines += [f"  {why}" for why in why_slower(self.found.runner_up, self.best)]
        lines += _not_fitting(self.found)
        if self.reasons:
            lines += ["", *self.reasons]
        return "\n".join(lines)

    @property
    def _without_outputs(self) -> list[str]:
        """What a model no longer returns, if the search has decided so."""
        if self.plan.outputs == self.found.space.base.outputs:
            return []
        return ["outputs: loss (other results are not returned; --set outputs=all keeps them)"]

    @property
    def _left(self) -> list[str]:
        """What was not looked at, if the search ended before all others could be left out."""
        if self.found.least_left_us is None:
            return []
        return [
            "not all of the others can be left out: one of them may take "
            f"{format_us(self.found.least_left_us)}. Settle some fields (plan={{...}}, --plan) to "
            "look at fewer"
        ]

    @cached_property
    def reasons(self) -> list[str]:
        """Why the plan has its axes, and why it has no others, with the figures compared."""
        if not self.found.verdicts:
            return []
        return reasons(self.best, self.found.priced, self.found.verdicts)

    @property
    def _rate(self) -> str:
        return "tokens/s" if self.best.tokens else "samples/s"

    def to_dict(self) -> dict[str, Any]:
        """Return the front, the runner-up and the counts as plain values."""
        second = self.found.runner_up
        counts = self.found.counts
        return {
            "hardware": self.found.space.hardware.name,
            "world_size": self.found.space.world_size,
            "global_samples": self.found.space.global_samples,
            "notes": list(self.notes),
            "considered": counts.considered, "too_large": counts.too_large,
            "too_slow": counts.too_slow, "priced": counts.priced, "refused": counts.refused,
            "refusal": self.found.refusal,
            "least_left_us": self.found.least_left_us,
            "best": self.best.to_dict(),
            "front": [each.to_dict() for each in self.found.front],
            "runner_up": None if second is None else second.to_dict(),
            "why": [] if second is None else why_slower(second, self.best),
            "reasons": self.reasons,
            "families": [
                {
                    "axes": v.name, "why": v.why, "said": v.said,
                    "best": None if v.best is None else v.best.to_dict(),
                }
                for v in self.found.verdicts
            ],
        }  # fmt: skip

    def to_yaml(self) -> str:
        """Return the fastest plan as a file for `zerofx.compile`, with its loop in comments."""
        choice = self.best.choice
        if choice.plan.parallel.pipeline > 1:
            loop = (
                f"calls of {counted(choice.samples * choice.accumulation, 'sample')} per data rank "
                f"and step, which run as {choice.accumulation} micro-batches"
            )
            return self._written(loop)
        batches = counted(choice.accumulation, "micro-batch", "micro-batches")
        loop = f"{batches} of {counted(choice.samples, 'sample')} per rank"
        syncs = ", all but the last under no_sync" if choice.no_sync else ""
        return self._written(f"{loop} and step{syncs}")

    def _written(self, loop: str) -> str:
        """Return the file with the loop that the plan is for."""
        best, space = self.best, self.found.space
        lines = [
            f"# The fastest plan found for {counted(space.world_size, 'rank')} of "
            f"{space.hardware.name}.",
            f"# The loop: {loop}.",
            f"# Predicted: {format_us(best.step_us)} per step, {_rate(best)} {self._rate}, "
            f"{format_bytes(best.peak_bytes)} per device.",
            *(f"# {line}" for line in self.reasons),
        ]
        return "\n".join(lines) + "\n" + best.choice.plan.to_yaml()


def _rate(each: Outcome) -> str:
    """Return tokens per second of all ranks, or samples if there are no tokens."""
    rate = each.tokens_per_s if each.tokens else each.samples_per_s
    return format_rate(rate)


def _row(each: Outcome) -> str:
    host = format_bytes(each.host_bytes) if each.host_bytes else "-"
    return (
        f"{format_us(each.step_us):>10} {_rate(each):>10} "
        f"{format_bytes(each.peak_bytes):>10} {host:>10}  {each.choice.words()}"
    )


def why_slower(slower: Outcome, best: Outcome) -> list[str]:
    """Return the lanes on which a plan spends more time than the best, the most first."""
    lost = []
    mine, others = _times(slower), _times(best)
    for lane in dict.fromkeys((*mine, *others)):
        more = mine.get(lane, 0.0) - others.get(lane, 0.0)
        if abs(more) > LEAST_SHARE * best.step_us:
            lost.append((more, lane))
    lost.sort(reverse=True)
    moved, before = slower.lane("bytes"), best.lane("bytes")
    lines = []
    for more, lane in lost:
        name = lane.removeprefix("waits: ")
        extra = moved.get(name, 0.0) - before.get(name, 0.0)
        sent = f", {format_bytes(round(abs(extra)))} {'more' if extra > 0 else 'less'}"
        lines.append(
            f"{format_us(abs(more))} {'more' if more > 0 else 'less'}: {lane}"
            + (sent if name != lane and extra else "")
        )
    return lines or ["no lane differs by more than noise: both take the same time"]


def _times(each: Outcome) -> dict[str, float]:
    """Return the time of compute, and that for which it waits for each other lane."""
    waits = {f"waits: {lane}": us for lane, us in each.lane("exposed").items()}
    return {"compute": each.lane("busy").get("compute", 0.0), **waits}


def _not_fitting(found: Found) -> list[str]:
    """Return lines on the fastest priced plan that does not fit, if it is faster than the best."""
    best_us = found.best.step_us
    faster = [o for o in found.priced if o.shortages and o.step_us < best_us * (1 - TIE)]
    if not faster:
        return []
    first = min(faster, key=lambda o: (o.step_us, o.choice.place))
    gain = format_us(best_us - first.step_us)
    lines = ["", f"{gain} faster, but does not fit: {first.choice.words()}"]
    return [*lines, *(f"  {shortage}" for shortage in first.shortages)]
