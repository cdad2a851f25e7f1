"""Batches of a trial: variations of a model's example call, another for each rank and step.

With one batch on all ranks, the mean of their gradients would be that of any one of them: a
gradient that is never exchanged would not be noticed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerofx.compat.graphs import pytree

NOISE = 0.1  # of a floating-point tensor's standard deviation

Call = tuple[tuple[Any, ...], dict[str, Any]]


def vary(args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> Call:
    """Return the call of that number, the same on every rank.

    Integers (tokens, labels, positions) change places within their tensor, so that they stay within
    what the model knows; floating-point tensors get noise; all else stays.
    """
    generator = torch.Generator().manual_seed(number)
    varied: Call = pytree.tree_map(lambda leaf: _vary(leaf, generator), (args, kwargs))
    return varied


def _vary(leaf: Any, generator: torch.Generator) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_floating_point():
        spread = float(leaf.detach().float().std()) if leaf.numel() > 1 else 1.0
        noise = torch.randn(leaf.shape, generator=generator) * (spread or 1.0) * NOISE
        varied = leaf.detach() + noise.to(leaf.dtype)
        return varied.requires_grad_(leaf.requires_grad)
    if leaf.dtype is torch.bool or leaf.is_complex():
        return leaf
    order = torch.randperm(leaf.numel(), generator=generator)
    return leaf.flatten()[order].view(leaf.shape)
