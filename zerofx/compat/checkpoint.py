"""The files of torch.save and torch.distributed.checkpoint: where each tensor lies in them.

Its own writer is not used: that of 2.13 holds every tensor until all of a file has been written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan

# All that the index of a checkpoint is made of, besides dtypes. Nothing else in one is unpickled.
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
    """Return what the index says of one item: bytes offset:offset + length of a file."""
    return _StorageInfo(name, offset, length)


def storage_offset(tensor: torch.Tensor) -> int:
    """Return at which byte of its file the storage of a tensor lies.

    The tensor comes from `torch.load(..., map_location="meta")`, which notes it.
    """
    offset = tensor.untyped_storage()._checkpoint_offset
    assert isinstance(offset, int), "the tensor was not loaded to meta"
    return offset
