"""split: forward and backward, and what becomes of each activation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import OWN
from oracle_cases import Choice, captured, captured_inference
from passes_compact import before, run
from torch import nn

import zerofx
from zerofx.analysis.recompute.activations import is_param_alias
from zerofx.ir.meta import Phase, Role, info, nbytes, value
from zerofx.ir.program import Planned
from zerofx.passes.merge_tied import MergeTied
from zerofx.passes.split import Split


def split(case: str, activations: object) -> Planned:
    return run(run(captured(case), MergeTied()), Split(activations=activations))  # type: ignore[arg-type]


def saved_bytes(program: Planned) -> int:
    return sum(nbytes(value(n)) for n in program.placeholders("backward", Role.SAVED))


def recomputed(program: Planned) -> list[str]:
    return [str(n.target) for n in program.graph("backward").nodes if info(n).recomputed]


def test_keep_recomputes_nothing_that_costs() -> None:
    program = split("chain", "keep")
    assert set(program.graphs) == {"forward", "backward"}
    assert all("mm" not in target and "tanh" not in target for target in recomputed(program))


def test_recompute_saves_what_crosses_units_only() -> None:
    program = split("gpt", "recompute")
    forward = program.results("forward")
    for spec, node in zip(program.outputs["forward"], forward, strict=True):
        if spec.role is Role.SAVED and node.op == "call_function":
            units = {info(u).unit for u in node.users if u.op == "call_function"}
            assert units - {info(node).unit}, f"{node} is read inside {info(node).unit} only"
    assert sum("addmm" in t for t in recomputed(program)) == 6, "all but each block's last"


@pytest.mark.parametrize("case", OWN)
def test_saved_values_meet_their_placeholders(case: str) -> None:
    for activations in ("keep", "recompute", 0.5):
        program = split(case, activations)
        given = [s for s in program.outputs["forward"] if s.role is Role.SAVED]
        taken = program.placeholders("backward", Role.SAVED)
        assert [(s.index, s.name) for s in given] == [(info(n).index, info(n).name) for n in taken]
        assert [s.index for s in given] == list(range(len(given)))


@pytest.mark.parametrize("case", OWN)
def test_no_parameter_and_no_view_of_one_is_saved(case: str) -> None:
    for activations in ("keep", "recompute"):
        program = split(case, activations)
        for spec, node in zip(program.outputs["forward"], program.results("forward"), strict=True):
            assert spec.role is not Role.SAVED or not is_param_alias(node)


@pytest.mark.parametrize("case", ["gpt-dropout", "branches"])
def test_masks_are_saved_never_drawn_again(case: str) -> None:
    for activations in ("keep", "recompute", 0.3):
        program = split(case, activations)
        drawn = [n for n in program.graph("backward").nodes if info(n).is_random]
        assert not drawn


@settings(max_examples=12)
@given(st.floats(0.0, 1.0))
def test_a_fraction_lies_between_recompute_and_keep(fraction: float) -> None:
    low, high = saved_bytes(split("chain", "recompute")), saved_bytes(split("chain", "keep"))
    assert low <= saved_bytes(split("chain", fraction)) <= max(low, high)


def test_a_larger_fraction_saves_no_less() -> None:
    sizes = [saved_bytes(split("gpt", f)) for f in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] == saved_bytes(split("gpt", "recompute"))


def test_equal_layers_are_treated_alike() -> None:
    program = split("gpt", 0.5)
    kept = [
        [info(n).module.removeprefix(f"blocks.{i}") + str(n.target)
         for n, s in zip(program.results("forward"), program.outputs["forward"], strict=True)
         if s.role is Role.SAVED and info(n).unit == f"blocks.{i}"]
        for i in (0, 1)
    ]  # fmt: skip
    assert kept[0] == kept[1]


def test_a_pattern_that_matches_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    split("gpt", {"block.*": "recompute", "blocks.*": "keep"})
    [told] = [r.getMessage() for r in caplog.records if r.name == "zerofx"]
    assert "names 'block.*', which no unit of GPT matches. Did you mean" in told


def test_patterns_decide_by_unit() -> None:
    program = split("gpt", {"blocks.0": "recompute", "*": "keep"})
    units = {info(n).unit for n in program.graph("backward").nodes if info(n).recomputed
             and "addmm" in str(n.target)}  # fmt: skip
    assert units == {"blocks.0"}


def test_phases_are_marked() -> None:
    program = before("chain", Choice(3, activations="recompute"), "cut-regions")
    for name, phase in (("forward", Phase.FORWARD), ("backward", Phase.BACKWARD)):
        nodes = [n for n in program.graph(name).nodes if n.op not in ("output", "get_attr")]
        assert {info(n).phase for n in nodes} == {phase}


class Overwrites(nn.Module):
    """Writes its input and a buffer in place, both of which backward must see as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x * 2) * self.scale.clone()
        self.scale.mul_(0.5)
        x.add_(1.0)
        return hidden.square().mean()


def test_what_forward_overwrites_is_saved_as_a_copy() -> None:
    program = zerofx.capture(Overwrites(), (torch.randn(2, 4),))
    after = run(run(program, MergeTied()), Split(activations="recompute"))
    updated = {s.index for s in after.outputs["forward"] if s.role is Role.INPUT_UPDATE}
    assert updated == {0}
    for spec, node in zip(after.outputs["forward"], after.results("forward"), strict=True):
        if spec.role is Role.SAVED:
            assert info(node).role not in (Role.INPUT, Role.BUFFER), f"{spec.name} is overwritten"


def test_inference_has_nothing_to_split() -> None:
    program = captured_inference("chain")
    assert not Split().run(program.clone()).changed
