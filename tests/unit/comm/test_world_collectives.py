"""Collectives: equal bits whatever moves them, in every dtype; what is sent; what is left over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from simulated import run_ranks
from torch import Tensor
from world_cases import BIG, assert_bit_equal, every_collective, values

from zerofx.comm.world import World


def always_native(kind: str, nbytes: int, ranks: int) -> str:
    return "native"


def real_world(shard_size: int | None, native: bool) -> tuple[dict[str, list[Tensor]], dict]:
    options: dict[str, Any] = {"algorithm": always_native} if native else {}
    world = World.connect("cpu", shard_size=shard_size, **options)
    got = every_collective(world)
    sent = {kind: (t.calls, t.sent_bytes) for kind, t in world.counters.items()}
    return got, sent


LAYOUTS = [
    (1, None),
    (2, None),
    (2, 1),
    pytest.param(3, None, marks=pytest.mark.slow),
    pytest.param(4, None, marks=pytest.mark.slow),
    (4, 2),
]


@pytest.mark.parametrize(("size", "shard_size"), LAYOUTS)
def test_every_algorithm_gives_the_bits_of_the_ordered_sum(
    pool: Pool, size: int, shard_size: int | None
) -> None:
    sent = []
    for native in (False, True):
        answers = pool.run(size, real_world, shard_size, native)
        assert_bit_equal([got for got, _ in answers], size, shard_size or size)
        sent.append([counters for _, counters in answers])
    assert sent[0] == sent[1]


DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]


def other_dtypes(native: bool) -> list[list[Tensor]]:
    world = World.connect("cpu", **({"algorithm": always_native} if native else {}))
    got = []
    for dtype in DTYPES:
        out, part = torch.empty(2 * 33, dtype=dtype), torch.empty(33, dtype=dtype)
        mine = values(world.rank, 2 * 33, torch.float64).abs().clamp(max=100).to(dtype)
        world.all_gather(out, mine[:33]).wait()
        world.reduce_scatter(part, mine, 1.0).wait()
        total = mine.clone()
        world.all_reduce(total).wait()
        world.broadcast(mine, 1).wait()
        got.append([out, part, total, mine])
    return got


@pytest.mark.parametrize("native", [False, True])
def test_every_dtype_travels(pool: Pool, native: bool) -> None:
    answers = pool.run(2, other_dtypes, native)
    for i, dtype in enumerate(DTYPES):
        sent = [values(r, 66, torch.float64).abs().clamp(max=100).to(dtype) for r in range(2)]
        for rank in range(2):
            out, part, total, said = answers[rank][i]
            assert torch.equal(out, torch.cat([s[:33] for s in sent]))
            assert torch.equal(total, sent[0] + sent[1])
            assert torch.equal(part, total[33 * rank : 33 * (rank + 1)])
            assert torch.equal(said, sent[1])


@pytest.mark.parametrize(("size", "shard_size"), [(1, None), (2, None), (3, None), (4, 2), (4, 1)])
def test_simulated_worlds_do_the_same(size: int, shard_size: int | None) -> None:
    got = run_ranks(size, every_collective, shard_size)
    assert_bit_equal(got, size, shard_size or size)


def bytes_sent(world: World) -> dict[str, tuple[int, int]]:
    shard, full = torch.zeros(600), torch.zeros(600 * world.shard_size)
    world.all_gather(full, shard).wait()
    world.reduce_scatter(shard, full, 0.5).wait()
    world.all_reduce(torch.zeros(1200)).wait()
    world.broadcast(torch.zeros(10), 0).wait()
    return {kind: (t.calls, t.sent_bytes) for kind, t in world.counters.items()}


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent_are_the_ring_terms(size: int) -> None:
    for rank, sent in enumerate(run_ranks(size, bytes_sent)):
        assert sent["all_gather"] == (1, (size - 1) * 600 * 4)
        assert sent["reduce_scatter"] == (1, (size - 1) * 600 * 4)
        assert sent["all_reduce"] == (1, 2 * (size - 1) * 1200 * 4 // size)
        assert sent["broadcast"] == (1, 0 if rank else (size - 1) * 10 * 4)


def scratch_is_reused() -> int:
    world = World.connect("cpu")
    full, out = torch.ones(3 * 4096), torch.empty(4096)
    with torch.inference_mode():
        world.reduce_scatter(out, full, 1.0).wait()
    lent = [loan.buffer for free in world._shard._scratch._free.values() for loan in free]  # type: ignore
    for _ in range(5):
        world.reduce_scatter(out, full, 1.0).wait()
    again = [loan.buffer for free in world._shard._scratch._free.values() for loan in free]  # type: ignore
    assert not again[0].is_inference()
    return len(again) if again[0] is lent[0] else -1


def test_receive_buffers_are_made_once(pool: Pool) -> None:
    assert pool.run(3, scratch_is_reused) == [1, 1, 1]  # of two messages, one lands in the result


def dropped_and_drained() -> list[float]:
    """Launch without waiting, as an exception in mid-step leaves things; then run another step."""
    world = World.connect("cpu")
    out = torch.empty(2 * BIG)
    for step in range(3):
        world.all_gather(out, torch.full((BIG,), float(step)))
        world.reduce_scatter(torch.empty(BIG), torch.ones(2 * BIG), 1.0)
        world.drain()
    world.all_gather(out, torch.full((BIG,), 7.0 + world.rank)).wait()
    return [out[0].item(), out[-1].item()]


def test_what_was_left_in_flight_is_drained(pool: Pool) -> None:
    assert pool.run(2, dropped_and_drained) == [[7.0, 8.0]] * 2


def all_to_all() -> tuple[list[list[float]], int]:
    return exchanged(World.connect("cpu"))


def exchanged(world: World) -> tuple[list[list[float]], int]:
    """Send r elements to rank r."""
    sends = [torch.full((rank,), 1.0 + world.shard_rank) for rank in range(world.shard_size)]
    receives = [torch.zeros(world.shard_rank) for _ in range(world.shard_size)]
    world.all_to_all(receives, sends).wait()
    return [t.tolist() for t in receives], world.counters["all_to_all"].sent_bytes


def test_an_all_to_all_takes_unequal_parts(pool: Pool) -> None:
    for size, answers in ((2, pool.run(2, all_to_all)), (3, run_ranks(3, exchanged))):
        for rank, (received, sent_bytes) in enumerate(answers):
            assert received == [[1.0 + source] * rank for source in range(size)]
            assert sent_bytes == 4 * (size * (size - 1) // 2 - rank)
