"""The options of a segment as integer programs: least time to recompute under a limit of bytes.

Variables: k_i, value i is kept; r_i, it is recomputed; b_s, storage s is saved; o_s, it waits on
the host. A needed value is kept or recomputed; what is recomputed has all its inputs kept or
recomputed; a kept value has its storage saved; what leaves is saved, and its copies are hidden.
Minimise sum(us_i r_i) + sum(copy_us_s o_s) with sum(bytes_s (b_s - o_s)) under the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zerofx.analysis.recompute.options import Option, Trade

NODES = 2000  # of the search tree; not seconds, by which ranks could come to differ
_SMALL = 1e-6  # microseconds a recomputed node costs at least, so that none is without reason


def has_scipy() -> bool:
    """Tell whether the solver is installed (the extra `solver`)."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        return False
    return True


def limited(trade: Trade, levels: int) -> list[Option]:
    """Return an option for each of `levels` byte limits between the least and the most."""
    problem = _Problem(trade)
    most = trade.all_kept().saved_bytes
    least = problem.solve(None)
    if least is None:
        return []
    found = [least]
    for level in range(1, levels):
        limit = least.saved_bytes + (most - least.saved_bytes) * level // levels
        option = problem.solve(limit)
        if option is not None:
            found.append(option)
    return found


class _Problem:
    """The constraints, made once; each solve sets another limit."""

    def __init__(self, trade: Trade) -> None:
        self.trade = trade
        self.values = sorted(_ancestors(trade))
        self.storages = sorted({trade.storage[i] for i in self.values})
        n = len(self.values)
        self.keep = {v: k for k, v in enumerate(self.values)}
        self.again = {v: n + k for k, v in enumerate(self.values)}
        self.saved = {s: 2 * n + k for k, s in enumerate(self.storages)}
        self.leaves = {s: 2 * n + len(self.storages) + k for k, s in enumerate(self.storages)}
        self.size = np.array([float(trade.bytes_of(s)) for s in self.storages])
        self._bound()
        self._constrain()

    def _bound(self) -> None:
        """Fix what is no choice: what enters or leaves is not recomputed, nor is what was drawn."""
        trade, upper = self.trade, np.ones(2 * len(self.values) + 2 * len(self.storages))
        for s in self.storages:
            upper[self.leaves[s]] = trade.may_leave(s)
        for v in self.values:
            if v < 0 or trade.is_fixed[v] or v in trade.leaving:
                upper[self.again[v]] = 0
            if v >= 0 and not trade.is_tensor[v]:
                upper[self.keep[v]] = 0
        self.upper = upper
        self.cost = np.zeros(len(upper))
        for v in self.values:
            self.cost[self.again[v]] = _SMALL + (trade.cost_us[v] if v >= 0 else 0.0)
        for s in self.storages:
            if trade.may_leave(s):
                self.cost[self.leaves[s]] = _SMALL + trade.copy_us(s)

    def _constrain(self) -> None:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import lil_matrix

        trade, keep, again = self.trade, self.keep, self.again
        rows: list[tuple[float, dict[int, float]]] = []  # at least so much, of factors by variable
        rows += ((1, {keep[v]: 1, again[v]: 1}) for v in (*trade.needed, *trade.before))
        for v in self.values:
            sources = trade.inputs[v] if v >= 0 else ()
            rows += ((0, {keep[s]: 1, again[s]: 1, again[v]: -1}) for s in sources)
            rows.append((0, {self.saved[trade.storage[v]]: 1, keep[v]: -1}))
        rows += ((0, {self.saved[s]: 1, self.leaves[s]: -1}) for s in self.storages)
        if trade.link is not None and trade.link.is_beside:
            copied = {self.leaves[s]: -trade.link.copy_us(int(n)) for s, n in self._sizes()}
            rows.append((-sum(trade.cost_us), copied))
        matrix = lil_matrix((len(rows), len(self.upper)))
        for i, (_, row) in enumerate(rows):
            for column, factor in row.items():
                matrix[i, column] = factor
        self.rule: Any = LinearConstraint(matrix.tocsr(), lb=np.array([least for least, _ in rows]))

    def _sizes(self) -> Iterator[tuple[int, float]]:
        return zip(self.storages, self.size, strict=True)

    def solve(self, limit: int | None) -> Option | None:
        """Return the quickest option within `limit` bytes; without one the smallest of all."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        bytes_row = np.zeros(len(self.upper))
        bytes_row[2 * len(self.values) :] = [*self.size, *-self.size]
        scale = max(float(self.size.max(initial=0)), 1.0)
        rules = [self.rule]
        cost = bytes_row / scale + self.cost * 1e-9
        if limit is not None:
            rules.append(LinearConstraint(bytes_row[None] / scale, ub=limit / scale))
            cost = self.cost + bytes_row / scale * 1e-6
        found = milp(
            cost,
            integrality=np.ones(len(self.upper)),
            bounds=Bounds(0, self.upper),
            constraints=rules,
            options={"node_limit": NODES, "mip_rel_gap": 1e-3},
        )
        if found.x is None:
            return None
        kept = [v for v in self.values if v >= 0 and found.x[self.keep[v]] > 0.5]
        return self.trade.evaluate(
            kept, [s for s in self.storages if found.x[self.leaves[s]] > 0.5]
        )


def _ancestors(trade: Trade) -> set[int]:
    """Return every value that keeping or recomputing what is needed may touch."""
    seen, stack = set(trade.before), list(trade.needed)
    while stack:
        v = stack.pop()
        if v not in seen:
            seen.add(v)
            stack += trade.inputs[v] if v >= 0 else []
    return seen
