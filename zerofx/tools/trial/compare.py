"""Tensors of two trainings, compared in the order in which a training makes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zerofx.tools.trial.settings import Difference

SMALL = 1e-6  # of the largest norm of a kind: a tensor below that is compared with that


class Comparison:
    """Notes how far tensors are from what plain training has."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.compared: dict[str, int] = {}
        self.largest: dict[str, Difference] = {}
        self.first: Difference | None = None

    def add(self, kind: str, step: int, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Compare tensors of one kind: name -> (this one's, plain training's)."""
        norms = {name: _norm(expected) for name, (_, expected) in pairs.items()}
        least = SMALL * max(norms.values(), default=0.0)
        for name, (got, expected) in pairs.items():
            found = _difference(kind, name, step, got, expected, max(norms[name], least))
            self.compared[kind] = self.compared.get(kind, 0) + 1
            worst = self.largest.get(kind)
            if worst is None or not found.error <= worst.error:
                self.largest[kind] = found
            if self.first is None and not found.error <= self.tolerance:
                self.first = found


def _norm(tensor: Tensor) -> float:
    """Return the norm of what is finite in a tensor."""
    return float(tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).norm())


def _difference(
    kind: str, name: str, step: int, got: Tensor, expected: Tensor, norm: float
) -> Difference:
    """Return how far `got` is off; what is NaN or infinite on both sides is equal."""
    a, b = got.detach().double().cpu(), expected.detach().double().cpu()
    if a.shape != b.shape:
        return Difference(kind, f"{name} {list(a.shape)}", step, math.inf)
    if not a.numel():
        return Difference(kind, name, step, 0.0)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs().nan_to_num(math.inf, math.inf))
    size = float(gap.norm())
    error = size / norm if norm else (0.0 if not size else math.inf)
    index = int(gap.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), a.shape))
    return Difference(
        kind, name, step, error, at, float(a.flatten()[index]), float(b.flatten()[index])
    )
