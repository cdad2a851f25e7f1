"""Each policy changed in one place: what is planned and what runs follow alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from pool import Pool
from training import loss_of

import zerofx
from zerofx.analysis.memory.storage import Category
from zerofx.analysis.time.traffic import traffic
from zerofx.comm.world import World
from zerofx.layout import buckets as layout
from zerofx.model.module import CompiledModule
from zerofx.policy import exchange, reduction, resting, shard_copies, staging
from zerofx.policy.borrowing import FreeBuffers, Scratch
from zerofx.policy.exchange import Receives
from zerofx.policy.reduction import End
from zerofx.policy.shard_copies import SentAs
from zerofx.runtime.standalone import LoopbackAxis
from zerofx.runtime.tiers.host_tier import D2H, H2D

FINE: dict[str, Any] = {"stage": 3, "kernels": "aten", "bucket_bytes": 0, "persist_below": 0}
CPU = torch.device("cpu")
ON_HOST = {"optimizer": "cpu"}
Figures = dict[str, int]
Patch = Callable[[pytest.MonkeyPatch], None]


def held(plan: dict[str, Any], patch: Patch | None) -> tuple[Figures, Figures]:
    """Train some steps under a changed policy; return what is held between steps.

    Planned, and measured on this rank, in bytes. `sent`, `received`: what a step copies to the host
    and back.
    """
    with pytest.MonkeyPatch.context() as changed:
        if patch is not None:
            patch(changed)
        case = CASES["gpt"]
        model = zerofx.compile(case.make(), {**FINE, **plan})
        optimizer = zerofx.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            before = moved(model)
            args, kwargs = case.batch(step)
            loss_of(model(*args, **kwargs)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model._engine.store.grads.rest()  # as the next forward does
        step = {name: after - before[name] for name, after in moved(model).items()}
        return planned(model), measured(model) | step


def moved(model: CompiledModule) -> Figures:
    counts = model._engine.host.moved
    return {"sent": counts[D2H].nbytes, "received": counts[H2D].nbytes}


@cache
def as_is() -> tuple[Figures, Figures]:
    return held({}, None)


def both(plan: dict[str, Any], patch: Patch) -> tuple[Figures, ...]:
    return *(held(plan, None) if plan else as_is()), *held(plan, patch)


def planned(model: CompiledModule) -> Figures:
    (program,) = model.programs
    memory = program.memory().memory
    lasting = [
        s for s in (*memory.storages, *memory.on_host) if (s.birth, s.death) == (0, memory.life.end)
    ]

    def total(name: str) -> int:
        return sum(s.nbytes for s in lasting if s.name.startswith(name))

    return {
        "slots": total("slot "),
        "receive buffers": total("receive buffer"),
        "slices": total("reduced slice"),
        "gradients": total("p.grad"),
        "casts": sum(
            s.nbytes for s in lasting if s.name == "cast copy" and s.category is Category.HOST
        ),
        "places": memory.place_bytes,
        "sent": traffic(program).moved[D2H].sent_bytes,
        "received": traffic(program).moved[H2D].sent_bytes,
    }


def measured(model: CompiledModule) -> Figures:
    engine = model._engine
    axes = engine.world._axes.values()
    shards = engine.store.grads.shards.values()
    pool, casts = engine.slots, engine.away._casts.values()
    return {
        "slots": sum(n for slot, n in enumerate(pool.sizes) if slot not in pool._asleep),
        "receive buffers": sum(free_bytes(a._scratch) for a in axes if hasattr(a, "_scratch")),
        "slices": free_bytes(engine.gradients._slices),
        "gradients": sum(s.flat.nbytes for s in shards if not s._asleep),
        "casts": sum(t.nbytes for t in casts),
        "places": engine.host.nbytes - sum(t.nbytes for t in casts),
    }


def free_bytes(scratch: Scratch[Any]) -> int:
    return sum(loan.buffer.nbytes for free in scratch._free.values() for loan in free)


def follow(pool: Pool, plan: dict[str, Any], patch: Patch, *changes: str, ranks: int = 2) -> None:
    """Check that planned and measured are one, also under a patch, which `changes` some of it."""
    answers = pool.run(ranks, both, plan, patch) if ranks > 1 else [both(plan, patch)]
    for expected, real, patched, real_patched in answers:
        assert expected == real
        assert patched == real_patched
        assert {name for name in patched if patched[name] != expected[name]} == {*changes}


# -- borrowing ------------------------------------------------------------------------------------
def nothing_is_dropped(changed: pytest.MonkeyPatch) -> None:
    take = FreeBuffers.take

    def patched(self: FreeBuffers[Any], size: int) -> tuple[Any, Any]:
        found, dropped = take(self, size)
        if dropped is not None:
            self.give_back(getattr(dropped, "numel", dropped), dropped)
        return found, None

    changed.setattr(FreeBuffers, "take", patched)


def test_what_is_too_small_makes_room(pool: Pool) -> None:
    follow(pool, {}, nothing_is_dropped, "receive buffers", ranks=3)


def twice_as_large(changed: pytest.MonkeyPatch) -> None:
    changed.setattr(
        exchange, "reduce_scatter_receives", lambda numel, size, _: Receives((2 * numel,))
    )


def test_what_a_reduction_receives_into(pool: Pool) -> None:
    follow(pool, {}, twice_as_large, "receive buffers", ranks=3)


# -- what rests -----------------------------------------------------------------------------------
def everything_rests(changed: pytest.MonkeyPatch) -> None:
    changed.setattr(resting, "frees", lambda layout, nbytes: True)


def test_what_rests_between_steps(pool: Pool) -> None:
    low = {"precision": {"compute": "bf16", "reduce": "bf16"}}
    kinds = "receive buffers", "slices", "gradients", "slots"
    follow(pool, low, everything_rests, *kinds, ranks=3)


def no_block_is_in_the_heap(changed: pytest.MonkeyPatch) -> None:
    changed.setattr(resting, "IN_HEAP_BYTES", 0)
    everything_rests(changed)


def test_large_slots_of_forward_stay_those_of_reloads_too() -> None:
    """One rank gathers nothing: it reloads into slots."""
    offload = {"offload": {"optimizer": "cpu", "parameters": "cpu"}}
    expected, real = held(offload, everything_rests)
    assert expected == real and real["slots"] == 0
    expected, real = held(offload, no_block_is_in_the_heap)
    assert expected == real and real["slots"] > 0


# -- reductions -----------------------------------------------------------------------------------
def never_in_the_gradient(changed: pytest.MonkeyPatch) -> None:
    changed.setattr(reduction, "end_of", lambda layout, bucket, is_set, in_slot=False: End.SLICE)


def test_where_reductions_end(pool: Pool) -> None:
    follow(pool, {}, never_in_the_gradient, "slices")


def leaves_narrow(changed: pytest.MonkeyPatch) -> None:
    changed.setattr(reduction, "leaves_as", lambda bucket, is_scaled: bucket.reduce_dtype)


def test_the_format_in_which_gradients_leave(pool: Pool) -> None:
    scaled = {"precision": "fp16", "offload": ON_HOST}
    follow(pool, scaled, leaves_narrow, "sent", ranks=1)


def sums(plan: dict[str, Any], patch: Patch | None) -> tuple[int, int]:
    """Return the bytes of what no_sync sums: planned, and held by this rank."""
    with pytest.MonkeyPatch.context() as changed:
        if patch is not None:
            patch(changed)
        case = CASES["gpt"]
        model = zerofx.compile(case.make(), {**FINE, **plan})
        args, kwargs = case.batch(0)
        with model.no_sync():
            loss_of(model(*args, **kwargs)).backward()
        (program,) = model.programs
        memory = program.memory(accumulation=3, no_sync=True).memory
        expected = sum(s.nbytes for s in memory.storages if s.name == "sum of no_sync")
        blocks = model._engine.gradients._sums._sums.values()
        return expected, sum(t.nbytes for b in blocks for t in b._parts.values())


def test_an_axis_is_a_row_of_two_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reduces, numbers ranks and predicts knows no axis by its name."""
    monkeypatch.setattr(layout, "AXES", ("outer", "pipeline", "replicate", "shard", "tensor"))
    every = {**reduction._AXES, "outer": "all_reduce"}
    monkeypatch.setattr(reduction, "_AXES", every)
    axes = {name: LoopbackAxis(1, 2) for name in every}
    world = World(device=CPU, backend="loopback", axes=axes, whole=axes["outer"])
    assert (world.size, world.rank) == (8, 7)
    legs = reduction.legs(world.mesh)
    assert [(leg.axis, leg.stride) for leg in legs] == [
        ("shard", 1),
        ("replicate", 2),
        ("outer", 4),
    ]
    out, full = torch.empty(3), torch.arange(6.0)
    world.reduce_scatter(out, full, 0.125).wait()
    assert out.tolist() == [3.0, 4.0, 5.0]  # each loopback axis doubles, and the mean halves again
    grid = torch.arange(8).view(2, 2, 2)
    for rank in range(8):
        at = {name: world.mesh.position(name, rank) for name in layout.AXES}
        assert world.mesh.rank(at) == rank == grid[at["outer"], at["replicate"], at["shard"]]


