"""The nearest plan that fits: the fastest of those with the fewest changes, of the plans tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerofx.analysis.time.forecast import available_bytes
from zerofx.plan.plan import Plan
from zerofx.plan.sizes import format_bytes
from zerofx.tools.search.engine import Search
from zerofx.tools.search.outcome import Outcome, outcome
from zerofx.tools.search.space import Choice
from zerofx.tools.views.timeline import format_us
from zerofx.tools.words import counted

FIRST = 6  # plans with the least memory for one number of changes, priced until one fits
FASTER = 6  # plans priced after one fits, to find a faster one with as many changes
DOUBLINGS = 7  # of the world, to find one that a plan fits

# The changes of a choice: each field with its new value.
Changes = Callable[[Choice], dict[str, Any]]


@dataclass(frozen=True)
class Nearest:
    """A plan that fits, and the fields that it changes with their new values."""

    outcome: Outcome
    changed: dict[str, Any]


def differing(plan: Plan, choice: Choice, names: Iterable[str]) -> dict[str, Any]:
    """Return the named fields that differ between `plan` and a choice."""
    before, after = plan.to_dict(), choice.plan.to_dict()
    return {name: after[name] for name in sorted(names) if before[name] != after[name]}


def written(found: Nearest) -> str:
    """Return a line with the changes of the nearest plan, and its time and memory."""
    each = found.outcome
    changed = ", ".join(f"{name} to {value}" for name, value in found.changed.items())
    said = f"changes {changed}" if changed else "changes none of the given fields"
    return (
        f"the nearest plan that fits {said}: {each.choice.words()}; "
        f"{format_us(each.step_us)} per step, {format_bytes(each.peak_bytes)} per device"
    )


def nearest(
    search: Search, choices: Sequence[Choice], changes: Changes, most: int
) -> Nearest | None:
    """Return the plan of `choices` that fits with the fewest changes, None if none tried fits.

    At most `most` plans are priced, those with fewer changes first.
    """
    limit, start = available_bytes(search.hardware), len(search.priced)
    by_number: dict[int, list[Choice]] = {}
    for choice in choices:
        if search.bounds.rough(choice).peak_bytes <= limit:
            by_number.setdefault(len(changes(choice)), []).append(choice)
    for number in sorted(by_number):
        left = most - (len(search.priced) - start)
        if left <= 0:
            return None
        if _any_fits(search, by_number[number], min(left, FIRST)):
            search.fastest_within(limit, by_number[number], min(left, FASTER))
            fits = [o for c in by_number[number] if (o := search.priced.get(c)) and o.fits]
            found = min(fits, key=lambda o: (o.step_us, o.choice.place))
            return Nearest(found, changes(found.choice))
    return None


def _any_fits(search: Search, choices: Sequence[Choice], most: int) -> bool:
    """Price the choices with the least bounds on memory until one fits, at most `most` of them."""
    limit = available_bytes(search.hardware)
    bounded = [(b.peak_bytes, c) for c in choices if (b := search.exactly(c)) is not None]
    could = sorted((each for each in bounded if each[0] <= limit), key=lambda e: (e[0], e[1].place))
    prices = (search.price(choice) for _, choice in could[:most])
    return any(found.fits for found in prices if found is not None)


def more_ranks(ranks: int) -> str:
    """Return advice on the number of ranks for the closest plan, from `ranks_needed`."""
    if ranks:
        return f"it fits {counted(ranks, 'rank')} that all share its shards"
    return "more ranks do not help. Use devices or nodes with more memory"


def ranks_needed(search: Search, closest: Outcome) -> int:
    """Return the first doubling of the world that a plan fits, 0 if none does."""
    plan = replace(closest.choice.plan, shard_axis_size=None)
    choice = replace(closest.choice, plan=plan)
    for doublings in range(1, DOUBLINGS + 1):
        ranks = search.space.world_size << doublings
        if outcome(choice, search.family, search.hardware, ranks).fits:
            return ranks
    return 0
