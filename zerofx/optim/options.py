"""Checks of the options that are the same in several optimizers, with torch.optim's messages."""

from __future__ import annotations

from torch import Tensor


def check_adam_options(
    lr: float | Tensor, betas: tuple[float, float], weight_decay: float, eps: float = 0.0
) -> None:
    """Raise ValueError for a rate, decay, eps below zero, or a beta outside [0, 1)."""
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
