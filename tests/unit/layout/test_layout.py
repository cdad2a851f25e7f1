"""The flat layout: ranks' pieces partition every parameter, whatever the shapes and the world."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from zerofx.layout.buckets import Layout
from zerofx.layout.build import ALIGN_BYTES, UnitParam, merge_small, unit_layout

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
WORLDS = st.integers(1, 9)
SMALL = st.sampled_from([0, 64, 1000])
BUCKETS = st.sampled_from([0, 1, 1024, 4096, 2**20])


@st.composite
def models(draw: st.DrawFn) -> list[UnitParam]:
    """Draw the parameters of a model in registration order, units contiguous."""
    return [
        UnitParam(
            name=f"blocks.{unit}.p{i}",
            shape=draw(SHAPES),
            dtype=draw(DTYPES),
            unit=f"blocks.{unit}",
            requires_grad=draw(st.booleans()),
        )
        for unit in range(draw(st.integers(1, 6)))
        for i in range(draw(st.integers(1, 4)))
    ]


def check_invariants(layout: Layout, params: list[UnitParam]) -> None:
    """Check what holds for every layout, merged or not."""
    placed = [p.name for b in layout.buckets for p in b.params]
    assert sorted(placed) == sorted(p.name for p in params), "each parameter lies in one bucket"
    by_name = {p.name: p for p in params}
    for index, bucket in enumerate(layout.buckets):
        assert bucket.index == index
        assert bucket.numel % layout.shard_size == 0
        assert layout.shard_numel(bucket) * bucket.dtype.itemsize % ALIGN_BYTES == 0
        assert {by_name[n].dtype for n in bucket.names} == {bucket.dtype}
        assert {by_name[n].requires_grad for n in bucket.names} == {bucket.trainable}
        end = 0
        for piece in bucket.params:
            assert piece.offset >= end, "parameters do not overlap"
            assert piece.offset * bucket.dtype.itemsize % ALIGN_BYTES == 0
            assert piece.shape == by_name[piece.name].shape
            assert layout.where[piece.name] == (bucket, piece)
            end = piece.end
        assert end <= bucket.numel
        # Padding stays below one alignment step a parameter and one a rank.
        step = max(1, ALIGN_BYTES // bucket.dtype.itemsize)
        bound = sum(p.numel for p in bucket.params) + step * (
            len(bucket.params) + 2 * layout.shard_size
        )
        assert bucket.numel <= bound


def check_pieces(layout: Layout) -> None:
    """Check that the ranks' pieces of a parameter are its elements, each once and in order."""
    for bucket, param in layout.where.values():
        flat = list(range(bucket.numel))
        whole: list[int] = []
        for rank in range(layout.shard_size):
            lo, hi = layout.shard_bounds(bucket, rank)
            shard = flat[lo:hi]
            in_shard, in_param, length = layout.piece(bucket, param, rank)
            assert 0 <= length <= len(shard) - in_shard
            assert length == 0 or in_param == len(whole)
            whole += shard[in_shard : in_shard + length]
        assert whole == flat[param.offset : param.end]


@given(models(), WORLDS, SMALL)
def test_pieces_partition_every_parameter(
    params: list[UnitParam], world: int, persist_below: int
) -> None:
    layout = unit_layout(params, world, persist_below=persist_below)
    check_invariants(layout, params)
    check_pieces(layout)
    for bucket in layout.buckets:
        for name in bucket.names:
            nbytes = next(p.nbytes for p in params if p.name == name)
            assert bucket.persistent == (nbytes < persist_below)
        assert bucket.persistent or len(bucket.units) == 1


@given(models(), WORLDS, SMALL, BUCKETS)
def test_merging_keeps_order_and_the_limit(
    params: list[UnitParam], world: int, persist_below: int, bucket_bytes: int
) -> None:
    layout = unit_layout(params, world, replicate_size=2, persist_below=persist_below)
    merged = merge_small(layout, params, bucket_bytes)
    check_invariants(merged, params)
    check_pieces(merged)
    assert (merged.shard_size, merged.replicate_size) == (world, 2)
    names = [n for b in layout.buckets for n in b.names]
    assert [n for b in merged.buckets for n in b.names] == names, "order is kept"
    unmerged = {b.names for b in layout.buckets}
    for bucket in merged.buckets:
        assert bucket.full_bytes <= bucket_bytes or bucket.names in unmerged
        assert not bucket.persistent or bucket.names in unmerged


@given(models(), WORLDS)
def test_merging_is_greedy(params: list[UnitParam], world: int) -> None:
    """With no limit, neighbours stay apart only where dtype or trainability changes."""
    layout = unit_layout(params, world)
    merged = merge_small(layout, params, 2**40)
    kinds = [(b.dtype, b.trainable) for b in merged.buckets]
    assert all(a != b for a, b in itertools.pairwise(kinds))


@given(models(), SMALL, BUCKETS)
def test_the_order_of_buckets_does_not_depend_on_the_world(
    params: list[UnitParam], persist_below: int, bucket_bytes: int
) -> None:
    """Units and their order come from the model alone; only padding follows the world."""
    one, four = (unit_layout(params, w, persist_below=persist_below) for w in (1, 4))
    assert [b.names for b in one.buckets] == [b.names for b in four.buckets]
    offsets = [[p.offset for p in b.params] for b in one.buckets]
    assert offsets == [[p.offset for p in b.params] for b in four.buckets]


def test_a_bucket_by_hand() -> None:
    params = [
        UnitParam("a.w", (3, 5), torch.float32, "a"),
        UnitParam("a.b", (5,), torch.float32, "a"),
    ]
    layout = unit_layout(params, shard_size=2)
    (bucket,) = layout.buckets
    # 15 elements, then 5 from the next 64-byte line on; 2 ranks of 16.
    assert [p.offset for p in bucket.params] == [0, 16]
    assert (bucket.numel, layout.shard_numel(bucket)) == (32, 16)
    assert layout.piece(bucket, bucket.params[0], 0) == (0, 0, 15)
    assert layout.piece(bucket, bucket.params[1], 0) == (0, 0, 0)
    assert layout.piece(bucket, bucket.params[1], 1) == (0, 0, 5)
    assert sum(p.numel for p in bucket.params) == sum(math.prod(p.shape) for p in params)
