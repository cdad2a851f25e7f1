"""Worlds: who is who on the grid, worlds within a larger mesh, and worlds of plain processes."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from world_cases import assert_bit_equal, every_collective

from zerofx.comm.world import World
from zerofx.errors import PlanError


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
