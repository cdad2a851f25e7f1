"""open-experts: rows in slots compute what sorted rows did, and what is not followed is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from placed_ranks import run_whole, values_of
from tensor_models import MODELS, batch
from torch import Tensor, nn

import zerofx
from zerofx import ops
from zerofx.errors import ProgramError
from zerofx.ir.program import JOINT, Planned
from zerofx.ir.verify import bounds, verify
from zerofx.ops.placed import swap_values
from zerofx.passes.open_experts import OpenExperts
from zerofx.plan.fields import Patterns
from zerofx.plan.parts import Parallel

EXPERTS = Patterns({"*up": "experts", "*down": "experts"})


class Layer(nn.Module):
    """A layer of four experts, of which each token has two; how: what is done with its rows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 8, 16) / 4)
        self.down = nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        ids = chosen.flatten()
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=4) if self.how == "counts" else (
            (ids[:, None] == torch.arange(4)).sum(0)
        )  # fmt: skip
        ends = counts.cumsum(0).to(torch.int32)
        up, down = self.up.bfloat16(), self.down.bfloat16()
        rows = nn.functional.grouped_mm(tokens[order // 2].bfloat16(), up, offs=ends)
        gate = rows.roll(1, 0) if self.how == "neighbours" else rows
        rows = rows.relu() * (gate * 2).sigmoid()
        if self.how == "dropout":
            rows = nn.functional.dropout(rows)
        rows = nn.functional.grouped_mm(rows, down, offs=ends).float()
        rows = rows * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // 2, rows).view(x.shape)


def captured(how: str, length: int = 8) -> tuple[nn.Module, Any, Tensor]:
    torch.manual_seed(0)
    model, x = Layer(how), torch.randn(2, length, 8)
    return model, zerofx.capture(model, (x,)).planned(), x


def opened(program: Planned, parallel: Parallel) -> tuple[Planned, str]:
    made = program.clone()
    report = OpenExperts(parallel).run(made)
    made.graph(JOINT).lint()
    made.graphs[JOINT].recompile()
    return made, report.summary


def with_capacity(capacity: float, **more: Any) -> Parallel:
    return Parallel(tensor=2, experts=True, capacity=capacity, placements=EXPERTS, **more)


@pytest.mark.parametrize("sequence", [True, False])
def test_nothing_changes_if_nothing_is_dropped(sequence: bool) -> None:
    """Outputs and gradients, of a layer that adds its rows up by an index."""
    model, program, x = captured("index_add")
    made, told = opened(program, with_capacity(2.0, sequence=sequence))
    assert "8 slots for 16 rows of a rank" in told
    called = [str(n.target) for n in made.graph(JOINT).nodes]
    assert "aten._grouped_mm.default" not in called and "aten.sort.stable" not in called
    given = values_of(program, model, {"x": x})
    expected, found = (run_whole(p.graphs[JOINT], given)[0] for p in (program, made))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-2)  # in bf16


def test_what_is_not_followed_stays(caplog: pytest.LogCaptureFixture) -> None:
    for how, length, reason in (
        ("neighbours", 8, "aten.roll.default of their sorted rows is not known"),
        ("dropout", 8, "of their sorted rows is not known"),
        ("index_add", 7, "14 tokens are not divided by tensor = 4"),
    ):
        caplog.clear()
        caplog.set_level(logging.WARNING, "zerofx")
        _, program, _ = captured(how, length)
        ranks = 4 if length == 7 else 2
        parallel = Parallel(tensor=ranks, experts=True, capacity=1.0, placements=EXPERTS)
        before = [n.name for n in program.graph(JOINT).nodes]
        made, _ = opened(program, parallel)
        assert reason in caplog.text and "capacity = 1 has no effect" in caplog.text
        assert "aten._grouped_mm.default" in [str(n.target) for n in made.graph(JOINT).nodes]
        assert {n.name for n in made.graph(JOINT).nodes} <= set(before)


@pytest.fixture(scope="module")
def rewritten() -> Planned:
    torch.manual_seed(0)
    inputs = batch("mixtral")
    program = zerofx.capture(MODELS["mixtral"](), (), inputs, outputs="loss")
    parallel = {"tensor": 2, "experts": True, "capacity": 0.75, "sequence": True}
    return zerofx.rewrite(program, {"parallel": parallel, "stage": 3, "numerics": "fast"}, 2)


def test_a_proof_says_that_rows_may_be_left_out(rewritten: Planned) -> None:
    verify(rewritten)
    assert "beyond each expert's capacity" in str(bounds(rewritten)["expert_slots"])


def _calls(program: Planned, target: Any) -> list[Any]:
    return [n for gm in program.graphs.values() for n in gm.graph.nodes if n.target is target]


def test_wrong_slots_are_refused(rewritten: Planned) -> None:
    """Another capacity, rows of another layer, and all-to-alls that leave out or turn around."""

    def capacity(node: Any) -> None:
        node.args = (*node.args[:3], node.args[3] - 1, *node.args[4:])

    def other_layer(node: Any) -> None:
        same = [n for n in node.graph.nodes if n.target is node.target and n is not node]
        node.args = (node.args[0], same[-1].args[1], *node.args[2:])

    def parts(node: Any) -> None:
        node.args = (node.args[0], node.args[1], 1, *node.args[3:])

    def turned(node: Any) -> None:
        node.args = (*node.args[:2], 1, 2, *node.args[4:])

    def left_out(node: Any) -> None:
        back = next(n for n in node.graph.nodes if n.target is node.target and n is not node)
        (wait,) = back.users
        (own,) = node.users
        own.replace_all_uses_with(own.args[0].args[0], lambda user: user is not wait)

    changes = [
        (ops.expert_slots, capacity), (ops.rows_from_slots, other_layer),
        (ops.rows_to_slots, parts), (swap_values, turned), (swap_values, left_out),
    ]  # fmt: skip
    for target, change in changes:
        mutant = rewritten.clone()
        change(_calls(mutant, target)[0])
        with pytest.raises(ProgramError):
            verify(mutant)
