"""cut-regions: compute in regions that end where execution passes from unit to unit."""

from __future__ import annotations

import operator

import pytest
import torch
from models import OWN
from oracle_cases import Choice
from passes_compact import before, order, pass_named, run

import zerofx
from zerofx.codegen.regions import RegionLibrary
from zerofx.ir.graphs import is_compute, root_producer
from zerofx.ir.meta import info
from zerofx.ir.program import Planned
from zerofx.passes.cut_regions import CutRegions
from zerofx.passes.merge_tied import MergeTied
from zerofx.passes.split import Split
from zerofx.tools.demo.gpt import GPT, GPTConfig


def cut(case: str, activations: str = "keep") -> Planned:
    return run(before(case, Choice(3, activations=activations), "cut-regions"), CutRegions())


def test_one_region_a_unit() -> None:
    program = cut("chain")
    assert order(program, "forward") == [
        "region 0 code",
        "region 1",
        "region 2 layers.0",
        "region 3 layers.1",
        "region 4 layers.2",
        "region 5 layers.3",
        "region 6",
    ]
    assert order(program, "backward") == [
        "region 0",
        "region 1 layers.3",
        "region 2 layers.2",
        "region 3 layers.1",
        "region 4 layers.0",
        "region 5 code",
    ]


@pytest.mark.parametrize("case", OWN)
def test_regions_are_contiguous_and_hold_all_compute(case: str) -> None:
    for activations in ("keep", "recompute"):
        program = cut(case, activations)
        for gm in program.graphs.values():
            seen = [info(n).region for n in gm.graph.nodes if is_compute(n)]
            assert None not in seen
            assert seen == sorted(seen)  # type: ignore[type-var]
            assert set(seen) == set(range(len(set(seen))))


@pytest.mark.parametrize("case", OWN)
def test_a_getitem_stays_with_its_producer(case: str) -> None:
    for gm in cut(case).graphs.values():
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target is operator.getitem:
                assert info(node).region == info(root_producer(node)).region


def test_the_number_of_structures_does_not_grow_with_depth() -> None:
    """Equal layers give equal regions, at both ends too."""
    counts = []
    for layers in (2, 4):
        model = GPT(GPTConfig(layers=layers, width=16, heads=2, seq=8, vocab=32))
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        program = zerofx.capture(model, (tokens, tokens))
        for made in (MergeTied(), Split(activations="recompute"), CutRegions()):
            program = run(program, made)
        library = RegionLibrary()
        for gm in program.graphs.values():
            library.calls(gm.graph)
        counts.append(len(library.codes))
    assert counts[0] == counts[1]


def test_declared() -> None:
    assert pass_named(Choice(3), "cut-regions") == CutRegions()
