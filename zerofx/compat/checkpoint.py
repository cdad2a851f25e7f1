"""Checkpoint files: the offsets of tensors in files of torch.save and distributed checkpoints.

torch's own writer is not used, because that of 2.13 holds every tensor until the whole file has
been written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan

# The classes in the index of a checkpoint, besides dtypes. No others are unpickled from one.
INDEX_PARTS = frozenset(
    {
        "torch.Size",
        "torch.serialization._get_layout",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    }
)


def file_of(plan: SavePlan) -> str:
    """Return the name of the file that a plan writes, as torch's reader expects it."""
    prefix: str = plan.storage_data.prefix  # type: ignore[attr-defined]
    return f"{prefix}0{DEFAULT_SUFFIX}"


def storage_info(name: str, offset: int, length: int) -> Any:
    """Return the index entry of one item: bytes offset:offset + length of a file."""
    return _StorageInfo(name, offset, length)


def storage_offset(tensor: torch.Tensor) -> int:
    """Return the byte offset of a tensor's storage in its file.

    The tensor comes from `torch.load(..., map_location="meta")`, which records the offset.
    """
    offset = tensor.untyped_storage()._checkpoint_offset
    assert isinstance(offset, int), "the tensor was not loaded to meta"
    return offset
