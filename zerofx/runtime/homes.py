"""Memory for what lives with a bucket: its shard, its gradients, its optimizer states."""

from __future__ import annotations

import torch
from torch import Tensor

from zerofx.runtime.host_tier import host_memory
from zerofx.runtime.tiers import Tier


class Homes:
    """Hands out memory of each tier, for one model on one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, numel: int, dtype: torch.dtype, tier: Tier) -> Tensor:
        """Return `numel` zeros on a tier. Off the device they lie outside torch's allocator."""
        if tier is Tier.DEVICE:
            with torch.inference_mode(False):
                return torch.zeros(numel, dtype=dtype, device=self._device)
        with torch.inference_mode(False):
            return host_memory(numel * dtype.itemsize, self._device).view(dtype)
