"""Building a layout: parameters are grouped by unit into buckets, and small neighbours merged."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from zerofx.layout.buckets import Bucket, Layout, Mesh, ParamSlice
from zerofx.layout.placements import Part
from zerofx.layout.tiles import Tile

ALIGN_BYTES = 64  # one cache line, and enough for every vector width and for O_DIRECT multiples


@dataclass(frozen=True)
class UnitParam:
    """The facts about one parameter that its layout depends on (tied parameters appear once)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    requires_grad: bool = True
    compute_dtype: torch.dtype | None = None  # None: same as dtype
    reduce_dtype: torch.dtype | None = None
    tile: Tile | None = None  # set if this is one tile of a parameter
    part: Part | None = None  # set if `shape` is that of one rank's part
    positions: tuple[int, ...] = (0,)  # the pipeline stages that hold it

    @property
    def formats(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The dtypes of its shard, of its gathered copy and of its gradient during reduction."""
        return self.dtype, self.compute_dtype or self.dtype, self.reduce_dtype or self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered parameter."""
        return math.prod(self.shape) * self.formats[1].itemsize


def align_numel(itemsize: int) -> int:
    """Return the number of elements that fill the alignment of a rank's slice."""
    return max(1, ALIGN_BYTES // itemsize)


def _aligned(numel: int, itemsize: int) -> int:
    step = align_numel(itemsize)
    return -(-numel // step) * step


def make_bucket(
    index: int, params: Iterable[UnitParam], shard_size: int, persistent: bool = False,
    pipeline_size: int = 1,
) -> Bucket:  # fmt: skip
    """Lay `params` (of equal formats) out in one flat buffer, padded to shard_size equal slices.

    pipeline_size: ranks along the pipeline axis, which have the pipeline's stages in turn.
    """
    slices, units, offset = [], dict[str, None](), 0
    members = list(params)
    formats = members[0].formats
    itemsize = min(f.itemsize for f in formats)
    for p in members:
        assert p.formats == formats, f"bucket {index} mixes {formats} and {p.formats} ({p.name})"
        slices.append(ParamSlice(p.name, p.shape, offset, p.tile, p.part))
        units.setdefault(p.unit)
        # an empty parameter takes space too, because offsets identify the parameters of a bucket
        offset += _aligned(max(math.prod(p.shape), 1), itemsize)
    per_rank = _aligned(-(-max(offset, 1) // shard_size), itemsize)
    if members[0].tile is not None:  # padding would put gaps between the ranges of its tiles
        whole = math.prod(members[0].shape)
        assert len(members) == 1 and per_rank * shard_size == whole, (members[0].name, per_rank)
    return Bucket(
        index=index,
        units=tuple(units),
        dtype=formats[0],
        compute_dtype=formats[1],
        reduce_dtype=formats[2],
        params=tuple(slices),
        numel=per_rank * shard_size,
        persistent=persistent,
        trainable=any(p.requires_grad for p in members),
        positions=tuple(sorted({stage % pipeline_size for stage in members[0].positions})),
    )


def unit_layout(
    params: Iterable[UnitParam], shard_size: int, replicate_size: int = 1, persist_below: int = 0,
    tensor_size: int = 1, pipeline_size: int = 1, context_size: int = 1, zigzag: bool = False,
    node_size: int = 1,
) -> Layout:  # fmt: skip
    """Return the unmerged layout: one bucket per unit, format, trainability and pipeline stage.

    Parameters of fewer than `persist_below` bytes share one persistent bucket per format.
    """
    groups: dict[tuple, list[UnitParam]] = {}
    for p in params:
        if p.nbytes < persist_below and p.tile is None:
            key = ("", p.formats, p.requires_grad, True, p.positions)
        else:
            key = (p.unit, p.formats, p.requires_grad, False, p.positions)
        groups.setdefault(key, []).append(p)
    buckets = [
        make_bucket(i, members, shard_size, key[3], pipeline_size)
        for i, (key, members) in enumerate(groups.items())
    ]
    mesh = Mesh.of(
        pipeline=pipeline_size, replicate=replicate_size, shard=shard_size, tensor=tensor_size,
        context=context_size, node=node_size,
    )  # fmt: skip
    return Layout(tuple(buckets), replace(mesh, zigzag=zigzag))


def merge_small(layout: Layout, params: Iterable[UnitParam], bucket_bytes: int) -> Layout:
    """Merge neighbouring buckets of equal format and trainability up to `bucket_bytes`.

    The order is that of registration, so every rank and every run merges alike. Tiles stay apart.
    """
    by_name = {p.name: p for p in params}
    merged: list[tuple[list[UnitParam], bool]] = []
    size: list[int] = []
    for b in layout.buckets:
        members = [by_name[n] for n in b.names]
        last = merged[-1][0] if merged else None
        fits = (
            last is not None
            and not b.persistent
            and not merged[-1][1]
            and b.tile is None
            and last[0].tile is None
            and last[0].formats == (b.dtype, b.compute_dtype, b.reduce_dtype)
            and any(p.requires_grad for p in last) == b.trainable
            and last[0].positions == members[0].positions
            and size[-1] + b.full_bytes <= bucket_bytes
        )
        if fits:
            assert last is not None
            last.extend(members)
            size[-1] += b.full_bytes
        else:
            merged.append((members, b.persistent))
            size.append(b.full_bytes)
    buckets = [
        make_bucket(i, members, layout.shard_size, persistent, layout.pipeline_size)
        for i, (members, persistent) in enumerate(merged)
    ]
    return Layout(tuple(buckets), layout.mesh)
