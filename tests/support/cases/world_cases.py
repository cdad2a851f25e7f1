"""Every collective of a world at many sizes, and what it must give: for the tests of worlds."""

from __future__ import annotations

import torch
from torch import Tensor

from zerofx.comm.world import World

BIG = 100_000  # elements: several socket buffers
NUMELS = [1, 16, 1000, BIG]


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


def assert_bit_equal(got: list[dict[str, list[Tensor]]], size: int, shard_size: int) -> None:
    for rank in range(size):
        want = expected(rank, size, shard_size)
        for kind, tensors in want.items():
            for i, tensor in enumerate(tensors):
                assert torch.equal(got[rank][kind][i], tensor), f"{kind} {i} on rank {rank}"
