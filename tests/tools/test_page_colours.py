"""Colours of the page: those that meet can be told apart with any common colour blindness."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

import zerofx.tools.views

SOURCE = Path(zerofx.tools.views.__file__).parent / "templates" / "page_colours.js"
LEAST = 12.0  # CIELAB distance; 2.3 is a just noticeable difference of large patches
LEAST_CONTRAST = 1.25  # of a bar with the paper; its label has a contrast of its own
PAPER = ("#ffffff", "#161b22")

Rgb = tuple[float, float, float]
# Machado et al. (2009), severity 1.0, on linear RGB.
SIGHT: dict[str, tuple[Rgb, Rgb, Rgb]] = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
                   (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                     (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                   (0.004733, 0.691367, 0.303900)),
}  # fmt: skip
# Kinds of bars that share a row, lanes of transfers, and the stack of memory.
MEETING = {
    "compute": "forward backward pack update arrival wait clip cast store sync beside".split(),
    "host": "launch call release".split(),
    "lanes": ["gather", "reduce", "exchange", "to host", "from host", "from nvme", "to nvme"],
    "memory": "parameters gathered gradients optimizer activations temporaries communication "
    "inputs outputs buffers".split(),
}


def tones() -> dict[str, tuple[str, str]]:
    """Return the colours on light and on dark paper, by name."""
    found = re.findall(r'("[\w ]+"|\w+): \["(#\w{6})", "(#\w{6})"\]', SOURCE.read_text())
    return {name.strip('"'): (light, dark) for name, light, dark in found}


def linear(colour: str) -> list[float]:
    parts = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def lab(colour: str, sight: str) -> Rgb:
    """Return the CIELAB coordinates of a colour as someone with that sight sees it."""
    rgb = linear(colour)
    r, g, b = (
        min(1.0, max(0.0, sum(a * v for a, v in zip(row, rgb, strict=True))))
        for row in SIGHT[sight]
    )
    x, y, z = (
        v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116
        for v in (
            (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
            0.2126 * r + 0.7152 * g + 0.0722 * b,
            (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
        )
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2."""
    light = [sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True))
             for c in (one, other)]  # fmt: skip
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_every_colour_has_a_group() -> None:
    assert sorted(tones()) == sorted(itertools.chain.from_iterable(MEETING.values()))


@pytest.mark.parametrize("paper", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_colours_that_meet_differ(sight: str, paper: int) -> None:
    known = tones()
    for names in MEETING.values():
        seen = {name: lab(known[name][paper], sight) for name in names}
        for one, other in itertools.combinations(names, 2):
            assert math.dist(seen[one], seen[other]) >= LEAST, (one, other)
    for name, colours in known.items():
        assert contrast(colours[paper], PAPER[paper]) >= LEAST_CONTRAST, name
