"""Process groups of dropped worlds are used again; those of living or broken ones never are."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from zerofx.comm.world import World
from zerofx.errors import DesyncError


def groups_of(world: World) -> Any:
    axis: Any = world._whole
    return axis._gathers, axis._reduces


def use(world: World) -> None:
    """Run a collective on each group and check what came."""
    world.agree("forward", "")
    out = torch.empty(world.size)
    world.all_gather(out, torch.tensor([float(world.rank)])).wait()
    assert out.tolist() == list(range(world.size))
    total = torch.tensor([1.0 + world.rank])
    world.all_reduce(total).wait()
    assert total.item() == sum(range(1, world.size + 1))


def cycle() -> tuple[int, int]:
    use(World.connect("cpu"))
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def many_worlds() -> list[tuple[int, int]]:
    return [cycle() for _ in range(6)]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_worlds_that_come_and_go_leave_nothing_behind(pool: Pool) -> None:
    for counts in pool.run(2, many_worlds):
        threads, descriptors = zip(*counts, strict=True)
        assert threads[-1] <= threads[1] and descriptors[-1] <= descriptors[1], counts


def dropped_in_cycles() -> list[int]:
    """Each world dies with a reference cycle, which is not collected unless something asks."""
    counts = []
    gc.disable()
    try:
        for _ in range(4):
            world = World.connect("cpu")
            use(world)
            cycle: list[Any] = [world]
            cycle.append(cycle)
            del world, cycle
            counts.append(len(os.listdir("/proc/self/task")))
    finally:
        gc.enable()
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_worlds_in_reference_cycles_lend_their_groups_to_the_next(pool: Pool) -> None:
    for threads in pool.run(2, dropped_in_cycles):
        assert threads[-1] <= threads[0], threads


def living_worlds() -> list[bool]:
    first, second = World.connect("cpu"), World.connect("cpu")
    shared = bool(set(groups_of(first)) & set(groups_of(second)))
    ours, mesh = groups_of(first), first.shard_mesh
    del first
    third = World.connect("cpu")
    for world in (third, second, third):
        use(world)
    return [shared, groups_of(third) == ours, third.shard_mesh is mesh]


def test_only_a_dropped_world_lends_its_groups(pool: Pool) -> None:
    assert pool.run(2, living_worlds) == [[False, True, True]] * 2


def kept_longer_by_one_rank() -> bool:
    """Rank 1 drops its world later than rank 0: both must make new groups, then share alike."""
    first = World.connect("cpu")
    use(first)
    ours = groups_of(first)
    late = [first] if first.rank == 1 else []
    del first
    second = World.connect("cpu")
    use(second)
    made_anew = groups_of(second) != ours
    late.clear()
    third = World.connect("cpu")
    use(third)
    return made_anew and groups_of(third) == ours


def test_ranks_that_drop_a_world_at_other_times_stay_together(pool: Pool) -> None:
    assert pool.run(2, kept_longer_by_one_rank) == [True, True]


def broken_world() -> bool:
    first = World.connect("cpu")
    use(first)
    ours = groups_of(first)
    first.agree("backward", "")
    if first.rank == 0:
        first.report_failure("ValueError('boom')")
    else:
        with contextlib.suppress(DesyncError):
            first.all_gather(torch.empty(2), torch.zeros(1)).wait()
    del first
    gc.collect()
    second = World.connect("cpu")
    use(second)
    return groups_of(second) != ours


def test_a_broken_world_lends_nothing(pool: Pool) -> None:
    assert pool.run(2, broken_world) == [True, True]


def another_job() -> bool:
    """Groups go with the default one that they were made under."""
    world = World.connect("cpu")
    ours = groups_of(world)
    del world
    dist.barrier()
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    second = World.connect("cpu")
    use(second)
    return groups_of(second) != ours


def test_a_new_default_group_means_new_groups(pool: Pool) -> None:
    assert pool.run(2, another_job) == [True, True]


def all_groups_of(world: World) -> set[Any]:
    axes: Any = (*world._axes.values(), world._whole)
    return {axis._gathers for axis in axes if axis.size > 1}


def grid_worlds() -> bool:
    first = World.connect("cpu", shard_size=2)
    ours = all_groups_of(first)
    del first
    flat = World.connect("cpu")  # another grid: other groups
    second = World.connect("cpu", shard_size=2)
    use(flat)
    second.agree("forward", "")
    part = torch.tensor([float(second.rank)])
    second.all_reduce(part).wait()
    return part.item() == 6.0 and all_groups_of(second) == ours and groups_of(flat)[0] not in ours


@pytest.mark.slow
def test_each_grid_has_groups_of_its_own(pool: Pool) -> None:
    assert pool.run(4, grid_worlds) == [True] * 4
