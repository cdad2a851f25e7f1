"""offload-shards: where buckets live, when their shards are copied, and gradients taken back."""

from __future__ import annotations

from typing import Any

import goldens
import op_sets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_cases import BOTH, OPTIMIZER, PARAMETERS, SPILLED, STORED, Choice
from passes_compact import before, final, order, pass_named, run
from torch import fx

from zerofx import ops
from zerofx.codegen.emit import render
from zerofx.ir.meta import info, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.layout.buckets import Bucket, Layout
from zerofx.layout.tiers import Tier
from zerofx.passes.offload_shards import OffloadShards
from zerofx.passes.placement import with_tiers
from zerofx.plan.parts import Offload
from zerofx.tools.views.schedule import view

NAME = "offload-shards"
FINE: dict[str, Any] = {"bucket_bytes": 0, "persist_below": 0}


def orders(choice: Choice, graph: str, distance: int = 1) -> tuple[list[str], list[str]]:
    """Return the chain's statements before and after the pass."""
    given = before("chain", choice, NAME)
    return order(given, graph), order(run(given, OffloadShards(distance=distance)), graph)


# -- to the device ------------------------------------------------------------------------------
def test_a_reload_is_launched_one_gather_ahead_and_waited_for_before_its_own() -> None:
    was, now = orders(Choice(3, offload=BOTH, **FINE), FORWARD)
    assert now == [
        "reload 0", "wait reload 0",
        "reload 1", "gather 0", "wait reload 1", "reload 2", "gather 1",
        "wait gather 0", "release shard 0", "region 0 code", "region 1",
        "wait reload 2", "reload 3", "gather 2",
        "wait gather 1", "release shard 1", "region 2 layers.0", "release 1",
        "wait reload 3", "reload 4", "gather 3",
        "wait gather 2", "release shard 2", "region 3 layers.1", "release 2",
        "wait reload 4", "gather 4",
        "wait gather 3", "release shard 3", "region 4 layers.2", "release 3",
        "wait gather 4", "release shard 4", "region 5 layers.3", "release 4",
        "region 6", "release 0",
    ]  # fmt: skip
    assert [row for row in now if "reload" not in row and "shard" not in row] == was


def test_two_ahead() -> None:
    _, now = orders(Choice(3, offload=BOTH, **FINE), FORWARD, distance=2)
    assert now[:9] == [
        "reload 0", "wait reload 0", "reload 1", "reload 2", "gather 0",
        "wait reload 1", "reload 3", "gather 1", "wait gather 0",
    ]  # fmt: skip


def test_the_plans_distance() -> None:
    for asked, distance in [("auto", 1), (0, 0), (3, 3)]:
        assert pass_named(Choice(3, prefetch=asked), NAME) == OffloadShards(distance=distance)


def test_a_copy_that_stays_is_refreshed_and_never_released() -> None:
    """The optimizer alone is away: what gathers read is on the device."""
    was, now = orders(Choice(3, offload=OPTIMIZER, **FINE), FORWARD)
    assert now[:8] == [
        "copy 0", "wait copy 0", "copy 1", "gather 0", "wait copy 1", "copy 2", "gather 1",
        "wait gather 0",
    ]  # fmt: skip
    assert [row for row in now if "copy" not in row] == was


@pytest.mark.parametrize("graph", [FORWARD, BACKWARD])
def test_among_one_rank_the_reload_is_the_gather(graph: str) -> None:
    was, now = orders(Choice(3, 1, offload=BOTH, **FINE), graph)
    renamed = [row.replace("gather", "reload") for row in was]
    assert [row for row in now if "offload" not in row and "store" not in row] == [
        row for row in renamed if "store" not in row
    ]
    assert any(row.startswith("reload") for row in now)


@pytest.mark.parametrize("choice", [Choice(2, offload=OPTIMIZER), Choice(1, 1, offload=OPTIMIZER)])
def test_what_is_resident_stays_so(choice: Choice) -> None:
    was, now = orders(choice, FORWARD)
    assert now == was
    assert any(row.startswith("refresh") for row in was), "one rank has its copy there as well"


