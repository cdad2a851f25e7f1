"""Norms, clipping and reductions of sharded tensors are those of the whole."""

from __future__ import annotations

import pytest
import torch
from shard_cases import deliver, gradients, on_ranks, small_model, whole
from torch import Tensor, nn

from zerofx.comm.world import World
from zerofx.runtime.store.shards import ShardStore


def test_reductions_are_of_the_whole() -> None:
    full = small_model()[0].weight.detach()

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight.detach()
        for name in ("max", "min", "amax", "amin", "any", "all", "count_nonzero"):
            assert torch.equal(getattr(torch, name)(p), getattr(torch, name)(full)), name
        for name in ("sum", "mean"):
            expected = getattr(full.double(), name)().float()
            torch.testing.assert_close(getattr(p, name)(), expected, rtol=1e-6, atol=0)
        assert not bool(p.isnan().any()) and bool((p < 9).all())
        assert (p > 0).sum() == (full > 0).sum() and (p > 0).sum().dtype == torch.int64
        assert torch.equal(p, full) and torch.equal(full, p) and p.allclose(full + 1e-9)
        changed = full.clone()
        changed[0, 0] += 1  # rank 0's piece only: every rank must say so
        assert not torch.equal(p, changed) and not torch.equal(p, full[:3])
        tiny = model[2].weight  # some ranks own nothing of it
        assert tiny.max().item() == small_model()[2].weight.max().item()

    on_ranks(3, body)


@pytest.mark.parametrize("order", [2.0, 1.0, 3.5, 0.0, float("inf"), -float("inf")])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_clipping_equals_the_unsharded_total(order: float, foreach: bool | None) -> None:
    """Not bitwise: an unsharded norm sums all elements in one order, pieces in another."""
    expected = small_model()
    for name, grad in gradients(expected, 0).items():
        expected.get_parameter(name).grad = grad
    clip = nn.utils.clip_grad_norm_
    if order > 0:
        total = clip(expected.parameters(), 1.0, norm_type=order, foreach=foreach)
    else:
        total = nn.utils.get_total_norm([p.grad for p in expected.parameters()], order)

    def body(model: nn.Module, store: ShardStore, world: World) -> tuple[Tensor, list[Tensor]]:
        deliver(store, gradients(model, 0))
        sent = world.counters["all_gather"].calls if foreach else 0
        if order > 0:
            mine = clip(model.parameters(), 1.0, norm_type=order, foreach=foreach)
        else:
            mine = nn.utils.get_total_norm([p.grad for p in model.parameters()], order)
        if foreach and order > 0:
            assert world.counters["all_gather"].calls == sent + 1
        return mine, [whole(p.grad) for p in model.parameters()]

    for size in (2, 3):
        results = on_ranks(size, body)
        for mine, grads in results:
            assert torch.equal(mine, results[0][0]) and type(mine) is Tensor
            torch.testing.assert_close(mine, total, rtol=1e-6, atol=0)
            for ours, p in zip(grads, expected.parameters(), strict=True):
                torch.testing.assert_close(ours, p.grad, rtol=2e-6, atol=1e-9)


def test_clipping_on_a_shard_and_replicate_grid_by_value_and_nonfinite() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> Tensor:
        deliver(store, gradients(model, 0))
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        assert float(whole(model[0].weight.grad).abs().max()) <= 0.01
        full = gradients(model, 1)
        full["2.weight"][0, 0] = torch.nan  # in one rank's piece
        model.zero_grad()
        deliver(store, full)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        return total

    flat = torch.cat([g.reshape(-1) for g in gradients(small_model(), 0).values()])
    for total in on_ranks(4, body, shard_size=2):
        torch.testing.assert_close(total, flat.norm(), rtol=1e-6, atol=0)


def test_low_precision_norms_are_summed_in_single() -> None:
    model = small_model().to(torch.bfloat16)
    full = gradients(model, 0)

    def body(model: nn.Module, store: ShardStore, world: World) -> Tensor:
        deliver(store, {k: g.bfloat16() for k, g in full.items()})
        norm = torch.linalg.vector_norm(model[0].weight.grad)
        assert norm.dtype == torch.bfloat16
        return norm

    exact = full["0.weight"].bfloat16().float().norm()
    for norm in on_ranks(3, body, model):
        assert torch.equal(norm, exact.bfloat16())


def test_calls_by_keyword_and_lists_with_plain_tensors() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        deliver(store, gradients(model, 0))
        p, outside = model[0].weight, nn.Parameter(torch.ones(4))
        outside.grad = torch.full((4,), 2.0)
        with torch.no_grad():
            assert torch.equal(whole(torch.zeros_like(input=p)), torch.zeros(33, 13))
            assert torch.equal(whole(torch.mul(input=p, other=2)), whole(p) * 2)
            assert torch.equal(torch.sum(input=p > 0), torch.sum(whole(p) > 0))
            assert torch.linalg.vector_norm(x=p).shape == torch.Size([])
        everything = [*model.parameters(), outside]
        flat = torch.cat([whole(q.grad).view(-1) for q in everything])
        total = nn.utils.clip_grad_norm_(everything, 1.0)
        torch.testing.assert_close(total, flat.norm(), rtol=1e-6, atol=0)
        after = torch.cat([whole(q.grad).view(-1) for q in everything])
        torch.testing.assert_close(after, flat / (total + 1e-6), rtol=2e-6, atol=1e-9)
        torch.optim.AdamW(everything, fused=True).step()
        torch.optim.SGD(everything, lr=0.1, foreach=True).step()

    on_ranks(2, body)
