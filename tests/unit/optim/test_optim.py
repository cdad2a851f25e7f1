"""zerofx.optim: each optimizer equals its counterpart, sharded or not, clipped or not."""

from __future__ import annotations

import copy
import os
from itertools import product
from typing import Any

import pytest
import torch
from optim_cases import (
    OPTIMIZERS,
    distance,
    mixed_batch,
    mixed_groups,
    mixed_model,
    ours,
    reference,
    theirs,
)
from pool import Pool
from shard_cases import build, deliver, gradients, on_ranks, small_model, whole, wholes
from torch import Tensor, nn

import zerofx
from zerofx.comm.world import World
from zerofx.optim.in_backward import is_stepped
from zerofx.runtime.store.shards import ShardStore

STEPS = 20
CLIP = 0.3


def here() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def train(
    plan: dict[str, Any], names: list[str], clips: tuple[float | None, ...]
) -> dict[tuple[str, float | None], Any]:
    """Return how far parameters and norms lie from one process's, relative, for each optimizer."""
    rank, world = here()
    compiled = zerofx.compile(mixed_model(), {"kernels": "aten", **plan})
    for step in (0, 1):  # both programs, which the copies share
        compiled(*mixed_batch(step, rank)).backward()
    compiled.zero_grad()
    found: dict[tuple[str, float | None], Any] = {}
    for name, clip in product(names, clips):
        expected, norms = reference(lambda m: theirs(name, mixed_groups(m)), world, STEPS, clip)  # noqa: B023
        model = copy.deepcopy(compiled)
        optimizer = ours(name, mixed_groups(model), max_grad_norm=clip)
        off = 0.0
        for step in range(STEPS):
            model(*mixed_batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if clip is not None:
                off = max(off, abs(float(optimizer.grad_norm) / norms[step] - 1))
        found[name, clip] = distance(model.state_dict(), expected), off
    return found


def judge(results: list[dict[tuple[str, float | None], Any]]) -> None:
    for found in results:
        assert max(max(pair) for pair in found.values()) <= 1e-6, found


@pytest.mark.parametrize(
    ("world", "stage", "clips"),
    [(1, 0, (CLIP,)), (1, 3, (None,)), (2, 0, (None,)), (2, 3, (CLIP,))],
)
def test_trains_like_one_process(pool: Pool, world: int, stage: int, clips: Any) -> None:
    judge(pool.run(world, train, {"stage": stage}, list(OPTIMIZERS), clips))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 2), (2, 1), (2, 2), (4, 0), (4, 3)])
def test_trains_like_one_process_everywhere(pool: Pool, world: int, stage: int) -> None:
    judge(pool.run(world, train, {"stage": stage}, list(OPTIMIZERS), (None, CLIP), timeout_s=600))


@pytest.mark.slow
@pytest.mark.parametrize("axis", [1, 2])
def test_replicated_shards(pool: Pool, axis: int) -> None:
    plan = {"stage": 3, "shard_axis_size": axis}
    judge(pool.run(4, train, plan, ["adamw", "lamb"], (None, CLIP)))


def unsharded(name: str, steps: int = STEPS) -> dict[str, Tensor]:
    model = small_model()
    optimizer = theirs(name, mixed_groups(model))
    for step in range(steps):
        for key, grad in gradients(model, step).items():
            if key in given(step):
                model.get_parameter(key).grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model)


def given(step: int) -> list[str]:
    """Return which parameters have a gradient in a step."""
    names = [n for n, _ in small_model().named_parameters()]
    return [
        n for n in names if not (n == "1.weight" and step % 4 == 1) and (step, n) != (0, names[0])
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_that_miss_some_steps(name: str) -> None:
    """Runs are cut there, and parameters of one run may count different steps."""
    expected = unsharded(name)

    def body(model: nn.Module, store: ShardStore, world: World) -> dict[str, Tensor]:
        optimizer = ours(name, mixed_groups(model))
        for step in range(STEPS):
            deliver(store, gradients(model, step), given(step))
            before = store.writes
            optimizer.step()
            assert store.writes > before
            optimizer.zero_grad(set_to_none=True)
        return wholes(model)

    for size in (1, 2, 4):
        for found in on_ranks(size, body):
            assert distance(found, expected) <= 1e-6, size


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_the_user_assigned(size: int) -> None:
    expected = unsharded("adamw", 1)

    def body(model: nn.Module, store: ShardStore, world: World) -> dict[str, Tensor]:
        optimizer = ours("adamw", mixed_groups(model))
        full = gradients(model, 0)
        deliver(store, full, given(0)[1:])
        first = given(0)[0]
        param = model.get_parameter(first)
        param.grad = torch.zeros_like(param).copy_(full[first])
        optimizer.step()
        return wholes(model)

    for found in on_ranks(size, body):
        assert distance(found, expected) <= 1e-6


def test_gradients_of_other_strides_are_not_taken_as_flat() -> None:
    """A transposed view of a gradient begins where the gradient does."""

    def body(model: nn.Module, store: ShardStore, world: World) -> list[dict[str, Tensor]]:
        found = []
        for transposed in (False, True):
            mine = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9, bias=False))
            with torch.no_grad():
                for p in mine.parameters():
                    p.fill_(1.0)
            held = build(mine, world)
            optimizer = zerofx.optim.SGD(mine.parameters(), lr=1.0)
            full = gradients(mine, 0)
            deliver(held, {**full, "0.weight": full["0.weight"].t()} if transposed else full)
            if transposed:
                mine[0].weight.grad = mine[0].weight.grad.t()
            optimizer.step()
            found.append(wholes(mine))
        return found

    ((straight, transposed),) = on_ranks(1, body)
    assert distance(transposed, straight) == 0.0