def test_all_that_a_reload_says() -> None:
    choice = Choice(3, offload=BOTH, precision="bf16", **FINE)
    after = final("chain", choice)
    assert after.layout is not None
    launches = [n for n in after.graph(BACKWARD).nodes if n.target is ops.reload_shard]
    assert len(launches) == 5
    for launch in launches:
        bucket = after.layout.buckets[info(launch).index]
        shard, index, numel, slot = launch.args
        assert (index, numel) == (bucket.index, bucket.numel // 2)
        assert (info(shard).index, value(shard).dtype) == (index, torch.float32)  # type: ignore[arg-type]
        assert value(launch).dtype is torch.bfloat16, "it travels in the compute format"
        (wait,) = launch.users
        (release,) = (u for u in wait.users if u.target is ops.release)
        assert release.args == (wait, slot)
        assert 0 <= slot < len(after.slot_bytes)  # type: ignore[operator]
        assert info(launch).unit == bucket.label()


# -- gradients ----------------------------------------------------------------------------------
def test_a_reduced_slice_leaves_and_is_stored_behind_the_next_ones_launch() -> None:
    was, now = orders(Choice(2, offload=OPTIMIZER, **FINE), BACKWARD)
    moved = [row for row in now if row.split()[0] in ("reduce", "wait", "offload", "store")]
    assert moved == [
        "reduce 4",
        "wait reduce 4", "offload 4", "reduce 3",
        "wait reduce 3", "wait offload 4", "store 4", "offload 3", "reduce 2",
        "wait reduce 2", "wait offload 3", "store 3", "offload 2", "reduce 1",
        "wait reduce 1", "wait offload 2", "store 2", "offload 1", "reduce 0",
        "wait reduce 0", "wait offload 1", "store 1", "offload 0", "wait offload 0", "store 0",
    ]  # fmt: skip
    rest = [row for row in now if "offload" not in row and "store" not in row]
    assert rest == [row for row in was if "store" not in row]


def test_gradients_travel_as_they_were_reduced() -> None:
    after = final("chain", Choice(1, 1, offload=OPTIMIZER, precision="bf16", **FINE))
    assert after.layout is not None
    launches = [n for n in after.graph(BACKWARD).nodes if n.target is ops.offload_grad]
    assert len(launches) == 5
    for launch in launches:
        bucket = after.layout.buckets[info(launch).index]
        assert value(launch).dtype is bucket.reduce_dtype
        assert value(launch).device.type == "cpu"
        (wait,) = launch.users
        (store,) = wait.users
        assert store.target is ops.store_grad and value(store).dtype is torch.float32


# -- who lives where ----------------------------------------------------------------------------
def layout_of(case: str, choice: Choice) -> Layout:
    layout = before(case, choice, NAME).layout
    assert layout is not None
    return layout


def tiers(buckets: Any) -> set[tuple[Tier, Tier]]:
    return {(b.home, b.source) for b in buckets}


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        ((), (Tier.DEVICE, Tier.DEVICE)),
        (OPTIMIZER, (Tier.HOST, Tier.DEVICE)),
        (BOTH, (Tier.HOST, Tier.HOST)),
        (PARAMETERS, (Tier.DEVICE, Tier.DEVICE)),
    ],
)
def test_what_is_trained_lives_with_its_optimizer(offload: Any, expected: Any) -> None:
    layout = layout_of("chain", Choice(3, offload=offload, **FINE))
    assert tiers(layout.buckets) == {expected}


def test_what_is_frozen_lives_with_the_parameters() -> None:
    choice = Choice(3, offload=PARAMETERS, **FINE)
    given = before("adapters", choice, NAME)
    assert given.layout is not None
    frozen = [b.index for b in given.layout.buckets if not b.trainable]
    assert tiers(given.layout.buckets[i] for i in frozen) == {(Tier.HOST, Tier.HOST)}
    trained = [b for b in given.layout.buckets if b.trainable]
    assert tiers(trained) == {(Tier.DEVICE, Tier.DEVICE)}
    after = run(given, OffloadShards())
    moved = [n for g in after.graphs.values() for n in g.graph.nodes if n.target in op_sets.MOVES]
    assert {info(n).index for n in moved} == set(frozen)
    assert not any(n.target is ops.offload_grad for n in moved)


