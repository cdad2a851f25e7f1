"""Where each parameter lies: units, buckets, and the slice of a bucket that a rank owns.

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

# What backward alone uses is freed between steps from this size on, so that the peak of forward
# does not carry it; smaller buffers stay: allocating them again would cost more than they hold.
REST_BYTES = 1 << 20

# The formats that a plan's precision speaks of; doubles, complex numbers and integers stay.
LOW_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ParamSlice:
    """One parameter, or one tile of a tiled one, inside a bucket.

    Shapes: `shape` is the global (full) shape, of a parameter that is cut over the tensor axis that
    of this rank's part; `offset` and `numel` count elements of the bucket.
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
        if self.part is not None:
            return self.part.shape
        return self.shape if self.tile is None else self.tile.shape

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
    home, source: the tiers of the shard with all that belongs to it, and of what gathers read.
    positions: along the pipeline axis, of the ranks that hold it: several, where tied layers of
        several pipeline stages read it.
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
    home: Tier = Tier.DEVICE
    source: Tier = Tier.DEVICE
    positions: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "reduce_dtype"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.dtype)

    @property
    def is_cast(self) -> bool:
        """Whether the gathered copy is in another format than the shards."""
        return self.compute_dtype is not self.dtype

    @property
    def is_away(self) -> bool:
        """Whether its shard lives elsewhere than on the device."""
        return self.home is not Tier.DEVICE

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.params)

    @property
    def tile(self) -> Tile | None:
        """The tile that this bucket holds, and nothing beside it."""
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
        """Name the bucket for dumps and errors: its first unit, and how many more."""
        head = self.units[0] if self.units else "params"
        return head if len(self.units) <= 1 else f"{head}..{self.units[-1]}"


# The axes of the grid of ranks, the slowest first: along the last one, ranks are numbered 0, 1, 2.
# Along the others all ranks have the same samples; along the data axes each has its own, unless
# neighbours share them, each with a part of the sequence. Those are the ranks of the context axis,
# which is no further axis of the grid: shards and reductions go over it as over all data axes.
AXES = ("pipeline", "replicate", "shard", "tensor")
DATA_AXES = ("replicate", "shard")
CONTEXT = "context"


