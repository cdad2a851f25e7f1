"""Real gloo worlds and simulated ones: who is who, equal bits whatever moves them, what is sent."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from zerofx.errors import PlanError
from zerofx.runtime.simulated import run_ranks
from zerofx.runtime.world import World

BIG = 100_000  # elements: several socket buffers
NUMELS = [1, 16, 1000, BIG]


def always_native(kind: str, nbytes: int, ranks: int) -> str:
    return "native"


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers whose sum depends on the order of summation."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    powers = torch.randint(-12, 12, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * 2.0**powers).to(dtype)


def every_collective(world: World) -> dict[str, list[Tensor]]:
    """Run each collective at each size, two in flight at once; return what came out."""
    got: dict[str, list[Tensor]] = {"all_gather": [], "reduce_scatter": [], "all_reduce": []}
    got["broadcast"] = []
    scale = 1 / world.size
    for numel in NUMELS:
        shard = values(world.rank, numel)
        full = values(world.rank, numel * world.shard_size)
        out, out2 = (torch.full((numel * world.shard_size,), torch.nan) for _ in range(2))
        part, part2 = (torch.full((numel,), torch.nan) for _ in range(2))
        gathers = [world.all_gather(out, shard), world.all_gather(out2, part.fill_(world.rank))]
        gathers[0].wait()
        gathers[1].wait()
        reduces = [
            world.reduce_scatter(part, full, scale),
            world.reduce_scatter(part2, full, 1.0),
        ]
        total = values(world.rank, numel)
        reduced = world.all_reduce(total, scale)
        for work in (*reduces, reduced, reduced):
            work.wait()
        said = values(world.rank, numel)
        world.broadcast(said, world.size - 1).wait()
        got["all_gather"] += [out, out2]
        got["reduce_scatter"] += [part, part2]
        got["all_reduce"].append(total)
        got["broadcast"].append(said)
    return got


def ordered(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def expected(rank: int, size: int, shard_size: int) -> dict[str, list[Tensor]]:
    """Compute in one process what `every_collective` must return on `rank`."""
    row, column = divmod(rank, shard_size)
    mates = range(row * shard_size, (row + 1) * shard_size)
    scale = 1 / size
    want: dict[str, list[Tensor]] = {"all_gather": [], "reduce_scatter": [], "all_reduce": []}
    want["broadcast"] = []
    for numel in NUMELS:
        want["all_gather"].append(torch.cat([values(r, numel) for r in mates]))
        want["all_gather"].append(torch.cat([torch.full((numel,), float(r)) for r in mates]))
        rows = []
        for first in range(0, size, shard_size):
            fulls = [values(r, numel * shard_size) for r in range(first, first + shard_size)]
            rows.append(ordered([f.view(shard_size, numel)[column] for f in fulls]))
        want["reduce_scatter"] += [ordered(rows) * scale, ordered(rows)]
        want["all_reduce"].append(ordered([values(r, numel) for r in range(size)]) * scale)
        want["broadcast"].append(values(size - 1, numel))
    return want


def real_world(shard_size: int | None, native: bool) -> tuple[dict[str, list[Tensor]], dict]:
    options: dict[str, Any] = {"algorithm": always_native} if native else {}
    world = World.connect("cpu", shard_size=shard_size, **options)
    got = every_collective(world)
    sent = {kind: (t.calls, t.sent_bytes) for kind, t in world.counters.items()}
    return got, sent


def assert_bit_equal(got: list[dict[str, list[Tensor]]], size: int, shard_size: int) -> None:
    for rank in range(size):
        want = expected(rank, size, shard_size)
        for kind, tensors in want.items():
            for i, tensor in enumerate(tensors):
                assert torch.equal(got[rank][kind][i], tensor), f"{kind} {i} on rank {rank}"


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


def places(shard_size: int | None) -> tuple:
    world = World.connect("cpu", shard_size=shard_size)
    mesh = world.shard_mesh.mesh.tolist() if world.shard_mesh is not None else None
    grid = world.shard_rank, world.shard_size, world.replicate_rank, world.replicate_size
    return world.backend, world.rank, world.size, *grid, mesh


def test_ranks_have_their_places_on_the_grid(pool: Pool) -> None:
    assert pool.run(2, places, None) == [
        ("gloo", 0, 2, 0, 2, 0, 1, [0, 1]),
        ("gloo", 1, 2, 1, 2, 0, 1, [0, 1]),
    ]
    assert pool.run(2, places, 1) == [
        ("gloo", 0, 2, 0, 1, 0, 2, None),
        ("gloo", 1, 2, 0, 1, 1, 2, None),
    ]
    assert pool.run(1, places, None) == [("single", 0, 1, 0, 1, 0, 1, None)]
    assert pool.run(4, places, 2)[2] == ("gloo", 2, 4, 0, 2, 1, 2, [2, 3])


def own_axis_of_a_larger_mesh() -> list[float]:
    """Ranks (0, 2) and (1, 3) are two worlds: the data-parallel axes of a 2 x 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    world = World.connect("cpu", mesh=mesh["data"])
    out = torch.empty(2)
    world.agree("forward", f"column {mesh.get_local_rank('tensor')}")
    world.all_gather(out, torch.tensor([float(dist.get_rank())])).wait()
    return [world.rank, world.size, *out.tolist()]


