"""drop-copies: a value is read instead of its copy, unless the caller may write to one of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle_cases import Choice
from passes_compact import pass_named, run
from torch import Tensor, nn

import zerofx
from zerofx.ir.program import Planned, Program
from zerofx.passes.drop_copies import DropCopies
from zerofx.passes.merge_tied import MergeTied

CLONE = torch.ops.aten.clone.default


class Forward(nn.Module):
    """A weight and any forward that reads it."""

    def __init__(self, forward: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))
        self.of = forward

    def forward(self, x: Tensor) -> object:
        return self.of(x, self.weight)


def program_of(forward: Callable[[Tensor, Tensor], object]) -> Program:
    return zerofx.capture(Forward(forward), (torch.ones(4, 6),))


def copies(program: Planned | Program) -> int:
    return sum(n.target is CLONE for gm in program.graphs.values() for n in gm.graph.nodes)


def after(program: Program) -> Planned:
    return run(run(program, MergeTied()), DropCopies())


DROPPED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a dropout of 0": lambda x, w: nn.functional.dropout(x @ w, 0.0).sin().sum(),
    "a dropout in evaluation": lambda x, w: nn.functional.dropout(x @ w, 0.5, False).sin().sum(),
    "a copy of a view of all": lambda x, w: (x @ w).view(2, 12).clone().sin().sum(),
    "a copy of a transposition": lambda x, w: (x @ w).t().clone().sin().sum(),
    "a copy of a copy": lambda x, w: (x @ w).clone().clone().sin().sum(),
}
KEPT: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a result": lambda x, w: (x @ w).clone(),
    "a view of a result": lambda x, w: (x @ w).clone().view(-1),
    "of a result": lambda x, w: ((h := x @ w), h.clone().sin().sum()),
    "of an input": lambda x, w: (x.clone() @ w).sum(),
    "of a view of an input": lambda x, w: (x.view(4, 6).clone() @ w).sum(),
    "of a parameter": lambda x, w: (x @ w.clone()).sum(),
    "of a part": lambda x, w: (x @ w)[:2].clone().sin().sum(),
    "of other strides": lambda x, w: (x @ w).t().contiguous().sin().sum(),
    "of an expanded value": lambda x, w: (x @ w).sum(0).expand(4, 6).clone().sin().sum(),
}


@pytest.mark.parametrize("forward", DROPPED.values(), ids=DROPPED)
def test_read_at_the_source(forward: Callable[[Tensor, Tensor], object]) -> None:
    program = program_of(forward)
    assert copies(program) > 0
    assert copies(after(program)) == 0


@pytest.mark.parametrize("forward", KEPT.values(), ids=KEPT)
def test_kept(forward: Callable[[Tensor, Tensor], object]) -> None:
    program = program_of(forward)
    assert copies(program) > 0
    assert copies(after(program)) == copies(program)


VIEWS: dict[str, tuple[Callable[[Tensor, Tensor], object], int]] = {  # with how many views stay
    "transposed and back": (lambda x, w: (x @ w.t().t()).sum(), 0),
    "dimensions swapped and back": (lambda x, w: (x @ w).transpose(0, 1).transpose(0, 1).sin(), 0),
    "detached": (lambda x, w: ((x @ w).sin().detach() * x).sum() + w.sum(), 0),
    "a view of its own shape": (lambda x, w: (x @ w).view(4, 6).sin().sum(), 0),
    "of the source as result": (lambda x, w: ((h := x @ w), h.view(4, 6)), 1),
    "of an input as result": (lambda x, w: (x.view(4, 6), (x @ w).sum()), 1),
    "another shape": (lambda x, w: (x @ w).view(2, 12).sin().sum(), 1),
    "transposed once": (lambda x, w: (x @ w).t().sin().sum(), 1),
    "swapped otherwise": (
        lambda x, w: (x @ w).view(2, 2, 6).transpose(0, 1).transpose(1, 2).sin(), 3,
    ),
}  # fmt: skip
VIEW_OPS = {
    torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.detach.default,
    torch.ops.aten.view.default,
}  # fmt: skip


@pytest.mark.parametrize(("forward", "left"), VIEWS.values(), ids=VIEWS)
def test_views_of_the_same_tensor_are_left_out(
    forward: Callable[[Tensor, Tensor], object], left: int
) -> None:
    with torch.no_grad():
        program = program_of(forward)
    nodes = after(program).graphs["forward"].graph.nodes
    assert sum(n.target in VIEW_OPS for n in nodes) == left


@pytest.mark.parametrize(
    "forward",
    [*DROPPED.values(), *KEPT.values(), *(forward for forward, _ in VIEWS.values())],
    ids=[*DROPPED, *KEPT, *VIEWS],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_results_and_gradients_are_those_of_eager(
    forward: Callable[[Tensor, Tensor], object], stage: int
) -> None:
    plain, x = Forward(forward), torch.linspace(0, 1, 24).view(4, 6)
    compiled = zerofx.compile(Forward(forward), {"kernels": "aten", "stage": stage}, device="cpu")
    for model in (plain, compiled):
        results = model(x)
        last = results[-1] if isinstance(results, tuple) else results
        last.sum().backward()
    torch.testing.assert_close(compiled.weight.grad, plain.weight.grad, rtol=0, atol=0)


def test_what_the_caller_writes_does_not_reach_backward() -> None:
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        return h, h.clone().sin().sum()

    plain, x = Forward(forward), torch.linspace(0, 1, 24).view(4, 6)
    compiled = zerofx.compile(Forward(forward), {"kernels": "aten"}, device="cpu")
    for model in (plain, compiled):
        h, loss = model(x)
        h.detach().zero_()
        loss.backward()
    torch.testing.assert_close(compiled.weight.grad, plain.weight.grad, rtol=0, atol=0)


def test_nothing_to_drop_nothing_changed() -> None:
    program = run(program_of(lambda x, w: (x @ w).sum()), MergeTied())
    report = DropCopies().run(program)
    assert not report.changed
    assert report.summary == "copies left out: 0, views: 0"


def test_declared() -> None:
    assert pass_named(Choice(3), "drop-copies") == DropCopies()
