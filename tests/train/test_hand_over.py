"""Gradients of one process, which are handed over as they are: each p.grad is eager PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.analysis.memory.memory import memory
from zerofx.analysis.memory.storage import Category
from zerofx.ir.program import BACKWARD
from zerofx.plan.plan import Plan

ATEN = {"kernels": "aten", "bucket_bytes": 0}


class Shared(nn.Module):
    """Gradients that share memory: with each other, with that of the input, and with a tangent."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))
        self.summed, self.part = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2, 4))
        self.turned = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm((x + self.one + self.other).sin() @ self.turned.t())
        return (h[:2] * self.part).square().mean() + self.summed.sum()


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "shared": (Shared, (3, 4)),
    "convolved": (Convolved, (2, 1, 4, 4)),
}
Run = tuple[nn.Module, Callable[[int], Tensor]]


def both(name: str, plan: dict[str, Any] | None = None) -> tuple[Run, Run]:
    """Return an eager model and its compiled copy, each with a function that returns a loss."""
    torch.manual_seed(0)
    plain = CASES[name][0]()
    compiled = zerofx.compile(copy.deepcopy(plain), Plan(**(ATEN | (plan or {}))))

    def loss_of(model: nn.Module) -> Callable[[int], Tensor]:
        def loss(step: int) -> Tensor:
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(CASES[name][1], generator=generator).requires_grad_()
            found: Tensor = model(x)
            return found

        return loss

    return (plain, loss_of(plain)), (compiled, loss_of(compiled))


def plainly(run: Run, step: int) -> None:
    run[1](step).backward()


def twice(run: Run, step: int) -> None:
    plainly(run, 2 * step)
    plainly(run, 2 * step + 1)


def two_losses(run: Run, step: int) -> None:
    (run[1](2 * step) + run[1](2 * step + 1)).backward()


def again(run: Run, step: int) -> None:
    loss = run[1](step)
    loss.backward(retain_graph=True)
    loss.backward()


def clipped(run: Run, step: int) -> None:
    plainly(run, step)
    nn.utils.clip_grad_norm_(run[0].parameters(), 0.01)


def one_is_frozen(run: Run, step: int) -> None:
    plainly(run, step)
    list(run[0].parameters())[1].grad = None
    plainly(run, step + 1)


def one_is_set(run: Run, step: int) -> None:
    first = next(run[0].parameters())
    first.grad = torch.ones_like(first)
    plainly(run, step)


def some_are_returned(run: Run, step: int) -> None:
    plainly(run, step)
    params = list(run[0].parameters())
    found = torch.autograd.grad(run[1](step + 1), params[:2])
    for param, grad in zip(params, found, strict=False):
        assert param.grad is not None
        param.grad.add_(grad)


ACTIONS = (
    plainly, twice, two_losses, again, clipped, one_is_frozen, one_is_set, some_are_returned,
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_gradients_and_parameters_are_eagers(
    name: str, to_none: bool, action: Callable[[Run, int], None]
) -> None:
    runs = both(name)
    optimizers = [torch.optim.SGD(run[0].parameters(), 0.1, momentum=0.9) for run in runs]
    for step in range(3):
        for run, optimizer in zip(runs, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=to_none)
            action(run, step)
            optimizer.step()
        (plain, _), (compiled, _) = runs
        pairs = zip(plain.named_parameters(), compiled.named_parameters(), strict=True)
        for (what, a), (_, b) in pairs:
            assert a.grad is not None and b.grad is not None, what
            assert torch.equal(a.grad, b.grad), f"{what}: the gradients of step {step} differ"
            assert torch.equal(a, b), f"{what} differs after step {step}"


@pytest.mark.parametrize("name", CASES)
def test_no_two_gradients_share_memory(name: str) -> None:
    _, run = both(name)
    x = torch.randn(CASES[name][1]).requires_grad_()
    run[0](x).backward()
    assert x.grad is not None
    grads = [x.grad, *(p.grad for p in run[0].parameters() if p.grad is not None)]
    assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads)
    assert all(g.is_contiguous() for g in grads[1:])


def test_a_gradient_that_is_held_keeps_its_values() -> None:
    _, run = both("shared")
    plainly(run, 0)
    params = list(run[0].parameters())
    held = [p.grad for p in params if p.grad is not None]
    values = [g.clone() for g in held]
    for p in params:
        p.grad = None
    plainly(run, 1)
    assert all(map(torch.equal, held, values))


def test_bits_are_those_of_packed_gradients() -> None:
    """Updates inside backward need the bucket, so that those programs pack."""
    _, handed = both("convolved")
    _, packed = both("convolved", {"update": "in-backward"})
    optimizers = [zerofx.optim.AdamW(run[0].parameters(), lr=0.01) for run in (handed, packed)]
    for step in range(3):
        for run, optimizer in zip((handed, packed), optimizers, strict=True):
            plainly(run, step)
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(handed[0].parameters(), packed[0].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_nothing_is_packed_and_memory_counts_each_gradient_once() -> None:
    _, (model, loss) = both("convolved")
    loss(0).backward()
    (program,) = model.zerofx.programs  # type: ignore[union-attr]
    targets = [str(n.target) for n in program.graph(BACKWARD).nodes]
    assert any("hand_over" in t for t in targets)
    assert not any("pack" in t or "reduce" in t for t in targets)
    size = sum(p.nbytes for p in model.parameters())
    input_bytes = 4 * 2 * 4 * 4
    report = memory(program)
    assert report.by_category(report.life.end)[Category.GRADIENTS] == size + input_bytes
    adding = memory(program, accumulation=2)
    assert adding.by_category(0)[Category.GRADIENTS] == size