def test_a_step_takes_one_run_a_bucket() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> list[int]:
        optimizer = zerofx.optim.AdamW(model.parameters())
        deliver(store, gradients(model, 0))
        (work,) = optimizer._groups.works(
            optimizer, optimizer._groups.current(optimizer), is_stepped
        )
        return [run.numel for run, _ in work]

    (numels,) = on_ranks(1, body)
    # weight and bias of each layer, with the padding between them
    assert numels == [13 * 33 + 3 + 33, 33 * 7 + 9 + 7, 7]


def test_gradient_shards_are_not_held_between_steps() -> None:
    """Else the next backward would have to leave them alone and allocate others."""

    def body(model: nn.Module, store: ShardStore, world: World) -> bool:
        optimizer = zerofx.optim.AdamW(model.parameters(), max_grad_norm=1.0)
        where = []
        for step in range(3):
            deliver(store, gradients(model, step))
            where.append([g.flat.data_ptr() for g in store.grads.shards.values()])
            optimizer.step()
            optimizer.zero_grad()
        return where[0] == where[1] == where[2]

    for size in (1, 2):
        assert all(on_ranks(size, body))


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_one_cycle_with_momentum_cycling(name: str) -> None:
    def run(model: nn.Module, optimizer: Any, give: Any) -> dict[str, Tensor]:
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.02, total_steps=STEPS + 1, base_momentum=0.8, max_momentum=0.95
        )
        for step in range(STEPS):
            give(gradients(model, step))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return wholes(model)

    plain = small_model()

    def assign(full: dict[str, Tensor]) -> None:
        for key, grad in full.items():
            plain.get_parameter(key).grad = grad

    expected = run(plain, theirs(name, plain.parameters()), assign)

    def body(model: nn.Module, store: ShardStore, world: World) -> dict[str, Tensor]:
        optimizer = ours(name, model.parameters())
        return run(model, optimizer, lambda full: deliver(store, full))

    for size in (1, 2):
        for found in on_ranks(size, body):
            assert distance(found, expected) <= 1e-6


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "lamb"])
def test_grad_scaler_unscales_within_the_step(name: str, overflow: bool) -> None:
    """An infinity in one rank's piece skips the step on all ranks and changes nothing."""
    base = small_model()
    plain = theirs(name, base.parameters())
    for key, grad in gradients(base, 0).items():
        base.get_parameter(key).grad = grad
    torch.nn.utils.clip_grad_norm_(base.parameters(), CLIP)
    plain.step()

    def body(model: nn.Module, store: ShardStore, world: World) -> tuple[dict[str, Tensor], Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = ours(name, model.parameters(), max_grad_norm=CLIP)
        scaler.scale(torch.ones(()))
        full = {k: 64 * g for k, g in gradients(model, 0).items()}
        if overflow:
            full["0.weight"][0, 0] = torch.inf
        deliver(store, full)
        scaler.step(optimizer)
        scaler.update()
        return wholes(model), (scaler.get_scale(), optimizer.grad_norm, len(optimizer.state))

    norm = torch.cat([g.flatten() for g in gradients(small_model(), 0).values()]).norm()
    for found, (scale, seen, states) in on_ranks(3, body):
        if overflow:
            assert distance(found, wholes(small_model())) == 0.0 and scale == 32.0 and not states
        else:
            assert distance(found, wholes(base)) <= 1e-6 and scale == 64.0
            torch.testing.assert_close(seen, norm.double(), rtol=1e-6, atol=0.0)


def test_a_norm_that_is_not_finite_reaches_every_parameter() -> None:
    """As after clip_grad_norm_: silence would hide it."""

    def body(model: nn.Module, store: ShardStore, world: World) -> bool:
        optimizer = zerofx.optim.AdamW(model.parameters(), max_grad_norm=1.0)
        full = gradients(model, 0)
        full["1.bias"][0] = torch.nan
        deliver(store, full)
        optimizer.step()
        return all(bool(whole(p).isnan().any()) for p in model.parameters())

    assert all(on_ranks(2, body))


def test_closure_and_parameters_of_no_compiled_model() -> None:
    plain, mine = small_model(), small_model()
    first = torch.optim.AdamW(plain.parameters(), lr=0.1)
    second = zerofx.optim.AdamW(mine.parameters(), lr=0.1)
    for model, optimizer in ((plain, first), (mine, second)):
        for _ in range(3):

            def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(2, 13)).square().sum()
                loss.backward()
                return loss

            assert optimizer.step(closure).requires_grad
    assert distance(wholes(mine), wholes(plain)) <= 1e-6
