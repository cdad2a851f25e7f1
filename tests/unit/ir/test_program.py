"""A program is captured, then planned: what each has, and that neither lacks anything."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from oracle_cases import Choice, captured
from passes_compact import before

import zerofx
from zerofx.ir.program import NO_BUCKETS, Captured, Fact, Planned, Program, Reference, Unproved
from zerofx.passes.pipeline import run
from zerofx.plan.plan import Plan


def test_there_are_two_kinds_of_programs() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Program(graphs={}, outputs={}, calling=captured("chain").calling, params={})  # type: ignore[abstract]
    assert type(captured("chain")) is Captured
    assert type(captured("chain").clone()) is Captured
    assert type(zerofx.rewrite(captured("chain"), {"stage": 2}, 2).clone()) is Planned


def test_a_captured_program_has_no_plan() -> None:
    """So what needs one does not take it: mypy says so, and nothing is None in its place."""
    only_planned = {f.name for f in dataclasses.fields(Planned)} - {
        f.name for f in dataclasses.fields(Captured)
    }
    assert {"plan", "layout", "slot_bytes", "facts", "reference", "history"} <= only_planned
    assert not any(hasattr(captured("chain"), name) for name in (*only_planned, "emit"))


def test_it_is_planned_without_a_copy() -> None:
    program = captured("chain")
    planned = program.planned()
    assert planned.graphs is program.graphs and planned.planned() is planned
    assert planned.plan == Plan() and not planned.facts and not planned.history
    assert planned.layout is NO_BUCKETS and planned.reference is Unproved.NOT_YET
    assert program.memory().to_dict() == planned.memory().to_dict() | {"title": "Chain: training"}


def test_what_is_decided_arrives_with_its_fact() -> None:
    early = run(captured("chain"), Choice(3).setting(), until="merge-tied")
    assert isinstance(early.reference, Reference) and early.signature
    assert early.layout is NO_BUCKETS and not early.is_laid_out and early.world_size == 1
    late = run(captured("chain"), Choice(3).setting())
    assert late.is_laid_out and late.layout.buckets and late.world_size == 2
    assert late.slot_bytes and late.facts >= {Fact.BUCKETS_ASSIGNED, Fact.SLOTS_ASSIGNED}


def test_a_copy_is_equal_in_all_but_its_graphs() -> None:
    program = before("chain", Choice(3), "prefetch-gathers")
    other = program.clone()
    for f in dataclasses.fields(program):
        same = getattr(program, f.name) == getattr(other, f.name)
        assert same is (f.name != "graphs"), f.name
    other.history.append(copy.copy(other.history[-1]) if other.history else None)  # type: ignore[arg-type]
    assert len(other.history) == len(program.history) + 1
