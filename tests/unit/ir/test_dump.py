"""The text of a program: stable, in fixed columns, identical layers once."""

from __future__ import annotations

import re
from functools import cache

import goldens
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stack import Stack, stack

import zerofx
from zerofx import ops
from zerofx.capture import capture
from zerofx.errors import PlanError
from zerofx.ir.dump import LEVELS, dump_graph, dump_program, fault
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.repeats import Repeat, Row, collapse, find_repeats


@cache
def rewritten(layers: int = 5) -> Planned:
    """Return the program of a stack of so many layers on 4 ranks; treat it as read-only."""
    _, args, kwargs = stack()
    with torch.device("meta"):
        module = Stack(layers)
    plan = {"stage": 3, "bucket_bytes": 0, "persist_below": 0, "kernels": "aten"}
    return zerofx.rewrite(capture(module, args, kwargs), plan, 4)


@pytest.mark.parametrize("level", LEVELS)
def test_golden(level: str) -> None:
    goldens.check(f"dump_{level}", rewritten().dump(level))


def test_golden_history() -> None:
    goldens.check("dump_headers", "\n".join(e.header for e in rewritten().history))


def test_same_text_every_time() -> None:
    first, second = rewritten(), rewritten.__wrapped__()
    assert first.dump("full") == second.dump("full")
    assert [e.dump for e in first.history] == [e.dump for e in second.history]
    assert "0x" not in first.dump("full")


def test_levels_grow() -> None:
    program = rewritten()
    lengths = [len(program.dump(level).splitlines()) for level in LEVELS]
    assert lengths == sorted(lengths) and lengths[0] == 1
    with pytest.raises(PlanError, match=r"'everything' is unknown. Use one of summary, units"):
        program.dump("everything")


def test_full_has_one_line_a_node() -> None:
    program = rewritten()
    for name, gm in program.graphs.items():
        lines = dump_graph(program, name, "full")
        frame = 4  # def, ):, return (, )
        results = len(program.results(name))
        assert len(lines) == len(gm.graph.nodes) - 1 + results + frame


def test_layers_are_collapsed_whatever_their_number() -> None:
    """The text of a deep model is as long as that of a shallow one."""
    few, many = (rewritten(layers=n).dump("nodes").splitlines() for n in (8, 20))
    assert len(few) == len(many)
    assert any(re.search(r"# layer k, x1\d: layers\.\d+ to layers\.\d+", line) for line in many)


def test_gathers_with_and_without_a_slot_collapse() -> None:
    """What a budget keeps gathered has no slot: it is the same line as the layers before it."""
    with torch.device("meta"):
        captured = capture(Stack(layers=12), (torch.zeros(8, 16),))
    plan = {"stage": 3, "kernels": "aten", "bucket_bytes": 0, "persist_below": 0}
    found = zerofx.rewrite(captured, {**plan, "memory_budget": 39000}, 4)
    choices = {d.choice for d in found.decisions}
    assert {"keep gathered", "gather again"} <= choices
    lines = found.dump().splitlines()
    mixed = [line for line in lines if "zfx.all_gather" in line and "none)" in line]
    assert mixed and all("bucket=2.." in line for line in mixed)
    full = found.dump("full").splitlines()
    assert any("bucket=12)" in line for line in full) and not any("none" in line for line in full)


def test_every_history_entry_has_its_dump() -> None:
    program = rewritten()
    assert [e.dump.splitlines()[0][:4] for e in program.history] == [
        f"# {i:02d}" for i in range(len(program.history))
    ]
    last = program.history[-1]
    assert last.dump == program.dump("nodes")
    assert last.num_nodes == sum(len(gm.graph.nodes) for gm in program.graphs.values())
    assert last.peak_bytes == program.memory().peak_bytes


def test_columns() -> None:
    """Every line's comment begins in the same column, and bytes and lines are where they belong."""
    lines = dump_graph(rewritten(), FORWARD, "full")
    places = {line.index(" # ") for line in lines if " # " in line and line.index(" # ") < 80}
    assert len(places) == 1
    gather = next(line for line in lines if "zfx.all_gather" in line)
    assert "+1.2 KiB" in gather and "gather layers.0" in gather
    assert any("stack.py:" in line and "aten.tanh" in line for line in lines)


def test_fault_shows_ten_lines_around() -> None:
    program = rewritten()
    node = next(n for n in program.graph(BACKWARD).nodes if n.target is ops.reduce_scatter)
    lines = fault(program, BACKWARD, node).splitlines()
    assert lines[0] == "in backward:" and len(lines) == 1 + 10 + 1 + 10
    marked = [line for line in lines if line.startswith("> ")]
    assert len(marked) == 1 and "zfx.reduce_scatter" in marked[0]
    assert marked[0] == lines[11]


def test_inference_and_capture_have_dumps_too() -> None:
    module, args, kwargs = stack()
    captured = capture(module.requires_grad_(False), args, kwargs)
    assert dump_program(captured, "captured").startswith("# captured\n\ndef forward(")
    text = zerofx.rewrite(captured, {"stage": 3}, 2).dump()
    assert "def forward(" in text and "def backward(" not in text


# -- repeats ----------------------------------------------------------------------------------
@given(st.lists(st.sampled_from("abc"), max_size=40), st.data())
def test_repeats_are_true_and_apart(keys: list[str], data: st.DataObject) -> None:
    starts = data.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys)))
    at = 0
    for r in find_repeats(keys, starts):
        assert r.start >= at and r.count >= 2 and r.end <= len(keys) and starts[r.start]
        block = keys[r.start : r.start + r.period]
        assert keys[r.start : r.end] == block * r.count
        at = r.end


def test_the_longest_cover_wins() -> None:
    keys = list("xabcabcabcabcy")
    assert find_repeats(keys, [True] * len(keys)) == [Repeat(1, 3, 4)]
    assert find_repeats(list("aabb"), [True] * 4) == []  # not worth a frame


def test_collapse_shows_what_differs() -> None:
    rows = [
        Row(f"layers.{i // 2}", i % 2, lambda layers, i=i: f"{i} {[v for (v,) in layers]}", (i,))
        for i in range(12)
    ]
    assert collapse(rows) == [
        "    # layer k, x6: layers.0 to layers.5, the first written out",
        "0 [0, 2, 4, 6, 8, 10]",
        "1 [1, 3, 5, 7, 9, 11]",
        "    # end of layer k",
    ]
    assert len(collapse(rows, is_on=False)) == 12
