"""Predicted and measured times side by side: equal steps summed, largest differences first."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from zerofx.ir.text import without_numbers
from zerofx.tools.views.bars import Bar, Track
from zerofx.tools.views.details import Detail
from zerofx.tools.views.timeline import format_us

LINES = 12  # of the text


@dataclass(frozen=True)
class Pair:
    """One step in both tracks, or the equal steps of identical layers.

    name, unit: of the first. what: its most expensive operator, or the shape it transfers.
    """

    name: str
    unit: str
    what: str
    count: int
    predicted_us: float
    measured_us: float

    @property
    def off_us(self) -> float:
        return abs(self.measured_us - self.predicted_us)


def pairs(predicted: Track, measured: Track, about: Mapping[str, Detail]) -> list[Pair]:
    """Return the steps that both tracks have; those of identical layers are summed."""
    there = {bar.name: bar for bar in measured.bars}
    found: dict[Hashable, Pair] = {}
    for bar in predicted.bars:
        twin = there.get(bar.name)
        if twin is None:
            continue
        detail = about.get(bar.name)
        key = _kind_of(bar, detail)
        before = found.get(key) or Pair(bar.name, bar.unit, _what(detail), 0, 0.0, 0.0)
        found[key] = replace(
            before, count=before.count + 1, predicted_us=before.predicted_us + bar.us,
            measured_us=before.measured_us + twin.us,
        )  # fmt: skip
    return sorted(found.values(), key=lambda p: (-p.off_us, p.name))


def _kind_of(bar: Bar, detail: Detail | None) -> Hashable:
    """Return the key that equal steps of identical layers share."""
    name = "" if bar.kind == "region" else without_numbers(bar.name)
    return bar.kind, bar.lane, bar.graph, without_numbers(bar.unit), name, _what(detail)


def _what(detail: Detail | None) -> str:
    return "" if detail is None else detail.step.heaviest or detail.moves


def pair_lines(rows: Sequence[Pair], name: str) -> list[str]:
    """Return the largest differences as text. name: of the measured track."""
    lines = [f"{'predicted':>10} {'measured':>10}  ratio  largest differences from {name}"]
    for row in rows[:LINES]:
        ratio = f"{row.predicted_us / row.measured_us:5.2f}" if row.measured_us else "    -"
        alike = f" and {row.count - 1} equal" if row.count > 1 else ""
        times = f"{format_us(row.predicted_us):>10} {format_us(row.measured_us):>10}"
        said = f"{times}  {ratio}  {row.name + alike:<36} {row.unit:<20} {row.what}"
        lines.append(said.rstrip())
    return lines
