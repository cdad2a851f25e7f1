"""Optimizers over shards: bit-equal to the unsharded run, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from shard_cases import build, deliver, gradients, on_ranks, small_model, whole, wholes
from simulated import run_ranks
from torch import Tensor, nn

import zerofx
from zerofx.comm.world import World
from zerofx.errors import ShardError, ZerofxError
from zerofx.runtime.store.optimizer import check_optimizer, swap_optimizer
from zerofx.runtime.store.shards import ShardStore

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.1},
    "NAdam": {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.5},
    "RMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True},
    "ASGD": {"lr": 0.1, "t0": 1},
    "Rprop": {"lr": 0.1},
}
FORMS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
CASES = [(n, f) for n in OPTIONS for f in FORMS if "fused" not in f or n in FUSED]


def make(name: str, params: Any, **more: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(params, **{**OPTIONS[name], **more})


def unsharded(name: str, steps: int = 5, **form: Any) -> dict[str, Tensor]:
    model = small_model()
    optimizer = make(name, model.parameters(), **form)
    for step in range(steps):
        for key, grad in gradients(model, step).items():
            model.get_parameter(key).grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_equals_the_unsharded_run_bitwise(name: str, form: dict[str, Any]) -> None:
    expected = unsharded(name, **form)

    def body(model: nn.Module, store: ShardStore, world: World) -> dict[str, Tensor]:
        optimizer = make(name, model.parameters(), **form)
        check_optimizer(optimizer)
        for step in range(5):
            deliver(store, gradients(model, step))
            before = store.writes
            optimizer.step()
            assert store.writes > before
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return wholes(model)

    for size in (1, 2, 3):
        for got in on_ranks(size, body):
            for key, value in expected.items():
                assert torch.equal(got[key], value), (size, key)


def test_tensor_learning_rate() -> None:
    expected = unsharded("AdamW", lr=torch.tensor(0.1), fused=True)

    def body(model: nn.Module, store: ShardStore, world: World) -> dict[str, Tensor]:
        optimizer = make("AdamW", model.parameters(), lr=torch.tensor(0.1), fused=True)
        for step in range(5):
            deliver(store, gradients(model, step))
            optimizer.step()
            optimizer.zero_grad()
        return wholes(model)

    for got in on_ranks(2, body):
        assert all(torch.equal(got[k], v) for k, v in expected.items())


class Vectors(torch.optim.Optimizer):
    """A third-party optimizer that looks at rows of the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad.mean(dim=-1, keepdim=True))


REFUSALS = {
    "LBFGS": "flat vectors",
    "SparseAdam": "dense",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_by_name_with_the_reason(name: str) -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        params = [p for p in model.parameters() if p.ndim == 2]
        optimizer = getattr(torch.optim, name)(params)
        with pytest.raises(ShardError, match=rf"{name} is not supported .*{REFUSALS[name]}"):
            check_optimizer(optimizer)

    on_ranks(2, body)


def test_a_refused_optimizer_raises_at_its_first_step() -> None:
    """Users make optimizers where nothing of ours is asked."""

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        optimizer = torch.optim.LBFGS([p for p in model.parameters() if p.ndim == 2])
        deliver(store, gradients(model, 0))
        with pytest.raises(ShardError, match=r"0.weight: .* LBFGS needs whole .*AdamW"):
            optimizer.step(lambda: torch.zeros(()))

    on_ranks(2, body)


def test_an_unknown_optimizer_is_refused_by_what_it_does() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        optimizer = Vectors(model.parameters(), {})
        check_optimizer(optimizer)
        deliver(store, gradients(model, 0))
        with pytest.raises(ShardError, match=r"0.weight: mean .*Vectors.*optim.whole_matrices"):
            optimizer.step()

    on_ranks(2, body)


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon"])
def test_where_nothing_is_sharded_every_optimizer_works(name: str) -> None:
    def step(model: nn.Module) -> None:
        params = [p for p in model.parameters() if p.ndim == 2]
        optimizer = getattr(torch.optim, name)(params)
        for index in range(3):
            for p, g in zip(params, grads(model, index), strict=True):
                p.grad = g
            optimizer.step(lambda: sum((p * p).sum() for p in params))

    def grads(model: nn.Module, index: int) -> list[Tensor]:
        full = gradients(model, index)
        return [full[n] for n, p in model.named_parameters() if p.ndim == 2]

    expected = small_model()
    step(expected)
    model = small_model()
    build(model, World.single())
    step(model)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_swap_keeps_groups_state_and_steps(size: int) -> None:
    """An optimizer that has stepped before compile goes on as if nothing had happened."""
    expected = unsharded("AdamW", fused=True)
    base = small_model()
    params = list(base.parameters())
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.1}]
    first = make("AdamW", groups, fused=True)
    for step in range(2):
        for key, grad in gradients(base, step).items():
            base.get_parameter(key).grad = grad
        first.step()
        first.zero_grad()

    def rank(world: World) -> dict[str, Tensor]:
        model, optimizer = copy.deepcopy((base, first))
        store = build(model, world)
        held = optimizer.param_groups[0]["params"]
        swap_optimizer(optimizer, store.replaced)
        assert optimizer.param_groups[0]["params"] is held
        assert held == [model[0].weight, model[0].bias] or held[0] is model[0].weight
        assert [len(g["params"]) for g in optimizer.param_groups] == [2, 3]
        for step in range(2, 5):
            deliver(store, gradients(model, step))
            optimizer.step()
            optimizer.zero_grad()
        return wholes(model)

    for got in run_ranks(size, rank):
        assert all(torch.equal(got[k], v) for k, v in expected.items())


