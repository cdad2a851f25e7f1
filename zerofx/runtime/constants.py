"""Constants of an emitted program: tensors that the model's forward holds itself."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor


def constant(
    values: Any, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], device: str
) -> Tensor:
    """Make a tensor from nested lists, or from the base64 of its contiguous bytes."""
    kind = getattr(torch, dtype)
    if isinstance(values, str):
        read = torch.frombuffer(bytearray(base64.b64decode(values)), dtype=kind).view(shape)
    else:
        read = torch.tensor(values, dtype=kind)
    return torch.empty_strided(shape, stride, dtype=kind, device=device).copy_(read.view(shape))
