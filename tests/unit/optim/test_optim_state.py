"""The states of zerofx.optim: torch's names and shapes, exchanged with torch's optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
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
    theirs,
)
from pool import Pool
from shard_cases import build, deliver, gradients, on_ranks, small_model, wholes
from simulated import run_ranks
from snapshot_cases import assert_same, everything
from torch import Tensor, nn

import zerofx
from zerofx.comm.world import World
from zerofx.errors import ShardError
from zerofx.runtime.store.shards import ShardStore

# those that torch has, with the forms that torch runs them in
TORCH = [n for n, (_, kind, _) in OPTIMIZERS.items() if kind.__module__.startswith("torch.optim")]
FORMS: list[dict[str, Any]] = [{"foreach": False}, {"fused": True}]


def steps(
    model: nn.Module, store: ShardStore, optimizer: Any, first: int, last: int, late: str = "1.bias"
) -> None:
    """Step with full gradients; the parameter `late` joins in step 1, so that counts differ."""
    for step in range(first, last):
        names = [n for n, _ in model.named_parameters() if n != late or step > 0]
        deliver(store, gradients(model, step), names)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("to_ours", [False, True])
def test_state_dicts_interchange(name: str, form: dict[str, Any], to_ours: bool) -> None:
    """Three steps with one optimizer and three with the other are six with torch's."""
    # torch's fused SGD fails where some parameters have momentum and others not yet
    late = "" if "fused" in form and OPTIMIZERS[name][0] == "SGD" else "1.bias"

    def body(model: nn.Module, store: ShardStore, world: World) -> dict[str, Tensor]:
        torchs = theirs(name, mixed_groups(model), **form)
        mine = ours(name, mixed_groups(model))
        first, second = (torchs, mine) if to_ours else (mine, torchs)
        steps(model, store, first, 0, 3, late)
        second.load_state_dict(first.state_dict())
        assert first.state_dict()["param_groups"][1]["lr"] == second.param_groups[1]["lr"]
        steps(model, store, second, 3, 6, late)
        return wholes(model)

    def expected(model: nn.Module, store: ShardStore, world: World) -> dict[str, Tensor]:
        steps(model, store, theirs(name, mixed_groups(model), **form), 0, 6, late)
        return wholes(model)

    for size in (1, 2):
        for found, right in zip(on_ranks(size, body), on_ranks(size, expected), strict=True):
            assert distance(found, right) <= 1e-6


@pytest.mark.parametrize("name", TORCH)
def test_states_have_torchs_keys_shapes_and_values(name: str) -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        plain = small_model()
        torchs, mine = theirs(name, plain.parameters()), ours(name, model.parameters())
        for step in range(3):
            for key, grad in gradients(plain, step).items():
                plain.get_parameter(key).grad = grad
            deliver(store, gradients(model, step))
            torchs.step()
            mine.step()
            mine.zero_grad()
        right, found = torchs.state_dict(), mine.state_dict()
        assert found["param_groups"] == right["param_groups"]
        assert found["state"].keys() == right["state"].keys()
        for number, values in right["state"].items():
            state = {k: v for k, v in found["state"][number].items() if v is not None}
            assert state.keys() == {k for k, v in values.items() if v is not None}
            for key, value in state.items():
                assert (value.shape, value.dtype) == (values[key].shape, values[key].dtype)
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                torch.testing.assert_close(whole, values[key], rtol=1e-5, atol=2e-7)

    for size in (1, 2):
        on_ranks(size, body)


def test_step_counts_are_separate_numbers() -> None:
    """Torch's optimizers add 1 to each parameter's count, so a shared one would run ahead."""
    model = small_model()
    optimizer = zerofx.optim.AdamW(model.parameters())
    model(torch.ones(2, 13)).sum().backward()
    optimizer.step()
    counts = [s["step"] for s in optimizer.state.values()]
    counts[0].add_(1)
    assert [int(c) for c in counts] == [2, 1, 1, 1, 1]


def test_whole_states_are_cut() -> None:
    """The state of a plain model's optimizer loads into that of its shards."""
    plain = small_model()
    first = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(4):
        for key, grad in gradients(plain, step).items():
            plain.get_parameter(key).grad = grad
        first.step()
        if step == 1:
            weights, saved = copy.deepcopy((plain.state_dict(), first.state_dict()))
    expected = wholes(plain)

    def rank(world: World) -> dict[str, Tensor]:
        model = small_model()
        model.load_state_dict(weights)
        store = build(model, world)
        optimizer = zerofx.optim.AdamW(model.parameters(), lr=0.1)
        optimizer.load_state_dict(copy.deepcopy(saved))
        for step in range(2, 4):
            deliver(store, gradients(model, step))
            optimizer.step()
            optimizer.zero_grad()
        wrong = copy.deepcopy(saved)
        wrong["state"][0]["exp_avg"] = torch.zeros(5)
        with pytest.raises((ShardError, zerofx.errors.OptimizerError), match=r"0.weight: .*\[5\]"):
            optimizer.load_state_dict(wrong)
        return wholes(model)

    for size in (1, 2, 3):
        for found in run_ranks(size, rank):
            assert distance(found, expected) <= 1e-6


