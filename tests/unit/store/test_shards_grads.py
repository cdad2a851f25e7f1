"""Gradients in flat shards: accumulated as eager does, and never overwritten while held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shard_cases import deliver, gradients, on_ranks, whole
from torch import Tensor, nn

from zerofx.comm.world import World
from zerofx.runtime.store.shards import ShardStore


def expect_grads(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for name, p in model.named_parameters():
        want = expected[name]
        if want is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(whole(p.grad), want, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("size", [1, 2, 3])
class TestGradients:
    def test_accumulate_until_cleared_and_reuse_memory(self, size: int) -> None:
        def body(model: nn.Module, store: ShardStore, world: World) -> None:
            first, second = gradients(model, 0), gradients(model, 1)
            deliver(store, first)
            expect_grads(model, dict(first))
            shown = [p.grad for p in model.parameters()]
            deliver(store, second)
            expect_grads(model, {k: first[k] + second[k] for k in first})
            assert all(a is p.grad for a, p in zip(shown, model.parameters(), strict=True))
            flats = [store.grads.target(b.index)[0].data_ptr() for b in store.layout.buckets]
            del shown
            model.zero_grad()
            deliver(store, second)
            expect_grads(model, dict(second))
            model.zero_grad(set_to_none=False)
            deliver(store, first)
            expect_grads(model, dict(first))
            targets = [store.grads.target(b.index) for b in store.layout.buckets]
            assert [t.data_ptr() for t, _ in targets] == flats and all(add for _, add in targets)

        on_ranks(size, body)

    @pytest.mark.parametrize("hold", ["object", "alias", "view", "storage", "local"])
    def test_what_the_user_holds_is_not_overwritten(self, size: int, hold: str) -> None:
        holds: dict[str, Any] = {
            "object": lambda g: g,
            "alias": lambda g: g.detach(),
            "view": lambda g: (g.to_local() if hasattr(g, "to_local") else g.view(-1))[1:],
            "storage": lambda g: local(g).untyped_storage(),
            "local": lambda g: local(g),
        }

        def local(grad: Any) -> Tensor:
            return grad.to_local() if hasattr(grad, "to_local") else grad

        def read(held: Any) -> Tensor:
            if not isinstance(held, Tensor):
                held = torch.tensor([], dtype=torch.float32).set_(held)
            return whole(held) if hasattr(held, "full_tensor") else held.clone()

        def body(model: nn.Module, store: ShardStore, world: World) -> None:
            first, second = gradients(model, 0), gradients(model, 1)
            deliver(store, first)
            held = holds[hold](model[0].weight.grad)
            before = read(held)
            model.zero_grad()
            for _ in range(2):
                deliver(store, second)
                expect_grads(model, dict(second))
                assert torch.equal(read(held), before)
                model.zero_grad()

        on_ranks(size, body)

    def test_some_set_some_not(self, size: int) -> None:
        def body(model: nn.Module, store: ShardStore, world: World) -> None:
            first, second = gradients(model, 0), gradients(model, 1)
            deliver(store, first)
            kept = model[0].weight.grad  # held, cleared below: must keep its values
            model[0].weight.grad = None
            model[1].bias.grad = None
            deliver(store, second)
            cleared = ("0.weight", "1.bias")
            expect_grads(model, {k: second[k] + (0 if k in cleared else first[k]) for k in first})
            assert torch.equal(whole(kept), first["0.weight"])

        on_ranks(size, body)

    def test_the_users_own_gradient_is_added_to(self, size: int) -> None:
        def body(model: nn.Module, store: ShardStore, world: World) -> None:
            first, second = gradients(model, 0), gradients(model, 1)
            deliver(store, first)
            old = model[0].bias.grad
            model[0].bias.grad = old * 0.5
            mine = model[0].bias.grad
            model[1].weight.grad = torch.ones_like(model[1].weight)
            deliver(store, second)
            expected = {k: first[k] + second[k] for k in first}
            expected["0.bias"] = first["0.bias"] * 0.5 + second["0.bias"]
            expected["1.weight"] = 1 + second["1.weight"]
            expect_grads(model, dict(expected))
            assert torch.equal(whole(old), first["0.bias"])
            assert model[0].bias.grad is mine  # with the sum, as in eager PyTorch

        on_ranks(size, body)

    def test_frozen_and_unused_parameters_get_none(self, size: int) -> None:
        def body(model: nn.Module, store: ShardStore, world: World) -> None:
            full = gradients(model, 0)
            model[1].weight.requires_grad_(False)
            used = [n for n in full if n not in ("0.bias", "1.weight")]
            deliver(store, full, used)
            expect_grads(model, {n: full[n] if n in used else None for n in full})
            more = gradients(model, 1)
            model[1].weight.requires_grad_(True)
            deliver(store, more)  # another program uses them all
            expect_grads(model, {n: more[n] + (full[n] if n in used else 0) for n in full})

        on_ranks(size, body)
