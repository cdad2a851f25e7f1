"""Sharded tensors in torch.distributed.checkpoint: stored as boxes of the tensor's own shape.

A rank owns flat ranges of a row-major tensor, or of its part of a tensor cut over the tensor axis.
Each range is cut into boxes (slices along every dimension), which distributed checkpoints consist
of. So every reader finds a tensor of the global shape, however it shards that tensor: FSDP2,
DTensor, another world size, another stage, or a different cut of layers.

`FlatPiece` is the older format, one flat tensor of the elements. Snapshots of early versions store
parameters and states in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from zerofx.compat.tensors import DisableTorchFunctionSubclass, local_tensor, make_subclass
from zerofx.errors import ShardError
from zerofx.layout.placements import Part
from zerofx.layout.tiles import Range, say
from zerofx.runtime.tensors.refuse import op_name

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from zerofx.runtime.tensors.piece import ParameterPiece
    from zerofx.runtime.tensors.tensor import ShardedTensor


@dataclass(frozen=True)
class Box:
    """A box of a row-major tensor, and the location of its elements in the rank's flat piece.

    start, strides: of the flat piece, in the sense of `as_strided`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of the rank's flat piece."""
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.start)


def boxes_of(shape: Sequence[int], ranges: Sequence[Range]) -> tuple[Box, ...]:
    """Return boxes that make up the flat `ranges` of a tensor of `shape`, in memory order.

    Each box is contiguous in memory. A range becomes at most 2 * ndim - 1 boxes: the rest of its
    first row, whole rows, and the beginning of its last row. The two partial rows are themselves
    ranges of a tensor with one dimension less. A tensor without elements is one empty box.
    """
    if not prod(shape):
        return (Box((0,) * len(shape), tuple(shape), 0, _dense(shape)),)
    found: list[Box] = []
    position = 0
    for start, stop in ranges:
        for offsets, sizes in _cut(tuple(shape), start, stop):
            found.append(Box(offsets, sizes, position, _dense(sizes)))
            position += prod(sizes)
    return tuple(found)


def boxes_of_part(part: Part, rank: int, ranges: Sequence[Range]) -> tuple[Box, ...]:
    """Return boxes of a whole parameter that make up flat `ranges` of a rank's part of it.

    They are the boxes of the part, moved to the part's place in the whole parameter and cut at the
    end of each group. Their rows may therefore have gaps between them in memory.
    """
    if not prod(part.shape):
        return boxes_of(part.shape, ())
    dim, found = part.cut.dim, []
    for box in boxes_of(part.local, ranges):
        before, after = slice(dim), slice(dim + 1, None)
        for row, whole_row, count in part.rows(rank, box.offsets[dim], box.sizes[dim]):
            offsets = (*box.offsets[before], whole_row, *box.offsets[after])
            sizes = (*box.sizes[before], count, *box.sizes[after])
            start = box.start + (row - box.offsets[dim]) * box.strides[dim]
            found.append(Box(offsets, sizes, start, box.strides))
    return tuple(found)


def _dense(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _cut(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of the boxes of elements start:stop."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    per_row = prod(inner)
    (first, head), (last, tail) = divmod(start, per_row), divmod(stop, per_row)
    if first == last:
        yield from _within(first, inner, head, tail)
        return
    if head:
        yield from _within(first, inner, head, per_row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    if tail:
        yield from _within(last, inner, 0, tail)


def _within(
    row: int, shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in _cut(shape, start, stop):
        yield (row, *offsets), (1, *sizes)


# -- methods for torch.distributed.checkpoint (its _Checkpointable protocol) -----------------------
def write_items(tensor: ShardedTensor, name: str) -> list[Any]:
    """Return the write items of a tensor on this rank: one per box."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=tensor.dtype)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, tensor.shape),
        )
        for chunk in chunks(tensor)
    ]


def chunks(tensor: ShardedTensor) -> list[Any]:
    """Return the positions of this rank's boxes; none if it owns nothing of the tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        for box in tensor.zfx.boxes
    ]


def box_at(tensor: ShardedTensor, offsets: Sequence[int]) -> torch.Tensor:
    """Return the box that begins at `offsets`, as a view of the rank's piece."""
    for box in tensor.zfx.boxes:
        if box.offsets == tuple(offsets):
            return box.of(local_tensor(tensor))
    raise AssertionError(f"{tensor!r} has no box at {list(offsets)}.")


# -- the format of early versions ------------------------------------------------------------------
class FlatPiece(torch.Tensor):
    """A flat 1-D tensor of `total` elements, of which this rank holds `local`, the given `ranges`.

    torch.distributed.checkpoint saves it as exactly these chunks and loads it into any other cut,
    since it reads the overlaps. The random states of all ranks are saved this way, and snapshots of
    early versions hold parameters and optimizer states in this format. Chunks that are equal on
    several ranks (a replicate axis) are written once. It is a tensor only because the checkpoint
    code looks for one; it supports no computation.
    """

    local: torch.Tensor
    ranges: tuple[Range, ...]
    total: int

    @staticmethod
    def of(local: torch.Tensor, ranges: tuple[Range, ...], total: int) -> FlatPiece:
        """Return the piece of these ranges; it shares memory with `local`."""
        length = sum(stop - start for start, stop in ranges)
        is_within = all(stop <= total for _, stop in ranges)
        assert local.shape == (length,) and is_within, (local.shape, ranges, total)
        out = make_subclass(FlatPiece, local)
        out.local, out.ranges, out.total = local, ranges, total
        return out

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if op_name(func) in ("device", "dtype", "layout", "is_meta", "requires_grad"):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ShardError(
            f"{op_name(func)} of a FlatPiece is not supported. It can only be passed to "
            "torch.distributed.checkpoint's save and load. Use zerofx.full_state_dict(model)."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatPiece({self.local.dtype}, elements {say(self.ranges)} of {self.total})"

    def size(self, dim: int | None = None) -> Any:
        return torch.Size([self.total]) if dim is None else self.total

    def _chunks(self) -> list[ChunkStorageMetadata]:
        """Return the position of each range, or the single empty chunk of an empty tensor."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        ranges = [r for r in self.ranges if r[1] > r[0] or not self.total]
        return [ChunkStorageMetadata(torch.Size([a]), torch.Size([b - a])) for a, b in ranges]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks() if self.local.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._part_at[index.offset[0]]

    @cached_property
    def _part_at(self) -> dict[int, torch.Tensor]:
        """The part of each non-empty range, by the range's first element."""
        sizes = [stop - start for start, stop in self.ranges]
        parts = zip(self.ranges, self.local.split(sizes), strict=True)
        return {start: part for (start, stop), part in parts if stop > start or not self.total}


def flat_piece(tensor: torch.Tensor) -> FlatPiece:
    """Return a parameter, or an optimizer state of its shape, as one flat tensor of its elements.

    Snapshots of early versions hold it in this format. It shares memory with `tensor`, so that
    loading fills the tensor in place.
    """
    piece: ParameterPiece | None = getattr(tensor, "zfx", None)
    if piece is not None and piece.is_cut:
        return FlatPiece.of(local_tensor(tensor), piece.ranges, piece.shape.numel())
    return FlatPiece.of(tensor.detach().view(-1), ((0, tensor.numel()),), tensor.numel())
