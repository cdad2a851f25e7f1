"""shard-parameters: gathers in place of full parameters."""

from __future__ import annotations

import pytest
from models import OWN
from oracle import differences, execute
from oracle_cases import Choice, expected, make_state
from passes_compact import before, order, pass_named, run

from zerofx import ops
from zerofx.ir.meta import Role, info
from zerofx.ir.program import Planned
from zerofx.passes.shard_parameters import ShardParameters

NAME = "shard-parameters"
FINE = Choice(3, bucket_bytes=0, persist_below=0)


def shard(case: str, choice: Choice) -> Planned:
    return run(before(case, choice, NAME), pass_named(choice, NAME))


def test_stage_3_gathers_before_first_use_in_both_graphs() -> None:
    program = before("chain", FINE, NAME)
    assert order(program, "backward")[:2] == ["region 0", "region 1 layers.3"]

    after = run(program, pass_named(FINE, NAME))

    assert order(after, "forward", views=True) == [
        "gather 0", "wait gather 0", "view 0: code.weight",
        "region 0 code",
        "region 1",
        "gather 1", "wait gather 1", "view 1: layers.0.linear.weight, layers.0.linear.bias",
        "region 2 layers.0",
        "gather 2", "wait gather 2", "view 2: layers.1.linear.weight, layers.1.linear.bias",
        "region 3 layers.1",
        "gather 3", "wait gather 3", "view 3: layers.2.linear.weight, layers.2.linear.bias",
        "region 4 layers.2",
        "gather 4", "wait gather 4", "view 4: layers.3.linear.weight, layers.3.linear.bias",
        "region 5 layers.3",
        "region 6",
    ]  # fmt: skip
    assert order(after, "backward", views=True) == [
        "gather 0", "wait gather 0", "view 0: code.weight",
        "region 0",
        "gather 4", "wait gather 4", "view 4: layers.3.linear.weight",
        "region 1 layers.3",
        "gather 3", "wait gather 3", "view 3: layers.2.linear.weight",
        "region 2 layers.2",
        "gather 2", "wait gather 2", "view 2: layers.1.linear.weight",
        "region 3 layers.1",
        "gather 1", "wait gather 1", "view 1: layers.0.linear.weight",
        "region 4 layers.0",
        "region 5 code",
    ]  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_refresh_what_stays_resident(stage: int) -> None:
    after = shard("chain", Choice(stage, bucket_bytes=1500))
    assert order(after, "forward") == [
        "refresh 0", "wait refresh 0", "region 0 code", "region 1", "region 2 layers.0",
        "refresh 1", "wait refresh 1", "region 3 layers.1", "region 4 layers.2",
        "refresh 2", "wait refresh 2", "region 5 layers.3", "region 6",
    ]  # fmt: skip
    assert [row for row in order(after, "backward") if "region" not in row] == [
        "resident 0", "resident 2", "resident 1",
    ]  # fmt: skip


@pytest.mark.parametrize("choice", [Choice(0), Choice(3, 1)], ids=str)
def test_one_rank_a_shard_axis_reads_its_shard(choice: Choice) -> None:
    after = shard("chain", choice)
    assert all("region" in row for row in order(after, "forward"))
    views = [n for n in after.graph("forward").nodes if n.target is ops.param_view]
    assert {info(v.args[0]).role for v in views} == {Role.SHARD}


def test_persistent_parameters_are_refreshed_at_stage_3_too() -> None:
    after = shard("chain", Choice(3, bucket_bytes=0))
    assert "refresh 2" in order(after, "forward")
    assert "resident 2" not in order(after, "backward"), "backward of a linear reads no bias"


@pytest.mark.parametrize("case", OWN)
def test_no_full_parameter_is_left(case: str) -> None:
    for stage in range(4):
        after = shard(case, Choice(stage))
        for name in after.graphs:
            assert not after.placeholders(name, Role.PARAM)


def test_frozen_parameters_are_gathered_and_unused_ones_are_not() -> None:
    views = [
        info(n).name
        for n in shard("adapters", Choice(3)).graph("forward").nodes
        if n.target is ops.param_view
    ]
    assert "blocks.0.attn.qkv.inner.weight" in views
    views = [
        info(n).name
        for n in shard("convnet", Choice(3)).graph("forward").nodes
        if n.target is ops.param_view
    ]
    assert "stem.weight" in views and "unused" not in views


def test_far_uses_are_gathered_apart_if_large() -> None:
    """The code is read in the first and the last region: two gathers, each with its own reader."""
    program = before("chain", FINE, NAME)
    near = run(program, ShardParameters(stage=3, regather_gap=9, regather_bytes=0))
    apart = run(program, ShardParameters(stage=3, regather_gap=2, regather_bytes=0))
    assert order(near, "forward").count("gather 0") == 1
    assert order(apart, "forward").count("gather 0") == 2
    assert order(apart, "forward")[-3:] == ["gather 0", "wait gather 0", "region 6"]
    got = execute([apart] * 2, make_state("chain", 2))
    assert not differences(expected("chain", 2), got)


def test_a_view_lies_at_the_layouts_offset() -> None:
    after = shard("gpt", Choice(3))
    assert after.layout is not None
    for name in after.graphs:
        for node in after.graph(name).nodes:
            if node.target is ops.param_view:
                bucket, piece = after.layout.where[info(node).name]
                assert node.args[1:] == (piece.offset, list(piece.shape))
                assert info(node.args[0]).index == bucket.index
