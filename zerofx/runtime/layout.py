"""Where each parameter lies: units, buckets, and the slice of a bucket that a rank owns.

A bucket is one flat buffer: its parameters in registration order, each aligned, padded so that
every rank owns an equal contiguous slice. One bucket is one all-gather and one reduce-scatter, and
the gathered parameters are views of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

# What backward alone uses is freed between steps from this size on, so that the peak of forward
# does not carry it; smaller buffers stay: allocating them anew would cost more than they hold.
REST_BYTES = 1 << 20

ALIGN_BYTES = 64  # one cache line, and enough for every vector width and for O_DIRECT multiples

# The formats that a plan's precision speaks of; doubles, complex numbers and integers stay.
LOW_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ParamSlice:
    """One parameter inside a bucket.

    Shapes: `shape` is the global (full) shape; `offset` and `numel` count elements of the bucket.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Bucket:
    """The parameters of one collective, laid out in one flat buffer of `numel` elements.

    dtype: of the shards, which hold the master weights, and of the gradients that the user sees.
    compute_dtype: of the gathered copy. reduce_dtype: in which gradients travel and are summed.
    """

    index: int
    units: tuple[str, ...]
    dtype: torch.dtype
    params: tuple[ParamSlice, ...]
    numel: int  # padded to a multiple of shard_size * alignment
    persistent: bool = False  # too small to shard its gathered form: gathered once per update
    trainable: bool = True  # whether any parameter required grad when the layout was made
    compute_dtype: torch.dtype = None  # type: ignore[assignment]  # as dtype
    reduce_dtype: torch.dtype = None  # type: ignore[assignment]  # as dtype

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "reduce_dtype"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.dtype)

    @property
    def is_cast(self) -> bool:
        """Whether the gathered copy is in another format than the shards."""
        return self.compute_dtype is not self.dtype

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.params)

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered copy."""
        return self.numel * self.compute_dtype.itemsize

    @cached_property
    def at(self) -> dict[int, ParamSlice]:
        """Map an offset in the bucket to the parameter that begins there."""
        return {p.offset: p for p in self.params}

    def label(self) -> str:
        """Name the bucket for dumps and errors: its first unit, and how many more."""
        head = self.units[0] if self.units else "params"
        return head if len(self.units) <= 1 else f"{head}..{self.units[-1]}"


@dataclass(frozen=True)
class Layout:
    """All buckets of a model, and over how many ranks each is sharded and replicated."""

    buckets: tuple[Bucket, ...]
    shard_size: int
    replicate_size: int = 1

    @property
    def rest_bytes(self) -> int:
        """Return the size from which buffers of backward alone are freed between steps.

        Plain data parallel frees none, as DDP keeps its buckets: there the buffers are whole
        models, and mapping their pages anew each step cost 100 ms of 800 (50 M parameters, CPU).
        """
        is_data_parallel = self.shard_size == 1 and self.replicate_size > 1
        return sys.maxsize if is_data_parallel else REST_BYTES

    def reduces_in_place(self, bucket: Bucket) -> bool:
        """Tell whether a bucket's gradients can be packed and reduced where `p.grad` shows them."""
        return self.shard_size == 1 and bucket.reduce_dtype is bucket.dtype

    def shard_numel(self, bucket: Bucket) -> int:
        """Return the elements of `bucket` that one rank owns."""
        return bucket.numel // self.shard_size

    def shard_bounds(self, bucket: Bucket, shard_rank: int) -> tuple[int, int]:
        """Return the half-open element range of the flat bucket that `shard_rank` owns."""
        size = self.shard_numel(bucket)
        return shard_rank * size, (shard_rank + 1) * size

    def piece(self, bucket: Bucket, param: ParamSlice, shard_rank: int) -> tuple[int, int, int]:
        """Return (offset in the shard, offset in the flat parameter, length) of a rank's piece.

        The length is 0 where the rank owns nothing of the parameter.
        """
        lo, hi = self.shard_bounds(bucket, shard_rank)
        begin, end = max(lo, param.offset), min(hi, param.end)
        if begin >= end:
            return 0, 0, 0
        return begin - lo, begin - param.offset, end - begin

    @cached_property
    def where(self) -> dict[str, tuple[Bucket, ParamSlice]]:
        """Map a parameter's name to its bucket and slice."""
        return {p.name: (b, p) for b in self.buckets for p in b.params}


@dataclass(frozen=True)
class UnitParam:
    """What the layout needs to know of one parameter (tied parameters once, under one name)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    requires_grad: bool = True
    compute_dtype: torch.dtype | None = None  # None: as dtype
    reduce_dtype: torch.dtype | None = None

    @property
    def formats(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The dtypes of its shard, its gathered copy and its gradient on the way."""
        return self.dtype, self.compute_dtype or self.dtype, self.reduce_dtype or self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered parameter."""
        return math.prod(self.shape) * self.formats[1].itemsize


def _aligned(numel: int, itemsize: int) -> int:
    step = max(1, ALIGN_BYTES // itemsize)
    return -(-numel // step) * step


def make_bucket(
    index: int, params: Iterable[UnitParam], shard_size: int, persistent: bool = False
) -> Bucket:
    """Lay `params` (of equal formats) out in one flat buffer, padded to shard_size equal slices."""
    slices, units, offset = [], dict[str, None](), 0
    members = list(params)
    formats = members[0].formats
    itemsize = min(f.itemsize for f in formats)
    for p in members:
        assert p.formats == formats, f"bucket {index} mixes {formats} and {p.formats} ({p.name})"
        slices.append(ParamSlice(p.name, p.shape, offset))
        units.setdefault(p.unit)
        # an empty parameter takes room too: offsets tell the parameters of a bucket apart
        offset += _aligned(max(math.prod(p.shape), 1), itemsize)
    per_rank = _aligned(-(-max(offset, 1) // shard_size), itemsize)
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
    )


def unit_layout(
    params: Iterable[UnitParam], shard_size: int, replicate_size: int = 1, persist_below: int = 0
) -> Layout:
    """Return the unmerged layout: one bucket a unit, format and trainability.

    Parameters of fewer than `persist_below` bytes share one persistent bucket a format.
    """
    groups: dict[tuple, list[UnitParam]] = {}
    for p in params:
        if p.nbytes < persist_below:
            key = ("", p.formats, p.requires_grad, True)
        else:
            key = (p.unit, p.formats, p.requires_grad, False)
        groups.setdefault(key, []).append(p)
    buckets = [
        make_bucket(i, members, shard_size, persistent=key[3])
        for i, (key, members) in enumerate(groups.items())
    ]
    return Layout(tuple(buckets), shard_size, replicate_size)


def merge_small(layout: Layout, params: Iterable[UnitParam], bucket_bytes: int) -> Layout:
    """Merge neighbouring buckets of one format and trainability up to `bucket_bytes`.

    Order is registration order, so every rank and every run merges alike.
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
            and last[0].formats == (b.dtype, b.compute_dtype, b.reduce_dtype)
            and any(p.requires_grad for p in last) == b.trainable
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
        make_bucket(i, members, layout.shard_size, persistent)
        for i, (members, persistent) in enumerate(merged)
    ]
    return Layout(tuple(buckets), layout.shard_size, layout.replicate_size)