def never_put_off(changed: pytest.MonkeyPatch) -> None:
    changed.setattr(reduction, "is_put_off", lambda layout, plan: False)


def test_sums_of_no_sync(pool: Pool) -> None:
    plan = {"stage": 1}
    ((expected, real), _) = pool.run(2, sums, plan, None)
    assert expected == real > 0
    assert pool.run(2, sums, plan, never_put_off) == [(0, 0)] * 2


# -- copies of shards, and what passes through host memory ----------------------------------------
def casts_stay(changed: pytest.MonkeyPatch) -> None:
    changed.setattr(
        shard_copies, "sent_as", lambda b, delayed: SentAs.COPY if b.is_cast else SentAs.SHARD
    )


def test_which_copies_stay(pool: Pool) -> None:
    follow(pool, {"precision": "bf16", "offload": ON_HOST}, casts_stay, "casts", "places")


def always_outdated(changed: pytest.MonkeyPatch) -> None:
    changed.setattr(shard_copies, "is_outdated", lambda made_of, now: True)


def test_when_copies_are_made_again(pool: Pool) -> None:
    """Backward refreshes the copies on the device as well, and finds them current."""
    follow(pool, {"offload": ON_HOST}, always_outdated, "received")


def two_are_read_ahead(changed: pytest.MonkeyPatch) -> None:
    changed.setattr(staging, "READS_AHEAD", 2)


def test_how_many_pass_through_host_memory(pool: Pool, tmp_path: Path) -> None:
    plan = {"offload": {"optimizer": "nvme", "path": str(tmp_path)}}
    follow(pool, plan, two_are_read_ahead, "places", ranks=1)
