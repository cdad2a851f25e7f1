"""Buffers: every rank starts from rank 0's values and takes rank 0's updates in each forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zerofx.comm.world import World
from zerofx.compat.modules import own_buffers


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as flat bytes: no backend sends every dtype (gloo has no bool)."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


@torch.no_grad()
def follow_rank_0(world: World, values: Sequence[Tensor]) -> list[Tensor]:
    """Return rank 0's values of these tensors on every rank, sent as one message.

    In a model that brings its own slices, they are those of the first rank with the same slices.
    """
    # Widest dtypes first, so that each tensor is aligned within the message.
    order = sorted(range(len(values)), key=lambda i: -values[i].element_size())
    flat = torch.cat([_as_bytes(values[i]) for i in order])
    world.from_first(flat).wait()
    followed = list(values)
    pieces = flat.split([values[i].nbytes for i in order])
    for i, piece in zip(order, pieces, strict=True):
        followed[i] = piece.view(values[i].dtype).view(values[i].shape)
    return followed


@torch.no_grad()
def share_buffers(world: World, model: nn.Module) -> None:
    """Move a model's buffers to the world's device and copy rank 0's values to every rank."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for key, buffer in own_buffers(module).items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                here = buffer
                if here.is_meta:
                    here = torch.empty_like(buffer, device=world.device)
                here = here.to(world.device).contiguous()
                world.from_first(here.view(-1).view(torch.uint8)).wait()
                moved[id(buffer)] = here
            own_buffers(module)[key] = moved[id(buffer)]
