"""Trade-offs: all segments of a program with their options, and the choice for a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zerofx.analysis.memory.memory import Memory
from zerofx.analysis.recompute.activations import Solved, as_kept, halve
from zerofx.analysis.recompute.options import Link, Option, Trade, hull, options
from zerofx.analysis.recompute.segments import Segment, find_segments
from zerofx.analysis.recompute.solve import solve
from zerofx.analysis.time.prices import Roofline
from zerofx.ir.graphs import alias_source
from zerofx.ir.meta import info
from zerofx.ir.program import BACKWARD, FORWARD, Decision, Planned
from zerofx.plan.sizes import format_bytes

MANY = 4  # from this many identical segments on, only options worth mixing are kept


@dataclass(frozen=True)
class _Part:
    """A segment with its options, the first of which recomputes nothing."""

    segment: Segment
    trade: Trade
    options: list[Option]

    @property
    def given_up(self) -> list[int]:
        return [self.options[0].saved_bytes - o.saved_bytes for o in self.options]


class Tradeoffs:
    """The trade-offs of a joint program, segment by segment; each structure is solved once."""

    def __init__(
        self, captured: Planned, prices: Roofline, link: Link | None = None,
        host_budget_bytes: int | None = None, mixes: bool = True,
    ) -> None:  # fmt: skip
        """Find the options of every segment.

        mixes: identical segments may be treated differently, so that few options each suffice.
        """
        joint = captured.clone()
        self.host_budget_bytes = host_budget_bytes
        known: dict[Hashable, list[Option]] = {}
        self.parts: list[_Part] = []
        segments = find_segments(halve(joint).parts)
        count = Counter(s.structure for s in segments)
        for segment in segments:
            trade = Trade(segment, prices.node_us, link)
            if segment.structure not in known:
                tries = [trade]
                if link is not None and host_budget_bytes is not None:  # in case it is used up
                    tries.append(Trade(segment, prices.node_us))
                best = [options(t) for t in tries]
                if mixes and count[segment.structure] >= MANY:
                    best = [hull(found) for found in best]
                known[segment.structure] = [o for found in best for o in found]
            self.parts.append(_Part(segment, trade, known[segment.structure]))

    def within(self, whole: Memory, budget_bytes: int) -> list[int]:
        """Return an option for each segment that brings a program with everything kept into budget.

        whole: the memory of that program. If no choice suffices, each segment gives up the most.
        """
        order, need = self._needs(whole, budget_bytes)
        picked = self._picked(order, need, may_leave=True)
        if self.host_budget_bytes is None or self._on_host(picked) <= self.host_budget_bytes:
            return picked
        return self._picked(order, need, may_leave=False)

    def of_fraction(self, fraction: float) -> list[int]:
        """Return an option for each segment so that at most a fraction of the bytes is kept.

        Identical segments get the same option. If the fraction is too small, each segment gives up
        the most.
        """
        alike: dict[int, list[int]] = {}  # keyed by their shared list of options
        for i, part in enumerate(self.parts):
            alike.setdefault(id(part.options), []).append(i)
        groups = list(alike.values())
        total = sum(part.options[0].saved_bytes for part in self.parts)
        found = solve(
            [[len(g) * freed for freed in self.parts[g[0]].given_up] for g in groups],
            [[len(g) * o.time_us for o in self.parts[g[0]].options] for g in groups],
            [*[0] * len(groups), total - int(fraction * total)],
        )
        picked = [max(range(len(p.options)), key=p.given_up.__getitem__) for p in self.parts]
        for group, option in zip(groups, found or (), strict=False):
            for i in group:
                picked[i] = option
        return picked

    def _picked(self, order: Sequence[int], need: Sequence[int], may_leave: bool) -> list[int]:
        usable = {
            i: [k for k, o in enumerate(self.parts[i].options) if may_leave or not o.offloaded]
            for i in range(len(self.parts))
        }
        given_up = [[self.parts[i].given_up[k] for k in usable[i]] for i in order]
        times = [[self.parts[i].options[k].time_us for k in usable[i]] for i in order]
        found = solve(given_up, times, need)
        if found is None:
            return [
                max(ks, key=lambda k, part=part: part.given_up[k])  # type: ignore[misc]
                for part, ks in zip(self.parts, usable.values(), strict=True)
            ]
        picked = [0] * len(self.parts)
        for i, option in zip(order, found, strict=True):
            picked[i] = usable[i][option]
        return picked

    def _on_host(self, picked: Sequence[int]) -> int:
        """Return the bytes that are offloaded to the host."""
        pairs = zip(self.parts, picked, strict=True)
        return sum(part.options[option].offloaded_bytes for part, option in pairs)

    def is_least(self, picked: Sequence[int]) -> bool:
        """Return whether nothing is left to give up."""
        least = self._picked((), [1], may_leave=self._on_host(picked) > 0)
        freed = [
            sum(p.given_up[o] for p, o in zip(self.parts, choice, strict=True))
            for choice in (picked, least)
        ]
        return freed[0] >= freed[1]

    def solved(self, picked: Sequence[int], label: str = "auto") -> Solved:
        """Return the values that `split` keeps, and those of them that are offloaded, by name."""
        kept, offloaded = set(), set()
        for part, option in zip(self.parts, picked, strict=True):
            chosen = part.options[option]
            kept |= {as_kept(part.trade.at[i]).name for i in chosen.kept}
            offloaded |= {as_kept(part.trade.at[i]).name for i in chosen.offloaded}
        return Solved(frozenset(kept), frozenset(offloaded), label)

    def decisions(self, picked: Sequence[int], aim: str) -> Iterator[Decision]:
        """Yield the decision on each value that backward reads and its reason; `aim` is its
        goal."""
        for part, option in zip(self.parts, picked, strict=True):
            yield from _explained(part, part.options[option], aim)

    def _needs(self, whole: Memory, budget_bytes: int) -> tuple[list[int], list[int]]:
        """Return the segments in the order of their backward's end, last first, and their needs.

        The j-th number is what the first j segments must give up at the moments at which only these
        hold anything.
        """
        ends, begins = self._windows(whole)
        order = [i for i, part in enumerate(self.parts) if len(part.options) > 1]
        order.sort(key=lambda i: (-begins[i], ends[i]))
        over = np.array(whole.curve) - budget_bytes
        times = np.arange(len(over))
        count = np.zeros(len(over), dtype=np.int64)
        behind = np.ones(len(over), dtype=bool)
        for i in order:  # a moment counts the leading segments that hold their kept values
            behind &= (times > ends[i]) & (times < begins[i])
            count += behind
        need = [max(int(over[count == j].max(initial=0)), 0) for j in range(len(order) + 1)]
        return order, need

    def _windows(self, whole: Memory) -> tuple[list[int], list[int]]:
        """Return the time of each segment's forward end, and that of backward's first read."""
        forward: dict[str, int] = {}
        reads: dict[str, int] = {}
        for time, (graph, node) in enumerate(whole.life.nodes):
            if graph == FORWARD:
                forward[node.name] = time
            elif graph == BACKWARD:
                for source in node.all_input_nodes:
                    reads.setdefault(source.name, time)
        end = len(whole.curve)
        ends, begins = [], []
        for part in self.parts:
            ends.append(max((forward.get(n.name, 0) for n in part.segment.nodes), default=0))
            kept = (part.trade.at[i].name for i in part.options[0].saved)
            begins.append(min((reads.get(name, end) for name in kept), default=end))
        return ends, begins


def solve_fraction(captured: Planned, fraction: float) -> tuple[Solved, tuple[Decision, ...]]:
    """Return the activations that keep at most a fraction of the possible bytes, and why."""
    prices = Roofline.of(captured.plan, captured.hardware, captured.world_size)
    tradeoffs = Tradeoffs(captured, prices, mixes=False)
    picked = tradeoffs.of_fraction(fraction)
    reasons = tradeoffs.decisions(picked, f"keep {fraction:.0%} of all bytes")
    return tradeoffs.solved(picked, str(fraction)), tuple(reasons)


def _explained(part: _Part, chosen: Option, aim: str) -> Iterator[Decision]:
    """Yield a decision for each storage; the first of several values represents the storage."""
    trade, first = part.trade, dict[int, int]()
    for i in sorted(part.options[0].saved | chosen.saved, key=lambda i: (i not in chosen.saved, i)):
        if i >= 0 or i in chosen.offloaded:
            first.setdefault(trade.storage[i], i)
    for storage, i in sorted(first.items(), key=lambda pair: pair[1]):
        node = trade.at[i]
        where, size = info(node), trade.bytes_of(storage)
        choice = "keep" if i in chosen.saved else "recompute"
        yield Decision(
            subject=node.name,
            module=where.module or where.unit,
            line=where.line,
            choice="offload" if i in chosen.offloaded else choice,
            nbytes=size,
            why=_why(part, chosen, i, aim),
        )


def _why(part: _Part, chosen: Option, i: int, aim: str) -> str:
    whole, trade = part.options[0], part.trade
    if i in chosen.offloaded:
        cost = trade.copy_us(trade.storage[i])
        return (
            f"its unit must give up bytes to {aim}; its copies to the host and back cost "
            f"{cost:.1f} us"
        )
    if trade.is_fixed[i]:
        return "drawn at random: it is never drawn again"
    if i in trade.leaving:
        return "it leaves its unit: recomputation starts from it"
    saved = format_bytes(whole.saved_bytes - chosen.saved_bytes)
    if i in chosen.saved:
        gone = {trade.storage[j] for j in chosen.offloaded}
        without = trade.evaluate(chosen.kept - {i} - _views_of(trade, i), gone)
        freed = chosen.saved_bytes - without.saved_bytes
        more = without.recompute_us - chosen.recompute_us
        if chosen is whole and not chosen.recompute_us:
            return f"its unit does not have to give up anything to {aim}"
        return f"recomputing it would free {format_bytes(max(freed, 0))} for {more:.1f} us"
    return (
        f"its unit must give up {saved} to {aim}; what it recomputes takes "
        f"{chosen.recompute_us:.1f} us in all"
    )


def _views_of(trade: Trade, i: int) -> set[int]:
    source = alias_source(trade.at[i])
    return {j for j, n in trade.at.items() if j >= 0 and alias_source(n) is source}
