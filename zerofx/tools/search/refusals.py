"""What to say where nothing fits: how much is missing, and the nearest plan that fits."""

from __future__ import annotations

from dataclasses import replace

from zerofx.errors import PlanError
from zerofx.tools.search.engine import Search
from zerofx.tools.search.nearest import (
    Nearest,
    differing,
    more_ranks,
    nearest,
    ranks_needed,
    written,
)
from zerofx.tools.search.outcome import Outcome

TRIED = 40  # plans that are priced to find the nearest one that fits


def too_large(search: Search) -> PlanError:
    """Return the error of a search that found nothing: what is missing, and the suggestion."""
    space = search.space
    where = f"{space.world_size} ranks of {space.hardware.name}"
    search.says(
        f"nothing fits {where}: looking for what misses least, and the nearest that fits", False
    )
    least = _least(search)
    if least is None and search.refused:
        return PlanError(f"search: no plan can be: {next(iter(search.refused.values()))}")
    lines = [f"search: no plan fits {where}"]
    if space.settled:
        lines[0] += f" with {', '.join(sorted(space.settled))} as given"
    if least is not None:
        lines.append(f"closest is: {least.choice.words()}")
        lines += [f"  {shortage}" for shortage in least.shortages]
    found = _nearest(search)
    if found is not None:
        lines.append(written(found))
    elif least is not None:
        lines.append(more_ranks(ranks_needed(search, least)))
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


def _nearest(search: Search) -> Nearest | None:
    """Return a plan that fits and changes as few of the settled fields as any that was tried."""
    space = search.space
    if not space.settled:
        return None
    free = replace(space, settled=frozenset())
    return nearest(
        search, list(free.choices()), lambda c: differing(space.base, c, space.settled), TRIED
    )
