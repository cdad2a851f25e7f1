"""The reasons of a search: which axes pay for a model on some hardware, and why the others do not.

Every sentence compares figures of plans that were priced; a family of plans of which none was
priced is described by its bounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerofx.analysis.time.forecast import available_bytes
from zerofx.analysis.time.steps import Lane
from zerofx.plan.parts import Parallel
from zerofx.plan.sizes import format_bytes
from zerofx.tools.search.bounds import Bound
from zerofx.tools.search.outcome import OTHERS, Outcome
from zerofx.tools.search.space import Choice, Space
from zerofx.tools.views.timeline import format_us

NAMES = {
    (): "ZeRO alone",
    ("tensor",): "tensor",
    ("context",): "context",
    ("pipeline",): "pipeline",
    ("pipeline", "tensor"): "pipeline x tensor",
}


@dataclass(frozen=True)
class Verdict:
    """What became of the plans with the same axes.

    name: of the axes. best: the fastest priced plan that fits, or None. why: "chosen", "memory",
        "refused", "bound", or the cause of the longer time: "bubble", "network", "compute",
        "launches" or "copies". said: a sentence with the figures.
    """

    name: str
    best: Outcome | None
    why: str
    said: str


def family_of(parallel: Parallel) -> str:
    """Return the name of a plan's axes, whatever their sizes."""
    axes = tuple(parallel.axes)
    return NAMES.get(axes, " x ".join(axes))


def verdicts(
    space: Space, best: Outcome, priced: Iterable[Outcome], bounded: dict[Choice, Bound],
    refused: dict[Choice, str],
) -> tuple[Verdict, ...]:  # fmt: skip
    """Return a verdict on each family of plans, in the order in which they were considered."""
    outcomes = list(priced)
    found = []
    for name in dict.fromkeys(family_of(p) for p in space.parallels()):
        own = [o for o in outcomes if family_of(o.choice.plan.parallel) == name]
        bounds = {c: b for c, b in bounded.items() if family_of(c.plan.parallel) == name}
        said = [text for c, text in refused.items() if family_of(c.plan.parallel) == name]
        found.append(_verdict(name, best, own, bounds, said))
    return tuple(found)


def _verdict(
    name: str, best: Outcome, priced: list[Outcome], bounds: dict[Choice, Bound],
    refused: list[str],
) -> Verdict:  # fmt: skip
    fits = sorted((o for o in priced if o.fits), key=lambda o: (o.step_us, o.choice.place))
    if best in fits:
        return Verdict(name, best, "chosen", f"{name}: {best.choice.words()}: chosen.")
    if fits:
        why, said = why_slower_than(fits[0], best)
        return Verdict(name, fits[0], why, f"{name} does not pay: {said}")
    there = available_bytes(best.hardware)
    peaks = [float(o.peak_bytes) for o in priced] or [b.peak_bytes for b in bounds.values()]
    could = [b for b in bounds.values() if b.peak_bytes <= there]
    if could and not priced:
        bound = min(could, key=lambda b: b.step_us)
        waits = f", of which ranks wait {format_us(bound.idle_us)}" if bound.idle_us else ""
        return Verdict(
            name, None, "bubble" if bound.idle_us else "bound",
            f"{name} cannot pay: every plan that may fit takes {format_us(bound.step_us)} or more"
            f"{waits}, and the best takes {format_us(best.step_us)}.",
        )  # fmt: skip
    if peaks:
        return Verdict(
            name, None, "memory",
            f"{name} does not fit: of its plans that were tried the least needs "
            f"{format_bytes(round(min(peaks)))} per device, and {format_bytes(there)} are there.",
        )  # fmt: skip
    said = refused[0] if refused else "the global batch cannot be divided among its ranks"
    return Verdict(name, None, "refused", f"{name} is not possible: {said}.")


def losses(slower: Outcome, best: Outcome) -> dict[str, float]:
    """Return the microseconds that a plan takes more than another, by cause."""

    def spent(each: Outcome) -> dict[str, float]:
        waits = each.lane("exposed")
        bubble, launches = waits.get(OTHERS, 0.0), waits.get(Lane.HOST.value, 0.0)
        network = sum(waits.get(lane, 0.0) for lane in NETWORK)
        compute = each.lane("busy").get(Lane.COMPUTE.value, 0.0)
        other = each.step_us - bubble - launches - network - compute
        return {
            "compute": compute, "network": network, "bubble": bubble, "launches": launches,
            "copies": other,
        }  # fmt: skip

    mine, others = spent(slower), spent(best)
    return {cause: mine[cause] - others[cause] for cause in mine}


NETWORK = (Lane.GATHER.value, Lane.REDUCE.value, Lane.VALUES.value)
CAUSES = {
    "compute": "computes for",
    "network": "waits for transfers between ranks",
    "bubble": "waits for other pipeline stages",
    "launches": "waits for launches by the host",
    "copies": "waits for copies to and from the host",
}


def why_slower_than(slower: Outcome, best: Outcome) -> tuple[str, str]:
    """Return the largest cause of a plan's longer time, and a sentence with the figures."""
    found = losses(slower, best)
    cause = max(found, key=lambda name: found[name])
    more = format_us(found[cause])
    where = _where(slower, best, cause)
    return cause, (
        f"its best plan ({slower.choice.words()}) takes {format_us(slower.step_us)} per step, "
        f"against {format_us(best.step_us)}; it {CAUSES[cause]} {more} more{where}."
    )


def _where(slower: Outcome, best: Outcome, cause: str) -> str:
    """Return which transfers are waited for, with the bytes that both plans send."""
    if cause != "network":
        return ""
    mine, others = slower.lane("exposed"), best.lane("exposed")
    lane = max(NETWORK, key=lambda name: mine.get(name, 0.0) - others.get(name, 0.0))
    sent, before = slower.lane("bytes").get(lane, 0.0), best.lane("bytes").get(lane, 0.0)
    return f" ({lane}: {format_bytes(round(sent))} per rank, against {format_bytes(round(before))})"


def reasons(best: Outcome, priced: Iterable[Outcome], found: Iterable[Verdict]) -> list[str]:
    """Return in sentences why the best plan has its axes, and why it has no others."""
    lines = []
    outcomes = [o for o in priced if o.fits]
    parallel = best.choice.plan.parallel
    for axis, size in parallel.axes.items():
        without = [o for o in outcomes if getattr(o.choice.plan.parallel, axis) == 1]
        if not without:
            there = format_bytes(available_bytes(best.hardware))
            lines.append(
                f"{axis} = {size} is needed: no plan that was tried without it fits in {there} "
                "per device."
            )
            continue
        other = min(without, key=lambda o: (o.step_us, o.choice.place))
        _, said = why_slower_than(other, best)
        lines.append(f"{axis} = {size} pays: without it, {said}")
    lines += [v.said for v in found if v.why != "chosen"]
    return lines
