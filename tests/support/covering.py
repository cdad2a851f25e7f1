"""Choices that go together: few rows in which every pair or triple of values occurs.

A product of eight factors has thousands of rows, too many to run. Most faults come from one choice,
or from two or three that meet, and these all occur in a covering array of some hundred rows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

TRIES = 40  # candidates of which each row is the best


def covering(factors: Mapping[str, Sequence[Any]], strength: int) -> list[dict[str, Any]]:
    """Return rows, one value per factor, with every combination of `strength` factors' values.

    Greedy: a row starts from a combination that has not occurred and takes the other factors in
    random order, each with the value that adds most; of TRIES such rows the best is kept. The
    same arguments give the same rows.
    """
    rng = random.Random(0)
    groups = list(itertools.combinations(factors, strength))
    missing = {
        tuple(zip(group, values, strict=True)): None
        for group in groups
        for values in itertools.product(*(range(len(factors[name])) for name in group))
    }
    rows = []
    while missing:
        seed = next(iter(missing))
        best = max(
            (_grown(dict(seed), factors, groups, missing, rng) for _ in range(TRIES)),
            key=lambda row: len(_new(row, groups, missing)),
        )
        for each in _new(best, groups, missing):
            del missing[each]
        rows.append({name: factors[name][best[name]] for name in factors})
    return rows


def _grown(
    row: dict[str, int], factors: Any, groups: Any, missing: Any, rng: random.Random
) -> dict[str, int]:
    for name in rng.sample([n for n in factors if n not in row], len(factors) - len(row)):
        values = rng.sample(range(len(factors[name])), len(factors[name]))
        row[name] = max(values, key=lambda v: len(_new({**row, name: v}, groups, missing, name)))
    return row


def _new(row: Mapping[str, int], groups: Any, missing: Any, name: str = "") -> list[Any]:
    """Return the missing combinations that are in a row; with a name, those with its factor."""
    return [
        each
        for group in groups
        if (not name or name in group) and all(n in row for n in group)
        if (each := tuple((n, row[n]) for n in group)) in missing
    ]
