"""A model small enough to read in a golden: equal layers between a first and a last one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """x + tanh(x W + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


class Stack(nn.Module):
    """Layers of one shape, and the mean square of a last linear map."""

    def __init__(self, layers: int = 5, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def stack(device: str = "meta") -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the model and a call, as the command line wants them."""
    with torch.device(device):
        return Stack(), (torch.zeros(8, 16),), {}
