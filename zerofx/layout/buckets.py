"""Buckets: the units and parameters in each, and the slice of a bucket that a rank owns.

A bucket is one flat buffer: its parameters in registration order, each aligned, padded so that
every rank owns an equal contiguous slice. One bucket is one all-gather and one reduce-scatter, and
the gathered parameters are views of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from zerofx.layout.placements import Part
from zerofx.layout.tiers import Tier
from zerofx.layout.tiles import Range, Tile

# Buffers that only backward uses are freed between steps from this size on, so that they do not add
# to the peak of forward. Smaller buffers stay: allocating them again costs more than they hold.
REST_BYTES = 1 << 16  # a smaller buffer is not worth a call of the allocator

# The formats that a plan's precision may change; doubles, complex numbers and integers keep theirs.
LOW_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ParamSlice:
    """One parameter, or one tile of a tiled one, inside a bucket.

    part: the cut over the tensor axis of the parameter, or of the tile.
    Shapes: `shape` is the full shape of the parameter, or the shape of this rank's part if it is
    cut over the tensor axis; `offset` and `numel` count elements of the bucket.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    tile: Tile | None = None
    part: Part | None = None

    @property
    def owner(self) -> str:
        """The name of the parameter that the user sees."""
        return self.name if self.tile is None else self.tile.name

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the parameter that the user sees."""
        if self.tile is not None:
            return self.tile.shape
        return self.shape if self.part is None else self.part.shape

    @property
    def owner_part(self) -> Part | None:
        """The cut over the tensor axis of the parameter that the user sees."""
        return self.part if self.tile is None else self.tile.part

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Bucket:
    """The parameters of one collective, laid out in one flat buffer of `numel` elements.

    dtype: the format of the shards, which hold the master weights, and of the user's gradients.
    compute_dtype: the format of the gathered copy. reduce_dtype: that of gradients when reduced.
    home: the tier of the shard, its gradient and states. source: the tier that gathers read from.
    positions: the positions on the pipeline axis of the ranks that hold it. There are several if
        tied layers of several pipeline stages read it.
        several pipeline stages read it.
    """

    index: int
    units: tuple[str, ...]
    dtype: torch.dtype
    params: tuple[ParamSlice, ...]
    numel: int  # padded to a multiple of shard_size * alignment
    persistent: bool = False  # small: the gathered copy is kept, and is gathered once per update
    trainable: bool = True  # whether any parameter required grad when the layout was made
    compute_dtype: torch.dtype = None  # type: ignore[assignment]  # None: same as dtype
    reduce_dtype: torch.dtype = None  # type: ignore[assignment]  # None: same as dtype
    home: Tier = Tier.DEVICE
    source: Tier = Tier.DEVICE
    positions: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "reduce_dtype"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.dtype)

    @property
    def is_cast(self) -> bool:
        """Whether the gathered copy has another format than the shards."""
        return self.compute_dtype is not self.dtype

    @property
    def is_away(self) -> bool:
        """Whether its shard lives off the device."""
        return self.home is not Tier.DEVICE

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.params)

    @property
    def tile(self) -> Tile | None:
        """The tile that this bucket holds, if any. A tile is always alone in its bucket."""
        return self.params[0].tile if self.params else None

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered copy."""
        return self.numel * self.compute_dtype.itemsize

    @cached_property
    def at(self) -> dict[int, ParamSlice]:
        """Map an offset in the bucket to the parameter that begins there."""
        return {p.offset: p for p in self.params}

    def label(self) -> str:
        """Return the name of the bucket in dumps and errors: its first and its last unit."""
        head = self.units[0] if self.units else "params"
        return head if len(self.units) <= 1 else f"{head}..{self.units[-1]}"


# The axes of the mesh, the slowest first: ranks along the last axis have consecutive numbers.
# Ranks along the data axes have different samples, unless neighbours share them, each with a part
# of the sequence: those form the context axis, which is no further axis of the mesh, since shards
# and reductions go over it as over all data axes. Ranks along the other axes have the same samples.
# Nor are these two: the node axis is neighbours along the shard axis that share a node, and the
# across axis is the ranks of a shard axis that have the same position in their nodes.
AXES = ("pipeline", "replicate", "shard", "tensor")
DATA_AXES = ("replicate", "shard")
CONTEXT = "context"
NODE = "node"
ACROSS = "across"