@dataclass(frozen=True)
class Mesh:
    """How many ranks there are along each of AXES.

    context: how many neighbours along the data axes share their samples.
    """

    sizes: tuple[int, ...]
    context: int = 1

    @classmethod
    def of(cls, *, context: int = 1, **sizes: int) -> Mesh:
        """Return the mesh with these axes. The others have one rank."""
        assert sizes.keys() <= {*AXES}, f"{sizes.keys() - {*AXES}} are no axes of a mesh"
        made = cls(tuple(sizes.get(axis, 1) for axis in AXES), context)
        assert made.num_reducing % context == 0, f"{context} do not divide {made}"
        return made

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def num_data_ranks(self) -> int:
        """How many ranks, or groups of ranks along the context axis, have samples of their own."""
        return self.num_reducing // self.context

    @property
    def num_reducing(self) -> int:
        """Over how many ranks a gradient is summed."""
        return math.prod(map(self.along, DATA_AXES))

    def along(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.context if axis == CONTEXT else self.sizes[AXES.index(axis)]

    def stride(self, axis: str) -> int:
        """Return how far the numbers of neighbours along an axis are apart."""
        if axis == CONTEXT:
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
    """All buckets of a model, and over how many ranks of each mesh axis they lie.

    position: which pipeline stage's share `shard_numel` and the like speak of: that of this rank.
    """

    buckets: tuple[Bucket, ...]
    mesh: Mesh
    position: int = field(default=0, compare=False, repr=False)

    @cached_property
    def shard_size(self) -> int:
        """Over how many ranks each bucket is sharded."""
        return self.mesh.along("shard")

    @cached_property
    def tensor_size(self) -> int:
        """Over how many ranks the layers themselves are cut."""
        return self.mesh.along("tensor")

    @cached_property
    def pipeline_size(self) -> int:
        """Over how many ranks the model is divided, layer by layer."""
        return self.mesh.along("pipeline")

    @property
    def is_cut(self) -> bool:
        """Whether a rank has less than all of some parameter."""
        return self.shard_size > 1 or self.tensor_size > 1 or self.pipeline_size > 1

    def has(self, bucket: Bucket) -> bool:
        """Tell whether the ranks of this pipeline stage hold a bucket."""
        return self.pipeline_size == 1 or self.position in bucket.positions

    @property
    def own_buckets(self) -> tuple[Bucket, ...]:
        """The buckets that the ranks of this pipeline stage hold."""
        return tuple(filter(self.has, self.buckets))

    @cached_property
    def replicate_size(self) -> int:
        """How many copies of each shard there are."""
        return self.mesh.along("replicate")

    @property
    def rest_bytes(self) -> int:
        """Return the size from which buffers of backward alone are freed between steps.

        Plain data parallel frees none, as DDP keeps its buckets: there the buffers are whole
        models, and mapping their pages again each step cost 100 ms of 800 (50 M parameters, CPU).
        """
        is_data_parallel = self.shard_size == 1 and self.replicate_size > 1
        return sys.maxsize if is_data_parallel else REST_BYTES

    def reduces_in_place(self, bucket: Bucket) -> bool:
        """Tell whether a bucket's gradients can be packed and reduced where `p.grad` shows them."""
        is_own_format = bucket.reduce_dtype is bucket.dtype
        return self.shard_size == 1 and is_own_format and not bucket.is_away

    def shard_numel(self, bucket: Bucket) -> int:
        """Return the elements of `bucket` that one rank owns: of another pipeline stage's, none."""
        return bucket.numel // self.shard_size if self.has(bucket) else 0

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
        """Map the name of a parameter, or of a tile, to its bucket and slice."""
        return {p.name: (b, p) for b in self.buckets for p in b.params}

    @cached_property
    def blocks(self) -> tuple[tuple[Bucket, ...], ...]:
        """The buckets whose shards are one allocation: the tiles of a parameter, else one alone."""
        found: dict[object, list[Bucket]] = {}
        for b in self.buckets:
            found.setdefault(b.index if b.tile is None else b.tile.name, []).append(b)
        return tuple(tuple(block) for block in found.values())

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """The number of each bucket's block."""
        numbers = {b.index: n for n, block in enumerate(self.blocks) for b in block}
        return tuple(numbers[b.index] for b in self.buckets)

    @cached_property
    def far_buckets(self) -> frozenset[int]:
        """The buckets that live on NVMe."""
        return frozenset(b.index for b in self.buckets if b.home is Tier.NVME)

    def block_numel(self, block: tuple[Bucket, ...]) -> int:
        """Return the elements of a block that one rank owns."""
        return sum(self.shard_numel(b) for b in block)

    def part(self, flat: Tensor, bucket: int) -> Tensor:
        """Return a bucket's shard within the memory of its block, `flat` itself where alone."""
        block = self.blocks[self.block_of[bucket]]
        if len(block) == 1:
            return flat
        size = flat.numel() // len(block)  # tiles are equal
        tile = self.buckets[bucket].tile
        assert tile is not None
        return flat[tile.index * size : (tile.index + 1) * size]

    def stretch(self, bucket: Bucket) -> tuple[int, int, int]:
        """Return which bytes start:stop of its block's place a bucket's shard has; and all bytes.

        A block that lives on NVMe has one place there, under its first bucket.
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
        """Map each parameter that the user sees to where it lies: one place, or one a tile."""
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
        """Return which elements of a flat parameter a rank owns, in the order it holds them."""
        found = []
        for bucket, param in self.owned[name]:
            _, start, length = self.piece(bucket, param, shard_rank)
            first = param.tile.index * param.numel if param.tile else 0
            found.append((first + start, first + start + length))
        return tuple(found)
