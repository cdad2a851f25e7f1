"""How ranks that are about to differ are described: who, what, and the items that differ."""

from __future__ import annotations

import re
from collections.abc import Iterable

from zerofx.runtime.board import Entry


def describe_difference(groups: dict[Entry, list[int]], call: int) -> str:
    """Say which ranks are about to run what; the largest group (rank 0's on a tie) comes last."""
    order = sorted(groups.items(), key=lambda item: (len(item[1]), -min(item[1])))
    (common, majority), odd = order[-1], order[:-1]
    parts = []
    for entry, ranks in odd:
        detail = ""
        if entry.what == common.what:
            detail = f" with {_only_in(entry.digest, common.digest)}"
        parts.append(f"{name_ranks(ranks)} about to run {entry.what} (call {call}){detail}")
    last = f"{name_ranks(majority, 'runs', 'run')} {common.what}"
    if any(entry.what == common.what for entry, _ in odd):
        last += f" with {_only_in(common.digest, odd[0][0].digest)}"
    return (
        f"{', '.join(parts)} while {last}; "
        "every rank must make the same calls in the same order, with the same model and plan"
    )


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
