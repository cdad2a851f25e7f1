"""Parameters whose gradients are one tensor: each p.grad is that of eager PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zerofx


class Sums(nn.Module):
    """Gradients that are one expanded scalar, one tensor, and views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(5, 3)) for _ in range(2))
        self.c, self.d = (nn.Parameter(torch.randn(4)) for _ in range(2))
        self.e, self.f = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = (x + self.c + self.d) @ (self.e + self.f.t())
        return (self.a + self.b).sum() + y.square().mean()


def full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def give_one_tensor(params: dict[str, Tensor]) -> None:
    """Make one tensor the p.grad of a and b, whose gradients eager PyTorch then adds up in it."""
    params["a"].grad = params["b"].grad = torch.full_like(params["a"], 0.5)
    params["c"].grad = torch.ones_like(params["c"])


def train(plan: dict[str, Any] | None, ranks: int, gives: bool = False) -> dict[str, Tensor]:
    """Train 4 steps with p.grad changed in place; return the whole parameters.

    gives: whether each step begins with p.grad that are one tensor.
    """
    torch.manual_seed(0)
    model: Any = Sums()
    rank = 0
    if plan is not None:
        model = zerofx.compile(copy.deepcopy(model), {"kernels": "aten", **plan})
        rank = model.zerofx.data_rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    params = dict(model.named_parameters())
    mine = [rank] if plan is not None else list(range(ranks))
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if gives:
            give_one_tensor(params)
        for each in mine:
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + each))
            (model(x) / len(mine)).backward()
        with torch.no_grad():
            params["a"].grad.mul_(0.5)  # not those that it shares memory with elsewhere
            params["d"].grad.add_(1.0)
            params["f"].grad.neg_()
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
    return {name: full(param.detach()).clone() for name, param in params.items()}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (1, {"stage": 0}),
        (2, {"stage": 0}),
        (2, {"stage": 3, "persist_below": 0, "bucket_bytes": 0}),
        slow(1, {"stage": 3, "ignored_params": ["a", "b", "c", "d"]}),
        slow(2, {"stage": 1}),
        slow(2, {"stage": 2, "offload": {"optimizer": "cpu"}}),
        slow(2, {"stage": 3, "parallel": {"tensor": 2}}),
    ],
)
def test_each_has_its_own(pool: Pool, ranks: int, plan: dict[str, Any]) -> None:
    for gives in (False, True):
        if gives and "ignored_params" in plan:
            continue
        expected = train(None, 1 if "parallel" in plan else ranks, gives)
        for found in pool.run(ranks, train, plan, ranks, gives):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)