def test_swap_refuses_what_it_cannot_cut_and_leaves_the_optimizer_alone() -> None:
    def rank(world: World) -> None:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        old = model[0].weight
        optimizer.state[old]["rows"] = torch.zeros(33)
        store = build(model, world)
        with pytest.raises(ShardError, match=r"0.weight: .*'rows' has shape \[33\].*\[33, 13\]"):
            swap_optimizer(optimizer, store.replaced)
        assert optimizer.param_groups[0]["params"][0] is old
        lbfgs = torch.optim.LBFGS([old])
        with pytest.raises(ShardError, match="LBFGS is not supported"):
            swap_optimizer(lbfgs, store.replaced)
        assert lbfgs.param_groups[0]["params"][0] is old

    base = small_model()
    run_ranks(2, rank)


@pytest.mark.parametrize("overflow", [False, True])
def test_grad_scaler_finds_infinities_of_every_rank(overflow: bool) -> None:
    """An infinity in one rank's piece must skip the step on all ranks."""

    def body(model: nn.Module, store: ShardStore, world: World) -> tuple[bool, float, Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = make("SGD", model.parameters())
        scaler.scale(torch.ones(()))
        full = {k: 4 * g for k, g in gradients(model, 0).items()}
        if overflow:
            full["0.weight"][0, 0] = torch.inf
        deliver(store, full)
        before = whole(model[0].weight)
        scaler.unscale_(optimizer)
        grad = whole(model[1].weight.grad)
        scaler.step(optimizer)
        scaler.update()
        return not torch.equal(before, whole(model[0].weight)), scaler.get_scale(), grad

    for stepped, scale, grad in on_ranks(3, body):
        assert stepped is not overflow
        assert scale == (2.0 if overflow else 4.0)
        assert torch.equal(grad, gradients(small_model(), 0)["1.weight"])


def give_a_refused_optimizer(folder: str) -> list[str]:
    model = zerofx.compile(nn.Linear(8, 8, bias=False), {"kernels": "aten"})
    plain = nn.Linear(8, 8, bias=False)
    lbfgs = torch.optim.LBFGS(model.parameters())
    messages: list[str] = []
    calls: list[Callable[[], Any]] = [
        lambda: zerofx.save(folder, model, lbfgs),
        lambda: zerofx.load(folder, model, lbfgs),
        lambda: zerofx.compile(
            plain, {"kernels": "aten"}, optimizer=torch.optim.LBFGS([plain.weight])
        ),
    ]
    for give in calls:
        if len(messages) == 1:
            zerofx.save(folder, model)
        with pytest.raises(ZerofxError) as caught:
            give()
        messages.append(str(caught.value))
    return messages


def test_every_way_in_refuses_by_name(pool: Pool, tmp_path: Path) -> None:
    for messages in pool.run(2, give_a_refused_optimizer, str(tmp_path / "snapshot")):
        assert all("LBFGS is not supported on sharded parameters" in m for m in messages), messages
