"""Buffers follow rank 0: its values at the start, and what each forward makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zerofx.comm.world import World
from zerofx.compat.modules import own_buffers


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return what lies in a tensor, flat: no backend sends every dtype (gloo no bool, say)."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


@torch.no_grad()
def follow_rank_0(world: World, values: Sequence[Tensor]) -> list[Tensor]:
    """Return rank 0's values of these tensors on every rank; all travel in one message."""
    # The widest dtypes first, so that each tensor lies aligned in the message.
    order = sorted(range(len(values)), key=lambda i: -values[i].element_size())
    flat = torch.cat([_as_bytes(values[i]) for i in order])
    world.broadcast(flat, 0).wait()
    followed = list(values)
    pieces = flat.split([values[i].nbytes for i in order])
    for i, piece in zip(order, pieces, strict=True):
        followed[i] = piece.view(values[i].dtype).view(values[i].shape)
    return followed


@torch.no_grad()
def share_buffers(world: World, model: nn.Module) -> None:
    """Move a model's buffers to the world's device and start every rank from rank 0's values."""
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
                world.broadcast(here.view(-1).view(torch.uint8), 0).wait()
                moved[id(buffer)] = here
            own_buffers(module)[key] = moved[id(buffer)]
