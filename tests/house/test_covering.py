"""Covering arrays: every combination of the given strength occurs, in few rows."""

from __future__ import annotations

import itertools

import pytest
from covering import covering

FACTORS = {"a": "wxyz", "b": (1, 2, 3), "c": (None, 0.5), "d": (True, False), "e": "pq"}


@pytest.mark.parametrize(("strength", "most"), [(2, 16), (3, 36)])
def test_every_combination_occurs(strength: int, most: int) -> None:
    rows = covering(FACTORS, strength)
    for names in itertools.combinations(FACTORS, strength):
        found = {tuple(row[name] for name in names) for row in rows}
        assert found == set(itertools.product(*(FACTORS[name] for name in names)))
    assert len(rows) <= most < 4 * 3 * 2 * 2 * 2
    assert rows == covering(FACTORS, strength)