@pytest.mark.parametrize("size", [1, 2])
def test_state_that_is_replaced_or_cleared_is_seen(size: int) -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        optimizer = zerofx.optim.AdamW(model.parameters())
        steps(model, store, optimizer, 0, 2)
        param = next(model.parameters())
        optimizer.state[param]["exp_avg"] = torch.full_like(param, 3.0)
        steps(model, store, optimizer, 2, 3)
        expected = 0.9 * 3.0 + 0.1 * gradients(model, 2)["0.weight"]
        seen = optimizer.state[param]["exp_avg"]
        torch.testing.assert_close(seen.full_tensor() if size > 1 else seen, expected)
        optimizer.state.clear()
        steps(model, store, optimizer, 3, 4)
        assert int(optimizer.state[param]["step"]) == 1

    on_ranks(size, body)


def test_an_optimizer_built_before_compile_is_swapped(pool: Pool) -> None:
    pool.run(2, built_before)


def built_before() -> None:
    found = []
    for early in (False, True):
        model = mixed_model()
        if early:
            optimizer = ours("adamw", mixed_groups(model))
            model = zerofx.compile(model, {"kernels": "aten"}, optimizer=optimizer)
        else:
            model = zerofx.compile(model, {"kernels": "aten"})
            optimizer = ours("adamw", mixed_groups(model))
        for step in range(3):
            model(*mixed_batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(everything(model, optimizer))
    assert_same(found[1], found[0])


def test_copies_are_independent() -> None:
    model = small_model()
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.5)
    expected = small_model()
    plain = torch.optim.AdamW(expected.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            model, optimizer = copy.deepcopy((model, optimizer))
        for m, o in ((model, optimizer), (expected, plain)):
            for key, grad in gradients(m, step).items():
                m.get_parameter(key).grad = grad
            if o is plain:
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            o.step()
    assert distance(wholes(model), wholes(expected)) <= 1e-6


# -- zerofx.save and zerofx.load, at another world size -----------------------------------------
def compiled(plan: dict[str, Any], name: str, kind: str) -> Any:
    model = zerofx.compile(mixed_model(), {"kernels": "aten", **plan})
    return model, (ours if kind == "ours" else theirs)(name, mixed_groups(model))


def leg(folder: str, plan: dict[str, Any], names: list[str], kinds: tuple[str, str]) -> list[Any]:
    """Train with the first kind and save; load into the second and return what it holds."""
    saver, loader = kinds
    found = []
    for name in names:
        path = f"{folder}/{name}"
        if saver:
            model, optimizer = compiled(plan, name, saver)
            for step in range(3):
                model(*mixed_batch(step, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            zerofx.save(path, model, optimizer)
        if loader:
            model, optimizer = compiled(plan, name, loader)
            zerofx.load(path, model, optimizer)
        loaded = everything(model, optimizer)
        model(*mixed_batch(3, 0)).backward()
        optimizer.step()
        found.append((loaded, wholes(model)))
    return found


@pytest.mark.parametrize(
    ("saver", "loader", "worlds"),
    [("ours", "theirs", (2, 1)), ("theirs", "ours", (1, 2)), ("ours", "ours", (2, 1))],
)
def test_saved_by_one_loaded_by_the_other(
    pool: Pool, tmp_path: Path, saver: str, loader: str, worlds: tuple[int, int]
) -> None:
    names = ["adamw", "momentum"] if "theirs" in (saver, loader) else ["lion", "lamb"]
    plan = {"stage": 3}
    expected = pool.run(worlds[0], leg, str(tmp_path), plan, names, (saver, ""))[0]
    for found in pool.run(worlds[1], leg, str(tmp_path), plan, names, ("", loader)):
        for (mine, after), (right, right_after) in zip(found, expected, strict=True):
            tensors = [k for k, v in right.items() if isinstance(v, Tensor)]
            assert_same({k: mine[k] for k in tensors}, {k: right[k] for k in tensors})
            assert distance(after, right_after) <= 1e-6
