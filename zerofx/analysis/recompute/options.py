"""Options of a segment: what to keep, from everything that backward reads to the minimum.

An option is a set of kept values, with the bytes that stay from forward to backward and the time to
recompute the rest. A segment's options are the best known trade-offs between the two. They are
found by an integer program (SciPy's HiGHS) for a series of byte limits or, if SciPy is not
installed, by giving up the cheapest values one after another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from zerofx.analysis.memory.storage import span_bytes
from zerofx.analysis.recompute.activations import is_param_alias, must_keep
from zerofx.analysis.recompute.segments import Segment
from zerofx.ir.graphs import alias_source
from zerofx.ir.meta import Role, info, value

_BESIDE = 0.02  # compute slowdown by a hidden copy, as a fraction of the copy's time
LEVELS = 16  # number of byte limits between the most and the least


@dataclass(frozen=True)
class Option:
    """One way to treat a segment.

    kept: positions (in the segment's order) of the values at which recomputation stops.
    saved: positions of the values that backward then reads; values that enter the segment are -1,
        -2, ...
    offloaded: saved values whose storages are on the host. saved_bytes: bytes of the others.
    """

    kept: frozenset[int]
    saved: frozenset[int]
    offloaded: frozenset[int]
    saved_bytes: int
    offloaded_bytes: int
    recompute_us: float
    copy_us: float

    @property
    def time_us(self) -> float:
        return self.recompute_us + self.copy_us


@dataclass(frozen=True)
class Link:
    """The link to the host.

    copy_us: time of copying a number of bytes one way. least_bytes: minimum size of an offloaded
        storage.
    is_beside: copies overlap compute, so that a segment's forward hides as much copy time as it
        takes itself.
    """

    copy_us: Callable[[int], float]
    least_bytes: int
    is_beside: bool


class Trade:
    """A segment as a problem: which of its values to keep, to recompute, or to offload.

    link: None if nothing may leave the device.
    """

    def __init__(
        self, segment: Segment, cost_us: Callable[[fx.Node], float], link: Link | None = None
    ) -> None:
        self.segment, self.link = segment, link
        self.place = {n: i for i, n in enumerate(segment.nodes)}
        self.place |= {n: -1 - i for i, n in enumerate(segment.entering)}
        self.at = {i: n for n, i in self.place.items()}
        self.cost_us = [cost_us(n) for n in segment.nodes]
        self.needed = [self.place[n] for n in segment.needed]
        self.before = {self.place[n] for n in segment.needed_before if n in self.place}
        self.leaving = frozenset(self.place[n] for n in segment.leaving)
        self.inputs = [
            [self.place[a] for a in n.all_input_nodes if a in self.place and not is_param_alias(a)]
            for n in segment.nodes
        ]
        self.is_tensor = [isinstance(value(n), torch.Tensor) for n in segment.nodes]
        self.is_fixed = [must_keep(n) for n in segment.nodes]
        first: dict[fx.Node, int] = {}
        self.storage = {i: first.setdefault(alias_source(n), i) for n, i in self.place.items()}

    @property
    def numbers(self) -> Hashable:
        """All that the options depend on: equal trades have the same options."""
        storages = sorted(set(self.storage.values()))
        leaving = tuple(self.copy_us(s) if self.may_leave(s) else -1.0 for s in storages)
        link = None if self.link is None else (self.link.is_beside, leaving)
        return (
            tuple(self.cost_us), tuple(self.needed), frozenset(self.before), self.leaving,
            tuple(map(tuple, self.inputs)), tuple(self.is_tensor), tuple(self.is_fixed),
            tuple(sorted(self.storage.items())), tuple(map(self.bytes_of, storages)), link,
        )  # fmt: skip

    def bytes_of(self, storage: int) -> int:
        """Return the bytes of keeping a storage; inputs and buffers are held in any case."""
        node = self.at[storage]
        if info(node).role in (Role.INPUT, Role.BUFFER):
            return 0
        val = value(alias_source(node))
        return span_bytes(val) if isinstance(val, torch.Tensor) else 0

    def may_leave(self, storage: int) -> bool:
        """Return whether a storage may be offloaded: it is large, and internal to the model."""
        if self.link is None or self.bytes_of(storage) < max(self.link.least_bytes, 1):
            return False
        inside = (n for n, i in self.place.items() if self.storage[i] == storage)
        return not any(u.op == "output" for n in inside for u in n.users)

    def copy_us(self, storage: int) -> float:
        """Return the compute time lost by copying a storage to the host and back."""
        assert self.link is not None
        both_ways = 2 * self.link.copy_us(self.bytes_of(storage))
        return both_ways * (_BESIDE if self.link.is_beside else 1.0)

    def evaluate(self, kept: Iterable[int], offloaded: Iterable[int] = ()) -> Option:
        """Return the option of keeping `kept`: the values that backward then reads and recomputes.

        offloaded: storages that are offloaded if they are saved.
        """
        kept = frozenset(kept) | self.leaving
        saved, again = set(self.before), set[int]()
        stack = list(self.needed)
        while stack:
            i = stack.pop()
            if i in saved or i in again:
                continue
            if i < 0 or (self.is_tensor[i] and (i in kept or self.is_fixed[i])):
                saved.add(i)
            else:
                again.add(i)
                stack += self.inputs[i]
        storages = {self.storage[i] for i in saved}
        gone = storages & set(offloaded)
        return Option(
            kept,
            frozenset(saved),
            frozenset(i for i in saved if self.storage[i] in gone),
            sum(self.bytes_of(s) for s in storages - gone),
            sum(self.bytes_of(s) for s in gone),
            sum(self.cost_us[i] for i in again),
            sum(self.copy_us(s) for s in gone),
        )

    def hides(self, storages: Iterable[int]) -> bool:
        """Return whether the segment's forward is as long as copying these storages to the host."""
        if self.link is None or not self.link.is_beside:
            return True
        return sum(self.link.copy_us(self.bytes_of(s)) for s in storages) <= sum(self.cost_us)

    def all_kept(self) -> Option:
        """Return the option that recomputes nothing."""
        return self.evaluate(self.needed)


_KNOWN: OrderedDict[Hashable, list[Option]] = OrderedDict()
_MOST_KNOWN = 256


def options(trade: Trade, levels: int = LEVELS) -> list[Option]:
    """Return the best known options, by descending bytes and ascending time.

    A search asks for the same options again for plans that differ in other fields. The last
    answers are kept.
    """
    key = trade.numbers, levels, has_scipy()
    if key not in _KNOWN:
        _KNOWN[key] = _options(trade, levels)
        while len(_KNOWN) > _MOST_KNOWN:
            _KNOWN.popitem(last=False)
    return list(_KNOWN[key])


def _options(trade: Trade, levels: int) -> list[Option]:
    whole = trade.all_kept()
    if not whole.saved_bytes:
        return [whole]
    found = [whole, trade.evaluate(())]
    if has_scipy():
        return _best([*found, *limited(trade, levels)])
    return _best([*found, *_given_up(trade, whole)])


def _best(found: Iterable[Option]) -> list[Option]:
    """Drop options that another one beats in both bytes and time."""
    kept: list[Option] = []
    for option in sorted(found, key=lambda o: (o.time_us, o.saved_bytes)):
        if not kept or option.saved_bytes < kept[-1].saved_bytes:
            kept.append(option)
    return kept


def hull(found: list[Option]) -> list[Option]:
    """Return the options that no mix of two others beats, for structures with many segments.

    Over many identical segments, any number of bytes is reached by a mix of two adjacent options,
    so only a few kinds of region have to be compiled.
    """
    kept: list[Option] = []
    for option in found:
        while len(kept) > 1 and _is_above(kept[-2], kept[-1], option):
            kept.pop()
        kept.append(option)
    return kept


def _is_above(a: Option, b: Option, c: Option) -> bool:
    """Return whether `b` costs more than the mix of `a` and `c` that frees the same bytes."""
    more, freed = c.time_us - a.time_us, a.saved_bytes - c.saved_bytes
    return (b.time_us - a.time_us) * freed >= more * (a.saved_bytes - b.saved_bytes)


def _given_up(trade: Trade, whole: Option) -> list[Option]:
    """Give up storage after storage, each time the one that frees most bytes per microsecond."""
    found: list[Option] = []
    now = whole
    while True:
        gone = {trade.storage[i] for i in now.offloaded}
        tries = [trade.evaluate(now.kept - group, gone) for group in _by_storage(trade, now)]
        storages = {trade.storage[i] for i in now.saved - now.offloaded}
        leave = [gone | {s} for s in storages if trade.may_leave(s) and trade.hides(gone | {s})]
        tries += [trade.evaluate(now.kept, out) for out in leave]
        tries = [t for t in tries if t.saved_bytes < now.saved_bytes]
        if not tries:
            return found
        current = now

        def worth(option: Option, before: Option = current) -> float:
            added = max(option.time_us - before.time_us, 1e-9)
            return (before.saved_bytes - option.saved_bytes) / added

        now = max(tries, key=worth)
        found.append(now)


def _by_storage(trade: Trade, option: Option) -> list[frozenset[int]]:
    groups: dict[int, set[int]] = {}
    for i in option.saved:
        if i >= 0 and not trade.is_fixed[i] and i not in trade.leaving:
            groups.setdefault(trade.storage[i], set()).add(i)
    return [frozenset(g) for g in groups.values()]


# -- The options of a segment as integer programs: least time to recompute under a limit of bytes
# Variables: k_i, value i is kept; r_i, it is recomputed; b_s, storage s is saved; o_s, it is on
# the host. A needed value is kept or recomputed; a recomputed value has all its inputs kept or
# recomputed; a kept value has its storage saved; an offloaded storage is saved, and its copies are
# hidden. Minimise sum(us_i r_i) + sum(copy_us_s o_s) with sum(bytes_s (b_s - o_s)) under the limit.


NODES = 2000  # of the search tree; a time limit could make ranks differ
_SMALL = 1e-6  # minimum cost in us of a recomputed node, so that none is recomputed needlessly


def has_scipy() -> bool:
    """Return whether the solver is installed (the extra `solver`)."""
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
    """The constraints, built once; each solve sets another limit."""

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
        """Fix variables without a choice: boundary values and random draws are not recomputed."""
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
        rows: list[tuple[float, dict[int, float]]] = []  # (lower bound, factors by variable)
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
        """Return the fastest option within `limit` bytes; without a limit, the smallest of all."""
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
    """Return every value that keeping or recomputing the needed ones may involve."""
    seen, stack = set(trade.before), list(trade.needed)
    while stack:
        v = stack.pop()
        if v not in seen:
            seen.add(v)
            stack += trade.inputs[v] if v >= 0 else []
    return seen
