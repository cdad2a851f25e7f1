"""Sums of two formats: added part by part, so that no copy of all elements is made."""

from __future__ import annotations

import torch
from torch import Tensor

from zerofx.runtime.loss_scale import LossScaler

_PART_NUMEL = 1 << 16  # 256 KiB in fp32, which stay in a core's cache


def add_(total: Tensor, value: Tensor, alpha: float = 1.0) -> None:
    """Add `value`, times `alpha`, to `total` in place.

    On CPU, torch copies an operand of another format than that of the sum, and a result likewise.

    Shapes: both flat, of equal size.
    """
    if total.dtype is value.dtype or total.device.type != "cpu":
        total.add_(value, alpha=alpha)
        return
    for part, added in zip(total.split(_PART_NUMEL), value.split(_PART_NUMEL), strict=True):
        part.add_(added, alpha=alpha)


def add_unscaled_(total: Tensor, value: Tensor, scaler: LossScaler) -> None:
    """Add `value`, divided by the loss scale, to `total` in place; the scaler notes an inf or NaN.

    Shapes: both flat, of equal size.
    """
    if total.dtype is value.dtype:
        total.add_(scaler.unscale(value, value))
        return
    numel = _PART_NUMEL if total.device.type == "cpu" else max(1, total.numel())
    for part, added in zip(total.split(numel), value.split(numel), strict=True):
        part.add_(scaler.unscale(added, torch.empty_like(part)))
