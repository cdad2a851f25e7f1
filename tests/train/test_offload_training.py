"""Shards, gradients and states on the host: the bits of the run in which they are on the device."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from offload_loops import differing, differing_rows
from pool import Pool

BOTH = {"optimizer": "cpu", "parameters": "cpu"}
OPTIMIZER = {"optimizer": "cpu"}
HALF = {**OPTIMIZER, "device_fraction": 0.5}
FROZEN = {"parameters": "cpu"}
FINE: dict[str, Any] = {"bucket_bytes": 0, "persist_below": 0}
MERGED: dict[str, Any] = {"bucket_bytes": 2000, "persist_below": 200}
RECOMPUTED = {"activations": "recompute"}
ACTIVATIONS = {"activations": "cpu"}
EARLY = {"update": "in-backward"}

# A cover of pairs of stage, world, precision, what is away, and what else is done about memory; of
# the loops in offload_loops, every other one runs in a row.
ONE_RANK: list[tuple[str, dict[str, Any]]] = [
    ("chain", {**FINE, "stage": 3, "precision": "fp16", "offload": BOTH, **RECOMPUTED}),
    ("chain", {**FINE, "stage": 3, "offload": HALF, "tiling": {"layers.1.linear": 3}}),
    ("chain", {**FINE, "stage": 2, "precision": "bf16", "offload": OPTIMIZER}),
    ("chain", {**FINE, "stage": 1, "precision": "fp16", "offload": {**HALF, **ACTIVATIONS}}),
    ("chain", {**FINE, "stage": 3, "precision": "bf16", "offload": BOTH, **EARLY}),
    ("chain", {**FINE, "stage": 2, "offload": OPTIMIZER, **EARLY}),
    ("adapters", {**MERGED, "stage": 3, "offload": {**FROZEN, **ACTIVATIONS}}),
]
TWO_RANKS: list[tuple[str, dict[str, Any]]] = [
    ("chain", {**FINE, "stage": 3, "offload": {**BOTH, **ACTIVATIONS}}),
    ("chain", {**FINE, "stage": 2, "precision": "fp16", "offload": HALF, **RECOMPUTED}),
    ("chain", {**FINE, "stage": 1, "precision": "bf16", "offload": OPTIMIZER}),
    ("chain", {**FINE, "stage": 1, "offload": HALF}),
    ("chain", {**FINE, "stage": 3, "offload": OPTIMIZER, **EARLY}),
    ("adapters", {**MERGED, "stage": 3, "precision": "bf16", "offload": FROZEN, "prefetch": 2}),
    ("gpt", {**MERGED, "stage": 3, "precision": "bf16", "offload": {**BOTH, "device_fraction": 0.3},
             "tiling": {"blocks.1.mlp": 4}}),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(ONE_RANK)))
def test_one_rank(row: int) -> None:
    assert not differing(*ONE_RANK[row], half=row % 2)


def test_two_ranks(pool: Pool) -> None:
    for found in pool.run(2, differing_rows, TWO_RANKS, True):
        assert not found


def test_the_rows_cover_all_pairs() -> None:
    """Of what two choices a plan may make together, each pair is in some row."""
    rows = [set(_choices(plan, world)) for world, table in ((1, ONE_RANK), (2, TWO_RANKS))
            for _, plan in table]  # fmt: skip
    wanted = {
        frozenset(pair)
        for a, b in [("stage", "world"), ("stage", "precision"), ("world", "precision"),
                     ("stage", "away"), ("world", "away"), ("world", "beside")]
        for pair in product(VALUES[a], VALUES[b])
    } - IMPOSSIBLE  # fmt: skip
    missing = [sorted(pair) for pair in wanted if not any(pair <= row for row in rows)]
    assert not missing


def _choices(plan: dict[str, Any], world: int) -> list[str]:
    tiers = plan["offload"]
    away = "both" if tiers.get("parameters") and tiers.get("optimizer") else "frozen"
    if "parameters" not in tiers:
        away = "half" if "device_fraction" in tiers else "optimizer"
    beside = "keep"
    if "tiling" in plan:
        beside = "tiling"
    elif plan.get("activations") == "recompute" or tiers.get("activations"):
        beside = plan.get("activations", "activations")
    return [f"stage {plan['stage']}", f"world {world}", plan.get("precision", "fp32"), away, beside]


VALUES: dict[str, list[str]] = {
    "stage": ["stage 1", "stage 2", "stage 3"],
    "world": ["world 1", "world 2"],
    "precision": ["fp32", "bf16", "fp16"],
    "away": ["both", "optimizer", "half", "frozen"],
    "beside": ["keep", "recompute", "activations", "tiling"],
}
IMPOSSIBLE = {frozenset(p) for p in product(["stage 1", "stage 2"], ["both", "frozen"])}

# Of every stage and precision with everything that may be away, on one rank in fp32, every third;
# what is done beside it, in turn. On one rank no tiling: without offload it gains nothing and is
# left out, and tiles change the order of sums.
MATRIX = [
    (world, "adapters" if away is FROZEN else "gpt", {"stage": stage, "precision": precision,
                                                      "offload": away})
    for world, stage, precision, away in product(
        (1, 2), (1, 2, 3), ("fp32", "bf16", "fp16"), (OPTIMIZER, HALF, BOTH, FROZEN))
    if (stage == 3 or away in (OPTIMIZER, HALF)) and (world == 2 or precision == "fp32")
][::3]  # fmt: skip
BESIDE: list[dict[str, Any]] = [
    {}, {"activations": "recompute"}, {"tiling": {"blocks.1.mlp": 4}}, {"prefetch": 2},
    {"activations": {"*": "offload"}}, {"memory_budget": "1MiB"}, {"update": "in-backward"},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MATRIX)))
def test_what_is_away_and_beside(pool: Pool, number: int) -> None:
    world, case, plan = MATRIX[number]
    left_out = {"update"} if plan["precision"] == "fp16" else set()
    left_out |= {"tiling"} if world == 1 else set()
    beside = [b for b in BESIDE if left_out.isdisjoint(b)]
    rows = [
        (case, {**sizes, **plan, **beside[(number + turn) % len(beside)]})
        for turn, sizes in enumerate((MERGED, FINE))
    ]
    for found in pool.run(world, differing_rows, rows, timeout_s=300.0):
        assert not found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_shards_within_groups(pool: Pool, stage: int) -> None:
    plan = {**FINE, "stage": stage, "shard_axis_size": 2, "offload": OPTIMIZER}
    for found in pool.run(4, differing, "chain", plan):
        assert not found


@pytest.mark.slow
def test_compiled_by_inductor(pool: Pool) -> None:
    plan = {**MERGED, "stage": 3, "kernels": "inductor", "offload": BOTH}
    for found in pool.run(2, differing, "gpt", plan, 0, timeout_s=300.0):
        assert not found
