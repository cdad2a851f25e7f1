"""Repeats: identical layers, found as runs of a sequence that repeat one after another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

CANDIDATES = 12  # later occurrences of a first line that are tried as the next layer
WORTH = 4  # lines that a repeat must save to justify its two frame lines


@dataclass(frozen=True)
class Repeat:
    """`count` equal runs of `period` lines each, the first at line `start`."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count


def find_repeats(keys: Sequence[Hashable], may_start: Sequence[bool]) -> list[Repeat]:
    """Return the repeats of `keys` in order, greedily choosing the longest one from each line on.

    may_start: lines at which a run may begin, so that a run is a layer rather than the second
        half of one and the first half of the next.
    """
    numbers: dict[Hashable, int] = {}
    line = np.array([numbers.setdefault(k, len(numbers)) for k in keys], dtype=np.int64)
    later: dict[int, list[int]] = {}
    for i in range(len(line) - 1, -1, -1):
        if may_start[i]:
            later.setdefault(int(line[i]), []).append(i)
    found: list[Repeat] = []
    at = 0
    while at < len(line):
        best = _best_at(line, at, later[int(line[at])]) if may_start[at] else None
        if best is None:
            at += 1
        else:
            found.append(best)
            at = best.end
    return found


def _best_at(line: np.ndarray, at: int, occurrences: list[int]) -> Repeat | None:
    """Return the repeat at `at` that covers most lines; `occurrences` are in descending order."""
    while occurrences and occurrences[-1] <= at:
        occurrences.pop()
    best: Repeat | None = None
    for other in occurrences[: -CANDIDATES - 1 : -1]:
        period = other - at
        if other + period > len(line) or not np.array_equal(
            line[at:other], line[other : other + period]
        ):
            continue
        differs = np.flatnonzero(line[at:-period] != line[other:])
        alike = int(differs[0]) if len(differs) else len(line) - other
        found = Repeat(at, period, 1 + alike // period)
        if best is None or found.period * found.count > best.period * best.count:
            best = found
    if best is None or (best.count - 1) * best.period < WORTH:
        return None
    return best


Layers = Sequence[tuple[object, ...]]


@dataclass(frozen=True)
class Row:
    """One line of a text that may be collapsed.

    label: the owner of the line (a unit); a layer may begin where it changes.
    key: equal for corresponding lines of two identical layers.
    volatile: values that differ from layer to layer (bucket, slot), shown as ranges if they do.
    is_main: the line determines its layer (compute); others may belong to the next one (a
        prefetch).
    write: the line's text for given volatile values; only called for lines that are shown.
    """

    label: str
    key: Hashable
    write: Callable[[Layers], str]
    volatile: tuple[object, ...] = ()
    is_main: bool = True


def collapse(rows: Sequence[Row], indent: str = "    ", is_on: bool = True) -> list[str]:
    """Return the rows' texts, with only the first of identical layers, framed by `layer k, xN`."""
    starts = [i == 0 or rows[i].label != rows[i - 1].label for i in range(len(rows))]
    repeats = find_repeats([r.key for r in rows], starts) if is_on else []
    lines: list[str] = []
    at = 0
    for repeat in [*repeats, Repeat(len(rows), 0, 0)]:
        lines += [_write(rows[i : i + 1]) for i in range(at, repeat.start)]
        if repeat.count:
            lines += _layer(rows, repeat, indent)
        at = repeat.end
    return lines


def _layer(rows: Sequence[Row], repeat: Repeat, indent: str) -> list[str]:
    last = repeat.end - repeat.period
    block = rows[repeat.start : repeat.start + repeat.period]
    numbered = [i for i, row in enumerate(block) if is_numbered(row.label)] or [0]
    named = next((i for i in numbered if block[i].is_main), numbered[0])
    first, final = rows[repeat.start + named].label, rows[last + named].label
    where = f": {first} to {final}, the first written out" if first != final else ""
    inner = range(repeat.start, repeat.start + repeat.period)
    lines = [_write(rows[i : repeat.end : repeat.period]) for i in inner]
    head = f"{indent}# layer k, x{repeat.count}{where}"
    return [head, *lines, f"{indent}# end of layer k"]


def is_numbered(label: str) -> bool:
    """Return whether a label names a numbered layer."""
    return any(c.isdigit() for c in label)


def _write(rows: Sequence[Row]) -> str:
    """Write one line for the same line of several layers."""
    return rows[0].write([r.volatile for r in rows])


def spans(layers: Layers) -> tuple[str, ...]:
    """Write the range of each value over the layers: `3`, `2..97`, `0|1`, `[..]`."""
    return tuple(_span(values) for values in zip(*layers, strict=True))


def _span(values: Sequence[object]) -> str:
    different = list(dict.fromkeys(map(str, values)))
    if len(different) == 1:
        return different[0]
    if different[0].startswith("["):
        return "[..]"
    if len(different) <= 3:
        return "|".join(different)
    return f"{different[0]}..{different[-1]}"