def test_world_is_one_axis_of_a_larger_mesh(pool: Pool) -> None:
    answers = pool.run(4, own_axis_of_a_larger_mesh)
    assert answers == [[0, 2, 0, 2], [0, 2, 1, 3], [1, 2, 0, 2], [1, 2, 1, 3]]


def replicate_and_shard_mesh() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    world = World.connect("cpu", mesh=mesh)
    out = torch.empty(3)
    world.reduce_scatter(out, torch.full((3,), 1.0 + world.rank), 0.5).wait()
    return [world.shard_size, world.replicate_size, *out.tolist()]


def test_two_axes_come_from_the_mesh(pool: Pool) -> None:
    assert pool.run(2, replicate_and_shard_mesh) == [[1, 2, 1.5, 1.5, 1.5]] * 2


def refused(make: Callable[[], World]) -> str:
    with pytest.raises(PlanError) as caught:
        make()
    return str(caught.value)


def refusals() -> list[str]:
    cube = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    return [
        refused(lambda: World.connect("cpu", shard_size=3)),
        refused(lambda: World.connect("cpu", mesh=cube)),
        refused(lambda: World.connect("cpu", mesh=cube["c"], shard_size=4)),
    ]


def test_layouts_that_do_not_fit_are_refused(pool: Pool) -> None:
    size, axes, mesh = pool.run(2, refusals)[0]
    assert "3, which does not divide the 2 ranks" in size and "[1, 2]" in size
    assert "3 axes ('a', 'b', 'c')" in axes
    assert "shard_axis_size is 4 but the mesh's shard axis has 2 ranks" in mesh


def test_a_plain_process_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    world = World.connect("cpu")
    assert (world.rank, world.size, world.backend, world.shard_mesh) == (0, 1, "single", None)
    assert not dist.is_initialized()
    assert_bit_equal([every_collective(world)], 1, 1)
    assert sum(t.sent_bytes for t in world.counters.values()) == 0
    with pytest.raises(PlanError, match="shard_axis_size is 2 but this is a single process"):
        World.connect("cpu", shard_size=2)


def under_torchrun() -> tuple:
    """Do what torchrun's child finds: an environment, and no process group."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    ports = [None, None]
    dist.all_gather_object(ports, store.port)
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the agent (here rank 0) serves the store
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        worlds = [World.connect("cpu") for _ in range(2)]
    backend = dist.get_backend()
    worlds[1].agree("end", "")  # nobody takes the store away before both have joined
    dist.barrier()
    return said.getvalue(), backend, worlds[0].rank == rank


def test_torchrun_without_a_process_group_gets_one_and_is_told(pool: Pool) -> None:
    for rank, (said, backend, placed) in enumerate(pool.run(2, under_torchrun)):
        told = "zerofx: made a process group: gloo, 2 ranks, here cpu\n"
        assert said == (told if rank == 0 else "")
        assert backend == "gloo" and placed


def scratch_is_reused() -> int:
    world = World.connect("cpu")
    full, out = torch.ones(2 * 4096), torch.empty(4096)
    with torch.inference_mode():
        world.reduce_scatter(out, full, 1.0).wait()
    lent = [t for free in world._shard._scratch._free.values() for t in free]  # type: ignore
    for _ in range(5):
        world.reduce_scatter(out, full, 1.0).wait()
    again = [t for free in world._shard._scratch._free.values() for t in free]  # type: ignore
    assert not again[0].is_inference()
    return len(again) if again[0] is lent[0] else -1


def test_receive_buffers_are_made_once(pool: Pool) -> None:
    assert pool.run(2, scratch_is_reused) == [1, 1]


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
