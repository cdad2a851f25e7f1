"""How ranks that are about to differ are described: who, what, and the items that differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from zerofx.runtime.board import Entry


def describe_difference(groups: dict[Entry, list[int]], call: int) -> str:
    """Say which ranks are about to run what; the largest group (rank 0's on a tie) comes last."""
    order = sorted(groups.items(), key=lambda item: (len(item[1]), -min(item[1])))
    (common, majority), odd = order[-1], order[:-1]
    parts = []
    for entry, ranks in odd:
        detail = ""
        if entry.what == common.what:
            detail = f" with {_only_in(_items(entry), _items(common))}"
        parts.append(f"{name_ranks(ranks)} about to run {entry.what} (call {call}){detail}")
    last = f"{name_ranks(majority, 'runs', 'run')} {common.what}"
    if any(entry.what == common.what for entry, _ in odd):
        last += f" with {_only_in(_items(common), _items(odd[0][0]))}"
    return f"{', '.join(parts)} while {last}; {_rule(groups)}"


def describe_graphs(
    groups: dict[Entry, list[int]], call: int, lines_of: Callable[[bytes], list[str]]
) -> str:
    """Say which ranks compute something else from inputs of equal sizes, and what.

    lines_of: the graph behind a hash, one operator a line.
    """
    order = sorted(groups, key=lambda entry: (len(groups[entry]), -min(groups[entry])))
    pairs = [(a, b) for a in order for b in reversed(order) if a.sizes_hash == b.sizes_hash]
    odd, common = next((a, b) for a, b in pairs if a.graph_hash != b.graph_hash)
    mine, theirs = (
        Counter(re.sub(r"%\d+", "%", line) for line in lines_of(entry.graph_hash))
        for entry in (odd, common)
    )
    here, there = (_first(a - b) for a, b in ((mine, theirs), (theirs, mine)))
    return (
        f"{name_ranks(groups[odd])} about to run {odd.what} (call {call}) with {here} while "
        f"{name_ranks(groups[common], 'runs', 'run')} it with {there}, from inputs of equal sizes; "
        "every rank must run the same model in the same mode"
    )


def _first(lines: Counter[str]) -> str:
    """Return the first of the operators that only one of two graphs has, and how many there are."""
    if not lines:
        return "a graph of its own (the same operators, put together differently)"
    more = lines.total() - 1
    return next(iter(lines)).replace("\t", ", ") + (
        f" (and {more} more that differ)" if more else ""
    )


def _items(entry: Entry) -> str:
    return f"{entry.steps};{entry.digest}" if entry.steps else entry.digest


def _rule(groups: dict[Entry, list[int]]) -> str:
    if len({entry.steps for entry in groups}) > 1:
        return (
            "every rank must step its optimizer after the same calls, with the same class and "
            "options"
        )
    return "every rank must make the same calls in the same order, with the same model and plan"


def name_ranks(ranks: Iterable[int], one: str = "is", many: str = "are") -> str:
    """Return "rank 3 is" or "ranks 0, 1, 2 are"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]} {one}"
    if len(names) > 8:
        names = [*names[:7], f"... ({len(names)} in all)"]
    return f"ranks {', '.join(names)} {many}"


def _only_in(digest: str, other: str) -> str:
    """Return the items of `digest` that `other` lacks, the first six."""
    theirs = set(re.split(r"[;\n]", other))
    items = [item.strip() for item in re.split(r"[;\n]", digest) if item not in theirs]
    shown = ", ".join(item for item in items[:6] if item)
    return (shown or "other contents") + (f" and {len(items) - 6} more" if items[6:] else "")
