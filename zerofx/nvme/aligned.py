"""Memory for direct I/O: page-aligned tensors, and tensors as bytes."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zerofx.errors import NvmeError

PAGE = 4096  # alignment of direct transfers in files; in memory, the most that is ever required

Bytes = np.ndarray  # one-dimensional, uint8


def up(nbytes: int) -> int:
    """Return `nbytes`, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def down(nbytes: int) -> int:
    """Return `nbytes`, rounded down to whole pages."""
    return nbytes // PAGE * PAGE


def aligned_bytes(nbytes: int) -> Tensor:
    """Return zeroed host memory that begins at a page boundary, outside torch's allocator.

    Shapes: uint8[nbytes].
    """
    memory = mmap.mmap(-1, max(up(nbytes), PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # only advice: fewer pages to pin per transfer
            memory.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def aligned_empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a zeroed host tensor that moves to and from disk without an extra copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    return aligned_bytes(nbytes).view(dtype).view(shape)


def bytes_of(tensor: Any, path: str, label: str) -> tuple[Bytes, int]:
    """Return the bytes of a tensor, without a copy, and their address.

    path, label: for error messages.

    Raises:
        NvmeError: not a dense, contiguous tensor on the host; the message says how to fix it.
    """
    if not isinstance(tensor, Tensor):
        other = type(tensor).__name__
        raise NvmeError(f"{_what(path, label)}: {other} is not a tensor. Give a torch.Tensor.")
    is_dense = tensor.layout == torch.strided
    if not tensor.is_cpu or not is_dense:
        kind = tensor.device if is_dense else tensor.layout
        raise NvmeError(
            f"{_what(path, label)}: {_form(tensor)} is {kind}. Only dense tensors in host memory "
            "can be moved. Copy it to one (zerofx.nvme.aligned_empty creates the fastest)."
        )
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise NvmeError(
            f"{_what(path, label)}: {_form(tensor)} with strides {tensor.stride()} is not "
            "contiguous. Give tensor.contiguous(), or read into a contiguous buffer."
        )
    flat = tensor.detach() if tensor.requires_grad else tensor
    flat = flat.view(-1).view(torch.uint8)
    return flat.numpy(), flat.data_ptr()


def _what(path: str, label: str) -> str:
    return f"{path}, {label}" if label else path


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")
