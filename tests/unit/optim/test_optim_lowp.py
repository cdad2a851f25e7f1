"""Optimizers that write the compute dtype's copy along with the parameters: same bits, no casts."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from lowp_cases import FINE, Loop, check_copies, counted, settled
from optim_cases import ours
from pool import Pool
from shard_cases import deliver, gradients, small_model
from torch import Tensor, nn

import zerofx
from zerofx.comm.world import World
from zerofx.layout.build import UnitParam, unit_layout
from zerofx.optim.flat import StepCasts
from zerofx.runtime.engine import Engine
from zerofx.runtime.standalone import LoopbackAxis
from zerofx.runtime.store.shards import ShardStore
from zerofx.tools.demo.measure import PeakMemory

Run = Callable[..., Any]
STEPS = 6
PLANS = [
    {},
    {"stage": 0},
    {"precision": "fp16"},
    {"update": "in-backward"},
]


# -- the same bits, and fewer casts ---------------------------------------------------------------
def train(name: str, plan: dict[str, Any], **more: Any) -> tuple[list[float], dict[str, Tensor]]:
    loop = Loop(name, plan, **more)
    return [loop.step() for _ in range(STEPS)], loop.model.state_dict()


def check_bits(name: str, plan: dict[str, Any], more: dict[str, Any], is_written: bool) -> None:
    with counted() as with_lowp:
        losses, state = train(name, plan, **more)
    with counted() as without, mock.patch.object(StepCasts, "place_for", lambda *_: None):
        plain_losses, plain_state = train(name, plan, **more)
    assert losses == plain_losses and all(torch.equal(v, plain_state[k]) for k, v in state.items())
    # once a trained bucket, at the first forward; the frozen one never changes
    assert (len(with_lowp) < len(without) / 3) == is_written, (with_lowp, without)


@pytest.mark.parametrize(
    ("name", "plan"), [*(("adamw", plan) for plan in PLANS), ("lamb", {})], ids=str
)
def test_training_keeps_its_bits(interpreted: Run, name: str, plan: dict[str, Any]) -> None:
    is_written = plan.get("update") != "in-backward"
    interpreted(check_bits, name, plan, {}, is_written)


@pytest.mark.parametrize(
    ("name", "more", "is_written"),
    [
        ("adam", {"max_grad_norm": 0.1}, True),
        ("adamw", {"state_bits": 8}, True),
        ("amsgrad", {}, False),
        ("momentum", {}, False),
        ("lion", {}, False),
    ],
    ids=str,
)
def test_only_kernels_that_write_the_copy_spare_the_cast(
    interpreted: Run, name: str, more: dict[str, Any], is_written: bool
) -> None:
    interpreted(check_bits, name, {}, more, is_written)


def check_count() -> None:
    with counted() as found:
        loop = Loop()
        first = loop.step()
        copies = len(loop.engine._resident)
        assert copies == 3 and len(found) == copies
        for _ in range(STEPS):
            assert loop.step() != first
        assert len(found) == copies  # one cast a bucket, for the whole training


def test_one_cast_a_bucket(interpreted: Run) -> None:
    interpreted(check_count)


def test_without_triton_every_refresh_casts() -> None:
    found: list[int] = []
    loop = Loop()
    cast = Engine.cast
    with mock.patch.object(Engine, "cast", lambda *given: found.append(1) or cast(*given)):
        for _ in range(3):
            loop.step()
    trained = [b for b in loop.engine.layout.buckets if b.trainable]
    assert len(found) >= 3 * len(trained)


# -- several ranks --------------------------------------------------------------------------------
def check_rank(rank: int, size: int, name: str) -> None:
    """One rank of several: its own slice is right, and what is sent is that slice."""
    world = World(
        device=torch.device("cpu"), backend="loopback", whole=LoopbackAxis(rank, size),
        axes={"shard": LoopbackAxis(rank, size), "replicate": LoopbackAxis(0, 1)},
    )  # fmt: skip
    model = small_model()
    params = [
        UnitParam(n, tuple(p.shape), p.dtype, n.partition(".")[0], compute_dtype=torch.bfloat16)
        for n, p in model.named_parameters()
    ]
    store = ShardStore.build(model, unit_layout(params, size), world)
    engine, optimizer = Engine(store), ours(name, model.parameters())
    before = [s.clone() for s in store.shards]
    with counted() as found:
        for step in range(STEPS):
            for bucket, shard in enumerate(store.shards):
                engine.refresh(shard, bucket).wait()
            check_copies(engine)
            for full in engine._resident.values():  # every rank holds what this one holds
                parts = full.view(size, -1)
                assert torch.equal(parts, parts[rank].expand_as(parts))
            deliver(store, gradients(model, step))
            optimizer.step()
            optimizer.zero_grad()
    assert len(found) == len(store.shards)
    owns = [any(store.pieces[n].length for n in b.names) for b in store.layout.buckets]
    moved = [not torch.equal(a, b) for a, b in zip(before, store.shards, strict=True)]
    assert moved == owns


def check_ranks(name: str, plan: dict[str, Any]) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    # Its library (tl.sum) is compiled if the process that ranks are forked from has imported it.
    library = sys.modules.get("triton.language")
    if library is not None and type(library.sum).__name__ != "InterpretedFunction":
        for module in [m for m in sys.modules if m.startswith("triton") and "._C" not in m]:
            del sys.modules[module]
    check_bits(name, plan, {"max_grad_norm": 0.5}, True)


@pytest.fixture(scope="module")
def own_pool() -> Iterator[Pool]:
    """Ranks that no other test shares: Triton interprets in them for good."""
    pytest.importorskip("triton", reason="triton is not installed: its interpreter cannot run")
    made = Pool()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("adamw", {"stage": 2}),
        pytest.param("lamb", {"stage": 1}, marks=pytest.mark.slow),
        ("adamw", {"stage": 3, "persist_below": 1000}),
        pytest.param("adamw", {"stage": 2, "shard_axis_size": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks(own_pool: Pool, name: str, plan: dict[str, Any]) -> None:
    own_pool.run(2, check_ranks, name, plan)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_writes_its_own_slice(interpreted: Run, rank: int) -> None:
    interpreted(check_rank, rank, 3, "adamw")


# -- memory ---------------------------------------------------------------------------------------
class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def added_by_a_step() -> tuple[int, int]:
    """Return what a step and the refresh behind it add at most, and the bytes of a shard."""
    with counted() as found, PeakMemory(torch.device("cpu")) as memory:
        model = zerofx.compile(Wide(), {**FINE, "bucket_bytes": 0})
        engine = model._engine
        optimizer = ours("adamw", model.parameters())
        for _ in range(3):
            model(torch.ones(4, 256)).backward()
            with memory.step():
                pass
            with memory.step():
                optimizer.step()
                for bucket, shard in enumerate(engine.store.shards):
                    engine.refresh(shard, bucket).wait()
            optimizer.zero_grad()
        assert len(found) == len(engine._resident) == 2
    before, within = (p.high_bytes for p in memory.steps[-2:])
    return within - before, min(s.nbytes for s in engine.store.shards)


def test_nothing_of_a_shards_size_is_made(interpreted: Run) -> None:
    added, shard = interpreted(added_by_a_step)
    assert shard >= 256 << 10
    assert added < shard / 8, (added, shard)


def check_freed() -> None:
    """Parameters and optimizer that outlive the model keep no gathered copy."""
    with counted() as found:
        loop = settled(found)
        optimizer, params = loop.optimizer, list(loop.model.parameters())
        copies = params[0].zfx.ledger.copies  # type: ignore[attr-defined]
        assert all(c.full is not None for c in copies.values())
        del loop
        gc.collect()
        assert copies and all(c.full is None for c in copies.values())
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()


def test_a_dropped_model_frees_its_copies(interpreted: Run) -> None:
    interpreted(check_freed)
