"""Optimizers that need whole matrices: each is stepped by its owner, with the user's own class."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from matrix_optimizers import Shampoo, Soap
from shard_cases import build, deliver, gradients, on_ranks, small_model, wholes
from simulated import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from zerofx.comm.world import World
from zerofx.errors import ArgumentError, DesyncError, ShardError
from zerofx.optim import whole_matrices
from zerofx.runtime.store.optimizer import swap_optimizer
from zerofx.runtime.store.shards import ShardStore

LARGEST = 33 * 13
Make = Callable[[Any], torch.optim.Optimizer]


def adafactor_of_transformers(params: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params, lr=0.01, relative_step=False, warmup_init=False)


MADE: dict[str, Make] = {
    "Muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "transformers": adafactor_of_transformers,
    "Shampoo": lambda p: whole_matrices(Shampoo(p)),
    "Soap": lambda p: whole_matrices(Soap(p)),
}


def give(model: nn.Module, store: ShardStore | None, step: int) -> None:
    full = gradients(model, step)
    if store is not None:
        deliver(store, full)
        return
    for name, grad in full.items():
        model.get_parameter(name).grad = grad


def train(
    model: nn.Module, store: ShardStore | None, make: Make, steps: range = range(4)
) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """Train matrices with what `make` makes and the rest with AdamW, rates falling."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer, adamw = make(matrices), torch.optim.AdamW(others)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in steps:
        give(model, store, step)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        for each in (optimizer, adamw, schedule):
            each.step()
        model.zero_grad()
    return wholes(model), optimizer


def num_elements(optimizer: torch.optim.Optimizer) -> int:
    return sum(s["momentum_buffer"].numel() for s in optimizer.state.values())


IMPORTS_LONG = pytest.param("transformers", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["Muon", "Adafactor", IMPORTS_LONG, "Shampoo", "Soap"])
def test_equals_the_unsharded_run_bitwise(name: str) -> None:
    expected, _ = train(small_model(), None, MADE[name])

    def body(model: nn.Module, store: ShardStore, world: World) -> tuple[dict[str, Tensor], int]:
        before = store.writes
        values, optimizer = train(model, store, MADE[name])
        assert store.writes > before
        return values, len(optimizer.state)

    for size, shard_size in ((1, 1), (2, 2), (4, 4), (4, 2)):
        answers = on_ranks(size, body, shard_size=shard_size)
        for got, _ in answers:
            assert all(torch.equal(got[k], v) for k, v in expected.items()), size
        groups = size // shard_size
        assert sum(held for _, held in answers) == 3 * groups, "each matrix has one owner"


def test_a_rank_holds_its_share_and_at_most_one_matrix_more() -> None:
    torch.manual_seed(0)
    widths = [9, 40, 3, 21, 21, 8, 60, 5]
    base = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    matrices = [p.numel() for p in base.parameters() if p.ndim == 2]

    def body(model: nn.Module, store: ShardStore, world: World) -> int:
        return num_elements(train(model, store, MADE["Muon"], range(1))[1])

    for size, shard_size in ((2, 2), (3, 3), (4, 2)):
        held = on_ranks(size, body, base, shard_size)
        assert sum(held) == sum(matrices) * size // shard_size
        assert all(n <= sum(matrices) / shard_size + max(matrices) for n in held), held


def test_an_optimizer_that_has_stepped_before_compile_goes_on() -> None:
    def go_on(model: nn.Module, store: ShardStore | None, optimizer: Any) -> dict[str, Tensor]:
        for step in (2, 3):
            give(model, store, step)
            optimizer.step()
            model.zero_grad()
        return wholes(model)

    def rank(world: World) -> tuple[dict[str, Tensor], int]:
        model, optimizer = copy.deepcopy((base, first))
        whole_matrices(optimizer)
        store = build(model, world)
        swap_optimizer(optimizer, store.replaced)
        return go_on(model, store, optimizer), len(optimizer.state)

    base = small_model()
    first = Shampoo(base.parameters())
    for step in range(2):
        give(base, None, step)
        first.step()
        base.zero_grad()
    answers = run_ranks(2, rank)
    expected = go_on(base, None, first)
    assert sum(held for _, held in answers) == 5
    for got, _ in answers:
        assert all(torch.equal(got[k], v) for k, v in expected.items())


