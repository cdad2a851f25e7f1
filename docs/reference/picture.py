"""Draw docs/step.svg: one training step of examples/blocks.py, as zerofx schedules it on 4 ranks.

Usage: python docs/reference/picture.py

Nothing in the picture is set by hand but its places and colours: the bars are the launches, waits,
regions and releases of the program, in their order, and the curve is its predicted memory. Colours
can be read on white and on black, since a page cannot tell a picture which one it is shown on.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import zerofx  # noqa: E402
from zerofx.plan.sizes import format_bytes  # noqa: E402

if TYPE_CHECKING:
    from zerofx.analysis.time.steps import Step, StepList

FILE = ROOT / "docs" / "step.svg"
WORLD = 4
WIDTH, LEFT, RIGHT = 900, 96, 12
COLOURS = ("#2f6fdb", "#0b8074", "#b85a14", "#8452c9")  # of buckets; white text is read on each
GREY = "#78808a"  # text, lines, and compute without parameters
PARTS = {"region": 6.0, "pack": 1.4}  # width of a step by its kind; all others are 0.7 wide
TOP = {"gather": 40, "compute": 104, "reduce": 140, "memory": 186}
ROW, BAR, CURVE = 26, 22, 62  # heights of a row, a bar in it, and the memory's curve


@dataclass(frozen=True)
class Span:
    """A bar from the start of one step to the end of another."""

    bucket: int
    first: int
    last: int


def spans(steps: tuple[Step, ...], lane: str, begin: str, end: str) -> Iterator[Span]:
    """Yield what begins and ends in a lane by steps of these kinds, bucket by bucket."""
    begun: dict[int, int] = {}
    for step in steps:
        if step.lane == lane and step.kind == begin:
            begun[step.bucket] = step.index
        elif step.lane == lane and step.kind == end:
            yield Span(step.bucket, begun.pop(step.bucket), step.index)


def rows(gathered: list[Span]) -> dict[Span, int]:
    """Return a row for each gathered copy, such that no two overlap."""
    ends: list[int] = []
    found = {}
    for span in sorted(gathered, key=lambda s: s.first):
        free = [n for n, end in enumerate(ends) if end < span.first]
        row = free[0] if free else len(ends)
        ends[row : row + 1] = [span.last]
        found[span] = row
    return found


class Picture:
    """The lines of the file, and where each step lies in it."""

    def __init__(self, schedule: StepList, title: str) -> None:
        self.schedule, self.steps = schedule, schedule.steps
        parts = [PARTS.get(step.kind, 0.7) for step in self.steps]
        unit = (WIDTH - LEFT - RIGHT) / sum(parts)
        self.at = [LEFT + unit * sum(parts[:n]) for n in range(len(parts) + 1)]
        self.buckets = {step.unit: step.bucket for step in self.steps if step.bucket >= 0}
        height = TOP["memory"] + CURVE + 44
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'font-family="system-ui, sans-serif" font-size="12" fill="{GREY}">',
            f"<title>{title}</title>",
        ]

    def text(self, x: float, y: float, said: str, style: str = "") -> None:
        self.lines.append(f'<text x="{x:.1f}" y="{y:.1f}"{style}>{said}</text>')

    def bar(self, first: int, last: int, y: float, colour: str, said: str, style: str = "") -> None:
        """Draw a bar over these steps, with a text in its middle."""
        x, end = self.at[first], self.at[last + 1]
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y}" width="{end - x - 1:.1f}" height="{BAR}" rx="3" '
            f'fill="{colour}"{style}/>'
        )
        if said:
            style = ' text-anchor="middle" fill="#fff" font-size="11"'
            self.text((x + end) / 2, y + BAR - 7, said, style)

    def draw(self) -> str:
        self.frame()
        waited = {span.first: span.last for span in spans(self.steps, "gather", "launch", "wait")}
        for span, row in rows(list(spans(self.steps, "gather", "launch", "release"))).items():
            y, colour = TOP["gather"] + ROW * row, COLOURS[span.bucket]
            arrived = waited[span.first]
            self.bar(span.first, arrived, y, colour, "", ' fill-opacity="0.4"')
            self.bar(arrived + 1, span.last, y, colour, self.short(span, arrived))
        for step in self.steps:
            if step.kind == "region":
                bucket = self.buckets.get(step.unit, -1)
                colour = COLOURS[bucket] if bucket >= 0 else GREY
                said = (step.unit or "loss") + ("'" if step.is_backward else "")
                self.bar(step.index, step.index, TOP["compute"], colour, said)
        for span in spans(self.steps, "reduce", "launch", "wait"):
            said = f"RS {span.bucket}" if self.at[span.last] - self.at[span.first] > 24 else ""
            style = ' fill-opacity="0.75"'
            self.bar(span.first, span.last, TOP["reduce"], COLOURS[span.bucket], said, style)
        self.memory()
        return "\n".join([*self.lines, "</svg>"]) + "\n"

    def short(self, span: Span, arrived: int) -> str:
        """Return the number of a gathered bucket."""
        return str(span.bucket) if self.at[span.last] - self.at[arrived] > 10 else ""

    def frame(self) -> None:
        """Name the lanes, and draw the line between forward and backward."""
        names = {
            "gather": "gathered parameters", "compute": "compute",
            "reduce": "reduce- scatter", "memory": "memory",
        }  # fmt: skip
        for lane, name in names.items():
            for row, word in enumerate(name.split(" ")):
                self.text(0, TOP[lane] + 15 + 15 * row, word, ' font-weight="600"')
        turn = self.at[next(step.index for step in self.steps if step.is_backward)]
        end = TOP["memory"] + CURVE
        self.lines.append(
            f'<path d="M{turn:.1f} 12V{end}" stroke="{GREY}" stroke-dasharray="3 3" fill="none"/>'
        )
        for x, said in ((LEFT, "forward"), (turn + 8, "backward")):
            self.text(x, 22, said, ' font-style="italic"')
        x, y = float(LEFT), end + 30
        legend = (
            ("0.4", "all-gather in flight"), ("1", "gathered until its release"),
            ("0.75", "reduce-scatter in flight"),
        )  # fmt: skip
        for opacity, said in legend:
            self.lines.append(
                f'<rect x="{x:.1f}" y="{y - 11}" width="22" height="13" rx="3" fill="{COLOURS[0]}" '
                f'fill-opacity="{opacity}"/>'
            )
            self.text(x + 28, y, said)
            x += 42 + 6.3 * len(said)
        self.text(x, y, "one colour per bucket")

    def memory(self) -> None:
        """Draw the resident bytes of each step, and mark the peak."""
        top, peak = TOP["memory"], max(step.resident_bytes for step in self.steps)
        base = top + CURVE
        path = [f"M{self.at[0]:.1f} {base}"]
        for step in self.steps:
            y = base - CURVE * 0.8 * step.resident_bytes / peak
            path.append(f"V{y:.1f}H{self.at[step.index + 1]:.1f}")
        self.lines.append(
            f'<path d="{"".join(path)}V{base}Z" fill="{GREY}" fill-opacity="0.3" stroke="{GREY}"/>'
        )
        index = self.schedule.peak_step
        x = (self.at[index] + self.at[index + 1]) / 2
        said = f"peak {format_bytes(peak)}"
        self.text(x, top + 6, said, ' text-anchor="middle"')
        first = format_bytes(self.steps[0].resident_bytes)
        self.text(LEFT + 6, base - CURVE * 0.8 * self.steps[0].resident_bytes / peak - 6, first)


def picture() -> str:
    """Return the picture of the program that zerofx makes now."""
    model, args, kwargs = runpy.run_path(str(ROOT / "examples" / "blocks.py"))["build"]()
    captured = zerofx.capture(model, args, kwargs)
    program = zerofx.rewrite(captured, zerofx.Plan(), world_size=WORLD)
    view = program.schedule()
    return Picture(view.schedule, f"One training step on each of {WORLD} ranks").draw()


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
