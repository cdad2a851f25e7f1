"""A program is held for more sizes than it was captured at: what passes must not do to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.capture.capture import capture
from zerofx.errors import ProgramError
from zerofx.ir.program import Captured
from zerofx.ir.settle import take_forms, with_sizes
from zerofx.ir.sizes import Dim, Size, Symbol, form


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).view(x.shape[0] * 2, 2).square().mean()


def captured() -> Captured:
    rows = Symbol("rows", 6, (Dim(0, 0, "x"),))
    return capture(Flat(), (torch.randn(3, 4),), varying=(rows,))


def test_graphs_have_numbers_that_know_their_expression() -> None:
    program = captured()
    sizes = [a for n in program.graph("joint").nodes for a in n.args if isinstance(a, list)]
    found = [v for each in sizes for v in each if isinstance(v, Size)]
    assert (12, "2*rows") in [(int(v), v.text) for v in found]
    x = program.placeholders("joint")[2]
    assert form(x)[0] == (6, 4) and repr(form(x)[0]) == "(rows, 4)"
    twice = with_sizes(program, {"rows": 12})
    assert twice.memory().peak_bytes > program.memory().peak_bytes


def test_a_pass_that_makes_a_number_of_a_size_is_found() -> None:
    program = captured()
    for node in program.graph("joint").nodes:
        if node.target is torch.ops.aten.view.default:
            node.args = (node.args[0], [int(n) for n in node.args[1]])
    with pytest.raises(ProgramError, match=r"fixed the value of x\.shape\[0\], which varies"):
        take_forms(program)


def test_what_passes_make_serves_the_same_sizes() -> None:
    program = captured()
    plan = zerofx.Plan(kernels="aten", dynamic="auto")
    planned = zerofx.rewrite(program, plan, world_size=2)
    assert planned.sizes == program.sizes and not planned.sizes.conditions