def test_what_persists_is_copied_where_it_is_gathered_from() -> None:
    layout = layout_of("gpt", Choice(3, offload=BOTH))
    assert tiers(b for b in layout.buckets if b.persistent) == {(Tier.HOST, Tier.DEVICE)}
    assert tiers(b for b in layout.buckets if not b.persistent) == {(Tier.HOST, Tier.HOST)}


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_a_fraction_stays_on_the_device_from_the_first(fraction: float) -> None:
    layout = layout_of("chain", Choice(3, **FINE))
    placed = with_tiers(layout, Offload(optimizer="cpu", device_fraction=fraction)).buckets
    away = [b.is_away for b in placed]
    assert away == sorted(away), "gradients of the first buckets come last: no time to move them"
    total = sum(b.numel for b in placed)
    stays = sum(b.numel for b in placed if not b.is_away)
    first = next((b.numel for b in placed if b.is_away), 0)
    assert stays <= fraction * total < stays + first + (not first)


def test_tiles_of_one_parameter_live_together() -> None:
    tiled = Choice(3, tiling=(("blocks.1.mlp", 4),), offload=(*BOTH, ("device_fraction", 0.5)))
    layout = layout_of("gpt", tiled)
    assert any(len(block) > 1 for block in layout.blocks)
    for block in layout.blocks:
        assert len(tiers(block)) == 1
    assert {b.is_away for b in layout.buckets} == {True, False}


def test_where_all_live_on_the_device_nothing_changes() -> None:
    for choice in (Choice(3), Choice(0), Choice(3, offload=PARAMETERS)):
        report = OffloadShards().run(before("chain", choice, NAME))
        assert not report.changed and report.summary == "all shards live on the device"


# -- whatever the plan --------------------------------------------------------------------------
SETTINGS = st.builds(
    Choice,
    stage=st.just(3),
    bucket_bytes=st.sampled_from([0, 1500, 6000]),
    persist_below=st.sampled_from([0, 100, 700]),
    offload=st.sampled_from([OPTIMIZER, BOTH, (*BOTH, ("device_fraction", 0.4))]),
    prefetch=st.sampled_from([0, 2]),
)


@settings(max_examples=8)
@given(st.sampled_from(["chain", "gpt", "adapters"]), SETTINGS, st.integers(0, 4))
def test_each_gather_of_what_is_away_sends_a_copy(case: str, choice: Choice, distance: int) -> None:
    after = run(before(case, choice, NAME), OffloadShards(distance=distance))
    assert after.layout is not None
    for name in after.graphs:
        nodes = list(after.graph(name).nodes)
        gathers = [n for n in nodes if n.target is ops.all_gather]
        for number, gather in enumerate(gathers):
            bucket = after.layout.buckets[info(gather).index]
            held: Any = gather.args[0]
            assert bucket.is_away == (held.target is ops.wait)
            if bucket.is_away:
                assert _stands(nodes, held.args[0], bucket, gathers[: number + 1]) <= distance
                assert held.next is gather or held.next.target in op_sets.RELOADS


def _stands(nodes: list[fx.Node], launch: fx.Node, bucket: Bucket, gathers: list[fx.Node]) -> int:
    """Return how many other gathers are launched between a reload and its own gather."""
    at = nodes.index(launch)
    assert info(launch).index == bucket.index
    return sum(nodes.index(g) > at for g in gathers) - 1


def test_golden_texts() -> None:
    program: Planned = final("chain", Choice(3, offload=BOTH, **FINE))
    goldens.check("schedule_away", str(view(program)))
    rows = render(program)["schedule.py"].split("def ", 1)[1].splitlines()
    words = ("rt.reload_shard", "rt.offload_grad", "rt.wait(offl", "rt.wait(relo", "rt.release(sha")
    goldens.check("emitted_away", "\n".join(r for r in rows if any(w in r for w in words)))


def test_values_of_every_node_are_fake() -> None:
    """A rule that allocates would take a model's whole memory while it is planned."""
    from zerofx.compat.graphs import FakeTensor

    for offload in (BOTH, SPILLED, STORED):
        program = final("gpt", Choice(3, offload=offload, **FINE))
        for gm in program.graphs.values():
            for node in gm.graph.nodes:
                if isinstance(node.meta.get("val"), torch.Tensor):
                    assert isinstance(node.meta["val"], FakeTensor), node
