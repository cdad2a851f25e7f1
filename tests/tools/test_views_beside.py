"""Predicted beside measured, step by step: as values, text and on the page."""

from __future__ import annotations

import itertools

import pytest
from test_look import recorded

from zerofx.analysis.time.steps import Lane
from zerofx.tools.views.bars import Bar, Track
from zerofx.tools.views.beside import pair_lines, pairs


def track(name: str, times: dict[str, float], kind: str = "region") -> Track:
    bars, at = [], 0.0
    for step, us in times.items():
        unit = f"blocks.{step[-1]}"
        bars.append(Bar(step, Lane.COMPUTE, kind, at, at + us, "forward", unit))
        at += us
    return Track(name, tuple(bars), at)


def test_identical_layers_are_summed_and_the_worst_comes_first() -> None:
    foreseen = track("predicted", {"region 0": 3.0, "region 1": 4.0, "head 2": 50.0}, "pack")
    seen = track("measured, rank 0", {"region 0": 5.0, "region 1": 8.0, "head 2": 51.0}, "pack")
    layers, head = pairs(foreseen, seen, {})
    assert (layers.name, layers.count) == ("region 0", 2)
    assert (layers.predicted_us, layers.measured_us, layers.off_us) == (7.0, 13.0, 6.0)
    assert (head.name, head.count, head.off_us) == ("head 2", 1, 1.0)
    lines = pair_lines([layers, head], seen.name)
    assert "largest differences from measured, rank 0" in lines[0]
    assert lines[1].split()[:5] == ["7", "us", "13", "us", "0.54"] and "and 1 equal" in lines[1]


def test_what_one_track_lacks_is_left_out() -> None:
    foreseen, seen = track("predicted", {"a 0": 1.0, "b 1": 2.0}), track("seen", {"b 1": 0.0})
    (only,) = pairs(foreseen, seen, {})
    assert only.name == "b 1" and "    -  b 1" in pair_lines([only], "seen")[1]


def test_text_and_page_say_the_same() -> None:
    program, recording = recorded()
    look = program.look(recording, "cpu-box")
    foreseen, seen = look.tracks
    twin = look.to_dict()
    (rows,) = twin["beside"]
    by_name = {bar.name: bar.us for bar in seen.bars}
    shared = [bar.us for bar in foreseen.bars if bar.name in by_name]
    assert sum(row[5] for row in rows) == pytest.approx(sum(shared), rel=0.01, abs=0.1)
    assert sum(row[4] for row in rows) == len(shared) > len(rows)  # layers together
    offs = [abs(row[6] - row[5]) for row in rows]
    assert all(a >= b - 0.03 for a, b in itertools.pairwise(offs))
    text = str(look)
    assert all(row[1] in text for row in rows[:5])
    assert "beside" in twin and not program.look(recording).to_dict()["beside"]
