"""Hooks of parameters: called once per backward, with the reduced gradient in `p.grad`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx.errors import GradientError

ATEN: dict[str, Any] = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}


class Steps(nn.Module):
    def __init__(self, decides: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decides = decides
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if not self.decides or number != 1 or x[0, 0].item() > 0:  # ranks skip others
                x = layer(x).tanh()
        return x.square().mean()


def batch(step: int, rank: int) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(9 * step + rank))
    x[0, 0] = 50.0 if rank == 0 else -50.0
    return x


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def hooked(*cases: dict[str, Any]) -> None:
    for case in cases:
        steps_in_hooks(**case)


def steps_in_hooks(decides: bool = False, **fields: Any) -> None:
    """Step an optimizer per parameter in its hook; that is training as with one after backward."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plain = Steps(decides)
    model: Any = zerofx.compile(copy.deepcopy(plain), {**ATEN, **fields})
    reference = torch.optim.Adam(plain.parameters(), lr=1e-2)
    mine = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}
    names = {p: name for name, p in model.named_parameters()}
    seen: list[str] = []

    def step_of(param: nn.Parameter) -> None:
        assert not torch.is_grad_enabled()
        seen.append(names[param])
        expected = plain.get_parameter(names[param]).grad
        torch.testing.assert_close(whole(param.grad), expected, atol=1e-6, rtol=1e-4)
        mine[param].step()
        mine[param].zero_grad()

    for param in mine:
        param.register_post_accumulate_grad_hook(step_of)
    for step in range(3):
        for each in range(world):
            (plain(batch(step, each)) / world).backward()
            (2 * plain(batch(step + 5, each)) / world).backward()
        given = [name for name, p in plain.named_parameters() if p.grad is not None]
        (model(batch(step, rank)) + 2 * model(batch(step + 5, rank))).backward()
        assert seen == given
        assert all(p.grad is None for p in model.parameters())
        seen.clear()
        reference.step()
        reference.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, atol=1e-5, rtol=1e-4)


CASES: list[dict[str, Any]] = [{}, {"stage": 1}, {"stage": 0}, {"decides": True}]
OFFLOADED = {"offload": {"parameters": "cpu", "optimizer": "cpu"}}


def test_an_optimizer_that_steps_in_hooks() -> None:
    hooked({}, {"decides": True})


def test_an_optimizer_that_steps_in_hooks_on_two_ranks(pool: Pool) -> None:
    pool.run(2, hooked, {"decides": True})


@pytest.mark.slow
def test_an_optimizer_that_steps_in_hooks_under_other_plans(pool: Pool) -> None:
    pool.run(2, hooked, *CASES, OFFLOADED)
    pool.run(4, hooked, {"shard_axis_size": 2})


def when() -> None:
    model: Any = zerofx.compile(Steps(), {**ATEN, "stage": 0})
    calls: list[float] = []
    first = model.layers[0].weight
    handle = first.register_post_accumulate_grad_hook(lambda p: calls.append(float(p.grad.sum())))
    first.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    x = batch(0, 0)
    model(x).backward()
    kept = first.grad.clone()
    torch.testing.assert_close(kept.sum().item() * 2, calls[0])
    torch.autograd.grad(model(x), [first])  # nothing is accumulated
    assert len(calls) == 1 and torch.equal(first.grad, kept)
    first.requires_grad_(False)
    model(x).backward()
    first.requires_grad_(True)
    assert len(calls) == 1
    if dist.is_initialized():
        with model.no_sync():
            model(x).backward()
        assert len(calls) == 1  # the sum is this rank's alone
    handle.remove()
    model(x).backward()
    assert len(calls) == 1
    copied = copy.deepcopy(model)
    copied(x).backward()
    assert copied.layers[0].weight.grad is not None and len(calls) == 1


def test_when_hooks_run() -> None:
    when()


@pytest.mark.slow
def test_when_hooks_run_on_two_ranks(pool: Pool) -> None:
    pool.run(2, when)


def test_hooks_that_would_find_no_gradient_are_refused() -> None:
    model: Any = zerofx.compile(Steps(), {**ATEN, "update": "in-backward"})
    with pytest.raises(GradientError, match=r"layers\.0\.weight: .*Use Plan\(update='step'\)"):
        model.layers[0].weight.register_post_accumulate_grad_hook(print)
    model = zerofx.compile(Steps(), ATEN)
    model.layers[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        model.layers[0].weight.register_post_accumulate_grad_hook(print)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("behind the model")


def test_hooks_run_again_after_a_backward_that_failed() -> None:
    model: Any = zerofx.compile(Steps(), ATEN)
    calls: list[Tensor] = []
    model.layers[0].weight.register_post_accumulate_grad_hook(calls.append)
    with pytest.raises(KeyError, match="behind the model"):
        model(Breaks.apply(batch(0, 0).requires_grad_())).backward()
    assert not calls
    model(batch(0, 0)).backward()
    assert len(calls) == 1


def test_a_hook_that_raises_ends_the_backward() -> None:
    model: Any = zerofx.compile(Steps(), ATEN)

    def fails(param: nn.Parameter) -> None:
        raise KeyError("in a hook")

    handle = model.layers[0].weight.register_post_accumulate_grad_hook(fails)
    with pytest.raises(KeyError, match="in a hook"):
        model(batch(0, 0)).backward()
    handle.remove()
    model(batch(0, 0)).backward()