@dataclass(frozen=True)
class Mesh:
    """The mesh of ranks, as the number of ranks along each of AXES.

    context: the number of neighbours along the data axes that share their samples.
    zigzag: whether each of these has two chunks of what is cut over them, see `layout.placements`.
    node: the number of neighbours along the shard axis that form a node; 1 if the plan makes no
        difference between nodes.
    """

    sizes: tuple[int, ...]
    context: int = 1
    zigzag: bool = False
    node: int = 1

    @classmethod
    def of(cls, *, context: int = 1, node: int = 1, **sizes: int) -> Mesh:
        """Return the mesh with the given axis sizes; all other axes have one rank."""
        assert sizes.keys() <= {*AXES}, f"{sizes.keys() - {*AXES}} are no axes of a mesh"
        made = cls(tuple(sizes.get(axis, 1) for axis in AXES), context, node=node)
        assert made.num_reducing % context == 0, f"{context} do not divide {made}"
        assert made.along("shard") % node == 0, f"{node} do not divide the shard axis of {made}"
        return made

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks, or of groups of ranks along the context axis, with own samples."""
        return self.num_reducing // self.context

    @property
    def num_reducing(self) -> int:
        """The number of ranks over which a gradient is summed."""
        return math.prod(map(self.along, DATA_AXES))

    def along(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        if axis == NODE:
            return self.node
        if axis == ACROSS:
            return self.along("shard") // self.node
        return self.context if axis == CONTEXT else self.sizes[AXES.index(axis)]

    def is_zigzag(self, axis: str) -> bool:
        """Return whether the parts of values that are cut over an axis are in zigzag order."""
        return self.zigzag and axis == CONTEXT

    def stride(self, axis: str) -> int:
        """Return the distance between the numbers of neighbouring ranks along an axis."""
        if axis == ACROSS:
            return self.node * self.stride("shard")
        if axis in (CONTEXT, NODE):
            axis = DATA_AXES[-1]
        return math.prod(self.sizes[AXES.index(axis) + 1 :])

    def position(self, axis: str, rank: int) -> int:
        """Return the position of a rank along an axis."""
        return rank // self.stride(axis) % self.along(axis)

    def rank(self, positions: Mapping[str, int]) -> int:
        """Return the rank that has these positions along the axes."""
        return sum(positions[axis] * self.stride(axis) for axis in AXES)


@dataclass(frozen=True)
class Layout:
    """All buckets of a model, and the mesh over which they are distributed.

    position: the pipeline stage of this rank, to which `shard_numel` and similar methods refer.
    """

    buckets: tuple[Bucket, ...]
    mesh: Mesh
    position: int = field(default=0, compare=False, repr=False)

    @cached_property
    def shard_size(self) -> int:
        """The number of ranks over which each bucket is sharded."""
        return self.mesh.along("shard")

    @cached_property
    def node_size(self) -> int:
        """The ranks of the shard axis per node; 1 if the plan makes no difference between nodes."""
        return self.mesh.node

    def secondary_numel(self, bucket: Bucket) -> int:
        """Return the elements of `bucket` in a rank's secondary shard."""
        return bucket.numel // self.node_size

    @cached_property
    def tensor_size(self) -> int:
        """The number of ranks over which the layers themselves are cut."""
        return self.mesh.along("tensor")

    @cached_property
    def pipeline_size(self) -> int:
        """The number of pipeline stages into which the layers are divided."""
        return self.mesh.along("pipeline")

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds less than all of some parameter."""
        return self.shard_size > 1 or self.tensor_size > 1 or self.pipeline_size > 1

    def has(self, bucket: Bucket) -> bool:
        """Return whether the ranks of this pipeline stage hold a bucket."""
        return self.pipeline_size == 1 or self.position in bucket.positions

    @property
    def own_buckets(self) -> tuple[Bucket, ...]:
        """The buckets that the ranks of this pipeline stage hold."""
        return tuple(filter(self.has, self.buckets))

    @cached_property
    def replicate_size(self) -> int:
        """The number of copies of each shard."""
        return self.mesh.along("replicate")

    @property
    def rest_bytes(self) -> int:
        """The size in bytes from which buffers that only backward uses are freed between steps.

        Plain data parallelism frees none, as DDP keeps its buckets: the buffers then hold whole
        models, and mapping their pages at each step cost 100 ms of 800 (50 M parameters, CPU).
        """
        is_data_parallel = self.shard_size == 1 and self.replicate_size > 1
        return sys.maxsize if is_data_parallel else REST_BYTES

    def reduces_in_place(self, bucket: Bucket) -> bool:
        """Return whether a bucket's gradients can be packed and reduced in the memory of p.grad."""
        is_own_format = bucket.reduce_dtype is bucket.dtype
        return self.shard_size == 1 and is_own_format and not bucket.is_away

    def shard_numel(self, bucket: Bucket) -> int:
        """Return the elements of `bucket` that a rank owns; 0 if its stage does not hold it."""
        return bucket.numel // self.shard_size if self.has(bucket) else 0

    def shard_bounds(self, bucket: Bucket, shard_rank: int) -> tuple[int, int]:
        """Return the half-open element range of the flat bucket that `shard_rank` owns."""
        size = self.shard_numel(bucket)
        return shard_rank * size, (shard_rank + 1) * size

    def piece(self, bucket: Bucket, param: ParamSlice, shard_rank: int) -> tuple[int, int, int]:
        """Return (offset in the shard, offset in the flat parameter, length) of a rank's piece.

        The length is 0 if the rank owns nothing of the parameter.
        """
        lo, hi = self.shard_bounds(bucket, shard_rank)
        begin, end = max(lo, param.offset), min(hi, param.end)
        if begin >= end:
            return 0, 0, 0
        return begin - lo, begin - param.offset, end - begin

    @cached_property
    def where(self) -> dict[str, tuple[Bucket, ParamSlice]]:
        """Map the name of a parameter or a tile to its bucket and slice."""
        return {p.name: (b, p) for b in self.buckets for p in b.params}

    @cached_property
    def blocks(self) -> tuple[tuple[Bucket, ...], ...]:
        """Groups of buckets whose shards share an allocation: all tiles of a parameter, or one."""
        found: dict[object, list[Bucket]] = {}
        for b in self.buckets:
            found.setdefault(b.index if b.tile is None else b.tile.name, []).append(b)
        return tuple(tuple(block) for block in found.values())

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """The index in `blocks` of each bucket's block."""
        numbers = {b.index: n for n, block in enumerate(self.blocks) for b in block}
        return tuple(numbers[b.index] for b in self.buckets)

    @cached_property
    def far_buckets(self) -> frozenset[int]:
        """The indices of the buckets that live on NVMe."""
        return frozenset(b.index for b in self.buckets if b.home is Tier.NVME)

    def block_numel(self, block: tuple[Bucket, ...]) -> int:
        """Return the number of elements of a block that one rank owns."""
        return sum(self.shard_numel(b) for b in block)

    def part(self, flat: Tensor, bucket: int) -> Tensor:
        """Return the part of a block's memory `flat` that is the shard of the bucket."""
        block = self.blocks[self.block_of[bucket]]
        if len(block) == 1:
            return flat
        size = flat.numel() // len(block)  # tiles are equal
        tile = self.buckets[bucket].tile
        assert tile is not None
        return flat[tile.index * size : (tile.index + 1) * size]

    def stretch(self, bucket: Bucket) -> tuple[int, int, int]:
        """Return (start, stop, total): the bytes of a bucket's shard within those of its block.

        A block on NVMe is stored as one entry, under its first bucket.
        """
        block = self.blocks[self.block_of[bucket.index]]
        nbytes = self.shard_numel(bucket) * bucket.dtype.itemsize
        start = 0 if bucket.tile is None else bucket.tile.index * nbytes
        return start, start + nbytes, self.block_numel(block) * bucket.dtype.itemsize

    @cached_property
    def owners(self) -> tuple[tuple[str, ...], ...]:
        """The names of each block's parameters, as the user sees them."""
        return tuple(
            tuple(dict.fromkeys(p.owner for b in block for p in b.params)) for block in self.blocks
        )

    @cached_property
    def owned(self) -> dict[str, tuple[tuple[Bucket, ParamSlice], ...]]:
        """Map each parameter that the user sees to its buckets and slices, one per tile."""
        found: dict[str, list[tuple[Bucket, ParamSlice]]] = {}
        for b in self.buckets:
            for p in b.params:
                found.setdefault(p.owner, []).append((b, p))
        return {name: tuple(places) for name, places in found.items()}

    @property
    def tiles(self) -> dict[str, int]:
        """The number of tiles of each tiled parameter."""
        return {name: len(places) for name, places in self.owned.items() if places[0][1].tile}

    def ranges(self, name: str, shard_rank: int) -> tuple[Range, ...]:
        """Return the element ranges of a flat parameter that a rank owns, in the order it does."""
        found = []
        for bucket, param in self.owned[name]:
            _, start, length = self.piece(bucket, param, shard_rank)
            first = param.tile.index * param.numel if param.tile else 0
            found.append((first + start, first + start + length))
        return tuple(found)
