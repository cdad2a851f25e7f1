"""Full tensors and torch.distributed.checkpoint: any cut loads what any other cut saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import CASES
from pool import Pool
from shard_cases import build, deliver, gradients, on_ranks, small_model, wholes
from torch import Tensor, nn
from training import loss_of

import zerofx
from zerofx.comm.world import World
from zerofx.errors import DesyncError, ShardError
from zerofx.runtime.store.shards import ShardStore
from zerofx.runtime.store.state import (
    flat_state,
    full_state,
    full_tensor,
    iter_full_state,
)
from zerofx.runtime.tensors.checkpoint import FlatPiece, flat_piece


@pytest.mark.parametrize(("size", "shard_size"), [(1, 1), (2, 2), (3, 3), (4, 2)])
def test_full_state_round_trip(size: int, shard_size: int) -> None:
    expected = wholes(small_model())

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        state = full_state(store)
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert torch.equal(state[name], value) and state[name].is_contiguous()
            assert torch.equal(full_tensor(store, name), value)
        model.load_state_dict({name: value * 2 for name, value in state.items()})
        on_rank_0 = dict(iter_full_state(store, rank0_only=True))
        assert len(on_rank_0) == (len(expected) if world.rank == 0 else 0)
        assert all(torch.equal(on_rank_0[n], expected[n] * 2) for n in on_rank_0)

    on_ranks(size, body, shard_size=shard_size)


def test_a_flat_piece_refuses_to_be_computed_with() -> None:
    piece = FlatPiece.of(torch.zeros(3), ((2, 5),), 9)
    assert repr(piece) == "FlatPiece(torch.float32, elements 2:5 of 9)"
    assert piece.size() == torch.Size([9]) and piece.device.type == "cpu"
    for action in (lambda: piece + 1, lambda: piece.cpu(), lambda: piece.detach()):
        with pytest.raises(ShardError, match="of a FlatPiece"):
            action()


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        f"{name}.{key}": flat_piece(value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
        if key != "step"
    }


def trained(world: World) -> tuple[nn.Module, ShardStore, torch.optim.Optimizer]:
    model = small_model()
    store = build(model, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for step in range(2):
        deliver(store, gradients(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return model, store, optimizer


def save(folder: str, shard_size: int | None = None) -> dict[str, Tensor]:
    model, store, optimizer = trained(World.connect(shard_size=shard_size))
    state = {"model": flat_state(store), "optimizer": optimizer_state(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return wholes(model)


def load(folder: str, shard_size: int | None = None) -> dict[str, Tensor]:
    model, store, optimizer = trained(World.connect(shard_size=shard_size))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
            for value in optimizer.state[p].values():
                if value.ndim:
                    value.fill_(-1)
    before = store.poll_writes()
    dcp.load(
        {"model": flat_state(store), "optimizer": optimizer_state(model, optimizer)},
        checkpoint_id=folder,
    )
    assert store.poll_writes() > before
    moments = {
        f"{n}.{k}": v.full_tensor() if hasattr(v, "full_tensor") else v
        for n, p in model.named_parameters()
        for k, v in optimizer.state[p].items()
        if k != "step"
    }
    return {**wholes(model), **moments}


def expected_state() -> dict[str, Tensor]:
    model, _, optimizer = trained(World.single())
    moments = {
        f"{n}.{k}": v
        for n, p in model.named_parameters()
        for k, v in optimizer.state[p].items()
        if k != "step"
    }
    return {**wholes(model), **moments}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, None), (1, None)),
        ((1, None), (2, None)),
        ((2, None), (3, None)),
        ((3, None), (2, 1)),  # from stage 1, 2 or 3 to stage 0
        ((2, 1), (2, None)),  # and back
    ],
)
def test_any_world_and_stage_loads_what_any_other_saved(
    pool: Pool, tmp_path: Path, saved: Any, loaded: Any
) -> None:
    folder = str(tmp_path / "snapshot")
    pool.run(saved[0], save, folder, saved[1])
    expected = expected_state()
    for got in pool.run(loaded[0], load, folder, loaded[1]):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
    metadata = dcp.FileSystemReader(folder).read_metadata()
    chunks = {k: [c.sizes[0] for c in m.chunks] for k, m in metadata.state_dict_metadata.items()}
    assert sum(map(sum, chunks.values())) == sum(t.numel() for t in expected.values())
    assert len(metadata.storage_data) == sum(map(len, chunks.values()))  # replicas written once


# -- the same through a compiled model ------------------------------------------------------------
def save_compiled(folder: str, stage: int) -> dict[str, Tensor]:
    model = zerofx.compile(CASES["convnet"].make(), {"stage": stage, "kernels": "aten"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args, kwargs = CASES["convnet"].batch(int(os.environ["RANK"]))
    loss_of(model(*args, **kwargs)).backward()
    optimizer.step()
    dcp.save(model.sharded_state_dict(), checkpoint_id=folder)
    return dict(model.state_dict())


def load_compiled(folder: str, stage: int) -> tuple[dict[str, Tensor], float, float]:
    """Return the state after a load into other weights, and losses of both ways to load it."""
    case = CASES["convnet"]
    model = zerofx.compile(case.make(seed=1), {"stage": stage, "kernels": "aten"})
    args, kwargs = case.batch(7)
    model.eval()
    with torch.no_grad():
        model(*args, **kwargs)  # resident copies of the old values
    state = model.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder)
    whole = dict(model.state_dict())
    plain = case.make(seed=1)
    plain.load_state_dict(whole)
    with torch.no_grad():
        losses = [float(loss_of(m(*args, **kwargs))) for m in (model, plain.eval())]
    return whole, *losses


@pytest.mark.parametrize(("saved", "loaded"), [(3, 1), (3, 0), (0, 2), (1, 3)])
def test_sharded_state_dict_through_distributed_checkpoint(
    pool: Pool, tmp_path: Path, saved: int, loaded: int
) -> None:
    folder = str(tmp_path / "snapshot")
    expected = pool.run(2, save_compiled, folder, saved)[0]
    for got, mine, plain in pool.run(2, load_compiled, folder, loaded):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
        assert mine == pytest.approx(plain, rel=1e-5)


def clipped() -> tuple[float, dict[str, Tensor]]:
    model, store, optimizer = trained(World.connect())
    deliver(store, gradients(model, 5))
    total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(total), wholes(model)


def test_clip_and_step_on_real_ranks(pool: Pool) -> None:
    total, expected = clipped()
    for norm, got in pool.run(2, clipped):
        assert abs(norm - total) <= 1e-6 * total
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def clip_on_rank_0() -> str:
    world = World.connect()
    model, store, _ = trained(world)
    deliver(store, gradients(model, 5))
    with pytest.raises(DesyncError) as caught:
        if world.rank == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            full_state(store)
    return str(caught.value)


def test_a_rank_that_clips_alone_is_named(pool: Pool) -> None:
    for text in pool.run(2, clip_on_rank_0):
        assert "rank 0" in text and "clip_grad_norm_" in text and "state_dict" in text


def test_a_state_dict_does_not_follow_later_steps() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = zerofx.compile(plain, {"kernels": "aten"}, device="cpu")
    for take in (model.state_dict, lambda: zerofx.full_state_dict(model)):
        taken = take()
        before = {name: value.clone() for name, value in taken.items()}
        model(torch.randn(8, 4))
        assert int(plain[1].num_batches_tracked) > int(before["1.num_batches_tracked"])
        assert all(torch.equal(value, before[name]) for name, value in taken.items())
