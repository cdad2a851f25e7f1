"""What to say where nothing fits: how much is missing, and the nearest plan that fits."""

from __future__ import annotations

from dataclasses import replace

from zerofx.errors import PlanError
from zerofx.searching.engine import Search, available_bytes
from zerofx.searching.outcome import Outcome, outcome
from zerofx.searching.space import Choice, Space
from zerofx.sizes import format_bytes

TRIED = 40  # plans that are priced to find the nearest one that fits
DOUBLINGS = 7  # of the world, to find one that the closest plan fits


def too_large(search: Search) -> PlanError:
    """Return the error of a search that found nothing: what is missing, and the way out."""
    space = search.space
    where = f"{space.world_size} ranks of {space.hardware.name}"
    least = _least(search)
    lines = [f"search: no plan fits {where}"]
    if space.settled:
        lines[0] += f" with {', '.join(sorted(space.settled))} as given"
    if least is not None:
        lines.append(f"closest is: {least.choice.words()}")
        lines += [f"  {shortage}" for shortage in least.shortages]
    nearest = _nearest(search)
    if nearest is not None:
        changed = _changed(nearest.choice, space)
        said = f"changes {', '.join(changed)}" if changed else "leaves all that as it is"
        lines.append(
            f"the nearest plan that fits {said}: {nearest.choice.words()}; "
            f"{nearest.step_us / 1e3:.0f} ms a step, {format_bytes(nearest.peak_bytes)} a device"
        )
    elif least is not None:
        ranks = _ranks_needed(search, least)
        lines.append(
            f"the closest one fits {ranks} ranks, all of which share its shards"
            if ranks
            else "more ranks do not help the closest one; take devices or nodes with more memory"
        )
    return PlanError("\n".join(lines))


def _least(search: Search) -> Outcome | None:
    """Return the priced plan that misses least; price the one with the least bound as well."""
    choices = sorted(
        search.space.choices(), key=lambda c: (search.bounds.rough(c).peak_bytes, c.place)
    )
    for choice in choices[:TRIED]:
        if search.price(choice) is not None:
            break
    return min(search.priced.values(), key=lambda o: o.missing_bytes, default=None)


def _nearest(search: Search) -> Outcome | None:
    """Return a plan that fits and changes as few of the settled fields as any that was tried."""
    if not search.space.settled:
        return None
    free = replace(search.space, settled=frozenset())
    limit = available_bytes(search.hardware)
    bounded = [(search.bounds.of(c), c) for c in free.choices()]
    could = [(b, c) for b, c in bounded if b.peak_bytes <= limit]
    could.sort(key=lambda e: (len(_changed(e[1], search.space)), e[0].peak_bytes, e[1].place))
    for _, choice in could[:TRIED]:
        found = search.price(choice)
        if found is not None and not found.shortages:
            return found
    return None


def _changed(choice: Choice, space: Space) -> list[str]:
    """Return which settled fields a choice has otherwise."""
    before, after = space.base.to_dict(), choice.plan.to_dict()
    return [f"{n} to {after[n]}" for n in sorted(space.settled) if before[n] != after[n]]


def _ranks_needed(search: Search, least: Outcome) -> int:
    """Return the first doubling of the world which a plan fits, 0 where none does."""
    plan = replace(least.choice.plan, shard_axis_size=None)
    choice = replace(least.choice, plan=plan)
    for doublings in range(1, DOUBLINGS + 1):
        ranks = search.space.world_size << doublings
        if not outcome(choice, search.family, search.hardware, ranks).shortages:
            return ranks
    return 0
