"""A sharded tensor as torch.distributed.checkpoint stores it: boxes of the tensor's own shape.

A rank owns flat ranges of a row-major tensor. Each range is cut into boxes (slices along every
dimension), which is what distributed checkpoints consist of. So every reader finds a tensor of the
global shape, whichever way it shards it: FSDP2, DTensor, another world size or another stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from zerofx.compat.tensors import local_tensor
from zerofx.runtime.tiles import Range

if TYPE_CHECKING:
    from zerofx.runtime.param_tensor import ShardedTensor


@dataclass(frozen=True)
class Box:
    """A contiguous box of a row-major tensor, and where it begins in the rank's flat piece."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes_of(shape: Sequence[int], ranges: Sequence[Range]) -> tuple[Box, ...]:
    """Return boxes that make up the flat `ranges` of a tensor of `shape`, in memory order.

    Each box is contiguous in memory, and a range becomes at most 2 * ndim - 1 of them: the rest of
    its first row, whole rows, and the beginning of its last row, where both rests are ranges of a
    tensor with one dimension less. A tensor without elements is one empty box.
    """
    if not prod(shape):
        return (Box((0,) * len(shape), tuple(shape), 0),)
    found: list[Box] = []
    position = 0
    for start, stop in ranges:
        for offsets, sizes in _cut(tuple(shape), start, stop):
            found.append(Box(offsets, sizes, position))
            position += prod(sizes)
    return tuple(found)


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


# -- what torch.distributed.checkpoint asks of a tensor (its _Checkpointable protocol) -------------
def write_items(tensor: ShardedTensor, name: str) -> list[Any]:
    """Return what this rank can write of a tensor: one item per box."""
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
    """Return where this rank's boxes lie; none if it owns nothing of the tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        for box in tensor._piece.boxes
    ]


def box_at(tensor: ShardedTensor, offsets: Sequence[int]) -> torch.Tensor:
    """Return the box that begins at `offsets`: a view of the rank's piece."""
    for box in tensor._piece.boxes:
        if box.offsets == tuple(offsets):
            local = local_tensor(tensor)
            return local[box.start : box.start + box.numel].view(box.sizes)
    raise AssertionError(f"{tensor!r} has no box at {list(offsets)}")
