"""Tiled models train, save and load as whole ones: one parameter to the user, k to the schedule."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from pool import Pool
from snapshot_cases import assert_same
from test_snapshot_resume import distance, run_leg
from test_training import judge
from tile_cases import Pair
from torch import Tensor
from training import train_cell

import zerofx
from zerofx import optim

MLP = {"blocks.*.mlp": 4}
MORE = {"blocks.*.mlp.up": 2, "blocks.*.attn": 2, "position": 2}
CELLS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"tiling": MLP}, {"optimizer": "sgd"}),
    (2, {"tiling": MORE, "activations": "recompute"}, {"optimizer": "adamw", "clip": 0.5}),
    (2, {"tiling": {**MLP, "position": 2}, "prefetch": 2}, {"accumulation": 3, "clip": 0.5}),
    (4, {"tiling": MLP, "shard_axis_size": 2}, {"optimizer": "adamw-fused"}),
    (4, {"tiling": MLP, "prefetch": 0}, {"optimizer": "sgd", "accumulation": 2}),
    (1, {"tiling": MLP}, {"optimizer": "sgd"}),
    (2, {"tiling": "auto", "memory_budget": "300KiB"}, {"optimizer": "sgd"}),
]


SLOW = {1, 2, 3, 4}  # cells that test-all runs


@pytest.mark.parametrize(
    "cell",
    [pytest.param(i, marks=pytest.mark.slow) if i in SLOW else i for i in range(len(CELLS))],
)
def test_same_training(pool: Pool, cell: int) -> None:
    world, plan, options = CELLS[cell]
    for report in pool.run(world, train_cell, "gpt", {"kernels": "aten", **plan}, options):
        judge(report, options.get("optimizer", "sgd"))


def test_inductor_trains_alike(pool: Pool) -> None:
    for report in pool.run(2, train_cell, "gpt", {"tiling": MORE}, {}, timeout_s=300):
        judge(report, "sgd")


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def both(tiling: Any, seed: int = 0, **plan: Any) -> tuple[Any, torch.nn.Module, int]:
    """Return a tiled model, the plain one, and this rank."""
    torch.manual_seed(seed)
    plain = Pair()
    model = zerofx.compile(copy.deepcopy(plain), {"kernels": "aten", "tiling": tiling, **plan})
    return model, plain, model._engine.world.rank


def reference_grads(plain: torch.nn.Module, batches: list[Tensor], world: int = 2) -> None:
    for x in batches:
        (plain(x) / world).backward()


def largest_gap(model: Any, plain: torch.nn.Module) -> float:
    """Return the largest difference between gradients, relative to the gradient's largest."""
    pairs = zip(model.named_parameters(), plain.named_parameters(), strict=True)
    return max(
        float((p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max())
        for (_, p), (_, q) in pairs
    )


def sum_without_sync() -> tuple[float, float, bool]:
    model, plain, rank = both({"up": 4, "down": 2})
    with model.no_sync():
        model(batch(rank, 0)).backward()
        model.zero_grad()  # drops the sum of all tiles
        model(batch(rank, 1)).backward()
        model(batch(rank, 2)).backward()
    model(batch(rank, 3)).backward()
    reference_grads(plain, [batch(r, step) for step in (1, 2, 3) for r in (0, 1)])
    first = largest_gap(model, plain)
    with model.no_sync():  # added to what has been reduced
        model(batch(rank, 4)).backward()
    model(batch(rank, 5)).backward()
    reference_grads(plain, [batch(r, step) for step in (4, 5) for r in (0, 1)])
    return first, largest_gap(model, plain), not model._engine.gradients._sums._sums


def test_no_sync_sums_all_tiles(pool: Pool) -> None:
    for first, second, is_settled in pool.run(2, sum_without_sync):
        assert max(first, second) <= 1e-6 and is_settled


def fail_between_tiles() -> float:
    """Backward stops after some tiles were stored; the next one starts anew."""
    model, plain, rank = both({"up": 4, "down": 4})
    engine = model._engine
    loss, store, left = model(batch(rank)), engine.store_grad, [6]

    def failing(*args: Any, **named: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("stop")
        store(*args, **named)

    engine.store_grad = failing
    with pytest.raises(RuntimeError, match="stop"):
        loss.backward()
    engine.store_grad = store
    model.zero_grad()
    model(batch(rank)).backward()
    reference_grads(plain, [batch(0), batch(1)])
    return largest_gap(model, plain)


def test_a_backward_after_one_that_failed_between_tiles(pool: Pool) -> None:
    assert max(pool.run(2, fail_between_tiles)) <= 1e-6


def one_parameter(target: str) -> None:
    """Names, shapes, whole values, writes and norms are those of the plain model."""
    model, plain, rank = both({"up": 4, "down": 2})
    assert [(n, p.shape) for n, p in model.named_parameters()] == [
        (n, p.shape) for n, p in plain.named_parameters()
    ]
    state = model.state_dict()
    for name, param in plain.named_parameters():
        assert torch.equal(state[name], param) and torch.equal(
            dict(model.named_parameters())[name].full_tensor(), param
        )
    weight = dict(model.named_parameters())["up.weight"]
    assert weight.to_local().shape == (64 * 128 // 2,)
    torch.testing.assert_close(weight.norm(), plain.up.weight.norm())
    fresh = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight.copy_(fresh)
    assert torch.equal(weight.full_tensor(), fresh)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(weight.full_tensor(), plain.up.weight)
    again = copy.deepcopy(model)
    assert torch.equal(again.state_dict()["down.weight"], plain.down.weight)
    model.eval()
    with torch.no_grad():  # another program, the same shards
        torch.testing.assert_close(model(batch(rank)), plain(batch(rank)))
    assert len(model.programs) == 1 and model.programs[0].layout.tiles
    zerofx.export(f"{target}/model.safetensors", model)


def test_still_one_parameter(pool: Pool, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    pool.run(2, one_parameter, str(tmp_path))
    torch.manual_seed(0)
    plain = Pair()
    written = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(written[n], p) for n, p in plain.named_parameters())


def from_meta(tiling: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Pair()
    return zerofx.compile(model, {"tiling": tiling}).state_dict()


def test_initialised_from_meta_alike(pool: Pool) -> None:
    whole, tiled = pool.run(2, from_meta, "off")[0], pool.run(2, from_meta, {"up": 4})[0]
    assert all(torch.equal(whole[name], tiled[name]) for name in whole)


def steps_of(make: str, options: dict[str, Any], tiling: Any) -> dict[str, Tensor]:
    model, _, rank = both(tiling)
    optimizer = getattr(optim, make)(model.parameters(), **options)
    for step in range(3):
        model(batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        ("Lamb", {"lr": 1e-2}),
        ("AdamW", {"lr": 1e-2, "max_grad_norm": 0.1}),
        ("AdamW", {"state_bits": 8}),
    ],
)  # fmt: skip
def test_flat_optimizers_step_alike(pool: Pool, make: str, options: dict[str, Any]) -> None:
    whole = pool.run(2, steps_of, make, options, "off")[0]
    tiled = pool.run(2, steps_of, make, options, {"up": 4, "down": 2})[0]
    for name, value in whole.items():
        torch.testing.assert_close(tiled[name], value, rtol=1e-4, atol=2e-6)


# Worlds and tilings that hand a training on: the tiled legs have other chunks each time.
RELAY: list[tuple[int, dict[str, Any]]] = [
    (2, {"tiling": MLP}),
    (1, {"tiling": MLP}),
    (2, {"tiling": MORE, "persist_below": 0}),
    (2, {"stage": 2}),
    (4, {"tiling": MLP}),
]


@pytest.mark.slow
def test_saves_and_loads_across_tilings_and_worlds(pool: Pool, tmp_path: Path) -> None:
    handed_on, source = None, None
    for number, (world, plan) in enumerate(RELAY):
        target = str(tmp_path / f"leg-{number}")
        results = pool.run(world, run_leg, "gpt", plan, "adamw", source, target)
        for loaded, saved in results:
            if handed_on is not None:
                assert_same(loaded, handed_on)
            assert_same(saved, results[0][1])
        handed_on, source = results[0][1], target
    assert distance(handed_on, CASES["gpt"].make()) > 1e-3, "it has trained"
