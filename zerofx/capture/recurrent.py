"""Recurrent layers: keep them whole, as one node per layer instead of one per step and gate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerofx.kernels.recurrent import MODES, recurrent


def is_recurrent(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a torch call is a recurrent stack on a padded batch.

    A packed batch depends on its lengths; under autocast, torch casts inside the call.
    """
    name = getattr(func, "__name__", "")
    if name not in MODES or func is not MODES[name] or not args:
        return False
    is_padded = isinstance(args[1], (list, tuple)) == (name == "lstm")
    return is_padded and args[0].dim() == 3 and not torch.is_autocast_enabled(args[0].device.type)


def run_recurrent(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Run a stack layer by layer, with dropout between the layers as in torch."""
    x, state, weights, has_biases, layers, dropout, training, is_bidirectional, batch_first = args
    hidden = tuple(state) if name == "lstm" else (state,)
    directions = 2 if is_bidirectional else 1
    per_layer = len(weights) // layers
    x = x.transpose(0, 1) if batch_first else x
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        first = [h[layer * directions : (layer + 1) * directions] for h in hidden]
        own = weights[layer * per_layer : (layer + 1) * per_layer]
        x, *last = recurrent(x, first, list(own), name, has_biases, is_bidirectional)
        finals.append(tuple(last[: len(hidden)]))
        if dropout and training and layer + 1 < layers:
            x = F.dropout(x, dropout, training=True)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.cat(parts) for parts in zip(*finals, strict=True))
