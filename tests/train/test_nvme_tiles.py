"""Tiled parameters on NVMe: one place a parameter, of which the schedule reads a tile at a time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from far_cases import Loop, far, tiers, trained, unequal
from pool import Pool
from test_nvme_tier import moved_and_held
from test_nvme_training import ALL, EVERYWHERE, LOOPS, Cell, differing

import zerofx
from benchmarks.tiling import MLP
from zerofx import ops
from zerofx.analysis.memory.memory import memory
from zerofx.analysis.time.traffic import traffic
from zerofx.errors import NvmeError
from zerofx.ir.meta import info
from zerofx.layout.buckets import Bucket, Layout, Mesh, ParamSlice
from zerofx.layout.tiers import Tier
from zerofx.layout.tiles import tiles_of
from zerofx.nvme.checksum import BLOCK_BYTES, covering
from zerofx.runtime.tiers.homes import staged_bytes
from zerofx.runtime.tiers.host_tier import HostTier
from zerofx.runtime.tiers.nvme_home import PARAMETERS, NvmeHome

TILED = {"blocks.*.mlp": 4, "position": 2}
CELLS: list[Cell] = [
    ("gpt", {"tiling": TILED, "prefetch": 2}, Loop(accumulation=2, clip="function"), [ALL]),
]


def test_two_ranks(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, differing, str(tmp_path), CELLS):
        assert not found


def test_one_rank(tmp_path: Path) -> None:
    """Tiles from the host and from NVMe give the same bits; whole weights round otherwise. (Adam
    would blow up what rounding leaves of a gradient that is zero: a key's bias.)
    """
    loop = Loop("momentum", accumulation=2, clip="function")
    plan = {"tiling": TILED, "prefetch": 2}
    found = {
        place: trained("gpt", {**plan, **tiers(str(tmp_path), *place)}, loop)
        for place in (("cpu", "cpu"), ALL)
    }
    assert not unequal(found["cpu", "cpu"], found[ALL])
    whole = trained("gpt", {}, loop)
    assert unequal(found[ALL], whole), "no tiles"
    for name, value in whole.items():
        torch.testing.assert_close(found[ALL][name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_one_rank_that_keeps_a_part_on_the_device(tmp_path: Path) -> None:
    """What stays there is its own shard: nothing is tiled."""
    places = tiers(str(tmp_path), *ALL)
    places["offload"]["device_fraction"] = 0.5
    found = trained("gpt", {"tiling": TILED, **places}, Loop())
    assert not unequal(found, trained("gpt", places, Loop()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "more"),
    [(2, {"activations": "recompute"}), (2, {"offload": {"activations": "nvme"}}),
     (2, {"offload": {"device_fraction": 0.4}}), (4, {"precision": "bf16"})],
    ids=str,
)  # fmt: skip
def test_everywhere(pool: Pool, tmp_path: Path, world: int, more: dict[str, Any]) -> None:
    plan = {"tiling": TILED, **more}
    if world == 4:
        plan["shard_axis_size"] = 2
    places = [p for p in EVERYWHERE if "device_fraction" not in str(more) or p[0] != "none"]
    cells: list[Cell] = [("gpt", plan, loop, places) for loop in LOOPS]
    for found in pool.run(world, differing, str(tmp_path), cells, timeout_s=900.0):
        assert not found


# -- bytes ----------------------------------------------------------------------------------------
def moved(folder: str) -> list[str]:
    plan = {"tiling": TILED, "precision": "bf16"}
    return moved_and_held(folder, plan, ALL)


def test_bytes_moved_and_held(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, moved, str(tmp_path)):
        assert not found


def test_what_is_read_around_a_tile_is_counted_on_the_host() -> None:
    """A tile of 520 KiB a rank lies in three blocks of 256."""
    with torch.device("meta"):
        captured = zerofx.capture(MLP(1040, 2048), (torch.empty(8, 1040),))
    plan = {"tiling": {"up": 8, "down": 8}, **tiers("/nowhere")}
    program = zerofx.rewrite(captured, plan, 2)
    layout = program.layout
    nodes = [n for g in program.graphs.values() for n in g.graph.nodes]
    reads = [n for n in nodes if n.target is ops.read_shard]
    expected = sorted(staged_bytes(layout, info(n).index) for n in reads)
    tiles = [s for s in expected if s >= 3 * BLOCK_BYTES]
    assert len(tiles) >= 16 and {*tiles} == {3 * BLOCK_BYTES}
    sizes = Counter(s.nbytes for s in memory(program).on_host)
    assert all(sizes[size] >= count for size, count in Counter(expected).items())
    sent = traffic(program).moved["nvme_read"]
    assert sent.sent_bytes >= sum(expected)


# -- one place, read by tiles ---------------------------------------------------------------------
NUMEL = 100_000  # of a tile: 390.6 KiB of the 256 KiB blocks that have checksums


def layout_of(count: int) -> Layout:
    tiles = tiles_of("up.weight", (count * 100, 1000), count)
    buckets = tuple(
        Bucket(
            t.index, (t.unit,), torch.float32,
            (ParamSlice(t.part_name, (100, 1000), 0, t),), NUMEL,
            home=Tier.NVME, source=Tier.NVME,
        )
        for t in tiles
    )  # fmt: skip
    return Layout(buckets, Mesh.of())


def made(folder: Path, count: int = 3) -> tuple[NvmeHome, torch.Tensor, Layout]:
    """Return a home with one tiled parameter, and that as users see it."""
    layout = layout_of(count)
    parts = {b.index: (0, *layout.stretch(b)) for b in layout.buckets}
    host = HostTier(torch.device("cpu"))
    home = NvmeHome(folder, 0, host, {0: "up.weight (3 tiles)"}, parts, lambda: 0)
    home.reserve(PARAMETERS, {0: 4 * NUMEL * count})
    return home, home.place(PARAMETERS, 0, torch.float32), layout


def test_each_tile_is_read_from_the_parameters_place(tmp_path: Path) -> None:
    home, shown, layout = made(tmp_path)
    assert not home.read_shard(1, torch.float32).wait().any(), "zeros before anybody writes"
    shown.copy_(torch.randn(shown.shape, generator=torch.Generator().manual_seed(0)))
    for b in layout.buckets:
        before = home._host.moved["nvme_read"].nbytes
        tile = home.read_shard(b.index, torch.float32).wait()
        assert torch.equal(tile, shown[b.index * NUMEL : (b.index + 1) * NUMEL])
        read = home._host.moved["nvme_read"].nbytes - before
        assert read == staged_bytes(layout, b.index) >= tile.nbytes
    update = home.read(PARAMETERS, 0, torch.float32).wait()
    update.mul_(2)
    home.write(PARAMETERS, 0, update)
    tiles = [home.read_shard(b.index, torch.float32) for b in layout.buckets]
    assert torch.equal(torch.cat([t.wait() for t in tiles]), shown)
    assert torch.equal(shown, update)


def test_places_on_the_host_are_lent_as_long_as_a_tile_is_held(tmp_path: Path) -> None:
    home, shown, _ = made(tmp_path)
    shown.fill_(1)
    host, tile = home._host, home.read_shard(1, torch.float32).wait()
    assert host.num_lent == 1
    copy = host.reload(tile)  # finds its place, though the tile begins behind that
    assert host._lent[tile.data_ptr()][0].nbytes > tile.nbytes
    copy.wait()
    del tile, copy
    assert host.num_lent == 0


def test_damage_in_a_tile_names_the_parameter(tmp_path: Path) -> None:
    home, shown, _ = made(tmp_path)
    home.write(PARAMETERS, 0, torch.ones(3 * NUMEL))
    home.read_shard(0, torch.float32).wait()
    (path,) = tmp_path.iterdir()
    extent = home._files[0]._layout.extents["up.weight (3 tiles)"]
    with open(path, "r+b") as file:
        file.seek(extent.offset + 4 * NUMEL + 5)
        file.write(b"\x55")
    with pytest.raises(NvmeError, match=r"of up\.weight \(3 tiles\) at offset .* checksum"):
        home.read_shard(1, torch.float32).wait()
    assert torch.equal(home.read_shard(2, torch.float32).wait(), shown[2 * NUMEL :])


@pytest.mark.parametrize(
    ("start", "stop", "nbytes", "expected"),
    [
        (0, 10, 100, (0, 100)),
        (BLOCK_BYTES, 2 * BLOCK_BYTES, 4 * BLOCK_BYTES, (BLOCK_BYTES, 2 * BLOCK_BYTES)),
        (BLOCK_BYTES - 1, BLOCK_BYTES + 1, 9 * BLOCK_BYTES, (0, 2 * BLOCK_BYTES)),
        (BLOCK_BYTES, BLOCK_BYTES + 7, BLOCK_BYTES + 7, (BLOCK_BYTES, BLOCK_BYTES + 7)),
    ],
)
def test_whole_blocks_are_read(
    start: int, stop: int, nbytes: int, expected: tuple[int, int]
) -> None:
    assert covering(start, stop, nbytes) == expected


# -- what users do --------------------------------------------------------------------------------
def written_by_hand(folder: str) -> list[bool]:
    """Say whether what is written into a tiled parameter on NVMe is what forward reads next."""
    found = []
    results = []
    for place in ({}, {"offload": "none"}):
        model, optimizer = far(folder, "gpt", tiling=TILED, **place)
        tokens = torch.arange(8).repeat(2, 1)
        before = model(tokens, tokens).detach()
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "mlp" in name:
                    param.mul_(0.5)
        loss = model(tokens, tokens)
        found.append(bool(loss.detach() != before))
        loss.backward()
        optimizer.step()
        folder_of = Path(folder) / f"saved-{len(results)}"
        zerofx.save(folder_of, model, optimizer)
        results.append((loss.detach(), *model.state_dict().values()))
        other, theirs = far(folder, "gpt", tiling={"position": 2}, **place)
        zerofx.load(folder_of, other, theirs)
        found.append(all(map(torch.equal, other.state_dict().values(), results[-1][1:])))
    return [*found, all(map(torch.equal, *results))]


def test_writes_by_hand_and_saves_on_one_rank(tmp_path: Path) -> None:
    """Beside whole weights, which round otherwise."""
    assert written_by_hand(str(tmp_path))[:4] == [True] * 4


def test_writes_by_hand_and_saves(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, written_by_hand, str(tmp_path)):
        assert found == [True] * 5