def test_without_the_call_it_is_refused_and_with_it_it_trains() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        optimizer = Soap(model.parameters())
        give(model, store, 0)
        with pytest.raises(ShardError, match=r"Soap needs whole.*zerofx.optim.whole_matrices"):
            optimizer.step()
        assert whole_matrices(optimizer) is optimizer
        optimizer.state.clear()
        optimizer.step()

    on_ranks(2, body)


def test_what_cannot_step_one_matrix_by_itself_is_refused() -> None:
    class Holder(Soap):
        def __init__(self, params: Any) -> None:
            self.mine = list(params)
            super().__init__(self.mine)

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        with pytest.raises(ShardError, match="Holder keeps parameters in its attribute 'mine'"):
            whole_matrices(Holder(model.parameters()))
        with pytest.raises(ShardError, match="LBFGS is not supported"):
            whole_matrices(torch.optim.LBFGS(model.parameters()))
        with pytest.raises(ArgumentError, match="optimizer is of type list"):
            whole_matrices([])  # type: ignore[type-var]

    on_ranks(2, body)


def test_hooks_closures_and_added_groups_work_as_in_one_process() -> None:
    def loop(model: nn.Module, store: ShardStore | None) -> tuple[dict[str, Tensor], Any, list]:
        weights = [p for p in model.parameters() if p.ndim == 2]
        seen: list[Any] = []
        optimizer = whole_matrices(Shampoo(weights[:1]))
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))

        def closure() -> float:
            model.zero_grad()
            give(model, store, len(seen))
            return 0.5

        seen.append(optimizer.step(closure))
        optimizer.add_param_group({"params": weights[1:], "lr": 0.3})
        optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
        seen.append(optimizer.step(closure=closure))
        weights[1].grad = None
        optimizer.step()
        return wholes(model), optimizer.param_groups[1]["lr"], seen

    expected = loop(small_model(), None)
    for got in on_ranks(2, lambda model, store, world: loop(model, store)):
        assert all(torch.equal(got[0][k], v) for k, v in expected[0].items())
        assert got[1:] == expected[1:]


def test_a_state_dict_is_of_one_rank_and_takes_a_whole_one() -> None:
    expected, plain = train(small_model(), None, MADE["Adafactor"], range(4))
    _, early = train(small_model(), None, MADE["Adafactor"], range(2))
    saved = early.state_dict()

    def body(model: nn.Module, store: ShardStore, world: World) -> dict[str, Tensor]:
        _, optimizer = train(model, store, MADE["Adafactor"], range(2))
        mine = optimizer.state_dict()
        if mine["state"]:
            with pytest.raises(ShardError, match="full_optimizer_state_dict"):
                torch.save(mine, io.BytesIO())
        with pytest.raises(ShardError, match=r"Use zerofx.save\(dir, model, optimizer\)"):
            get_optimizer_state_dict(nn.Sequential(model), optimizer)
        for state in (mine, saved):
            optimizer.load_state_dict(state)
            assert len(optimizer.state) == len(mine["state"])
        for step in (2, 3):
            give(model, store, step)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()
        return wholes(model)

    for got in on_ranks(3, body):
        for name in ("0.weight", "1.weight", "2.weight"):
            assert torch.equal(got[name], expected[name])
    assert plain.param_groups[0]["lr"] == saved["param_groups"][0]["lr"] / 2


def test_an_owner_that_fails_is_named_by_the_others() -> None:
    class Failing(Shampoo):
        def step(self, closure: Any = None) -> Any:
            if any(p.numel() == LARGEST for g in self.param_groups for p in g["params"]):
                raise ArithmeticError("no inverse")
            return super().step(closure)

    def body(model: nn.Module, store: ShardStore, world: World) -> str:
        optimizer = whole_matrices(Failing(model.parameters()))
        give(model, store, 0)
        with pytest.raises((ArithmeticError, DesyncError)) as caught:
            optimizer.step()
        return str(caught.value)

    first, second = on_ranks(2, body)
    assert first == "no inverse" and "rank 0" in second and "no inverse" in second
