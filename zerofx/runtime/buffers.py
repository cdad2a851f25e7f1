"""Buffers: every rank starts from rank 0's values and takes rank 0's updates in each forward.

In a pipeline, the ranks of a stage take those of the first of them, once per call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zerofx.comm.collectives import Work
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
    return _sent(values, world.from_first)


@torch.no_grad()
def share_between_stages(
    world: World, written: Mapping[int, Sequence[Tensor]], follows_first: bool
) -> None:
    """Copy the buffers that each pipeline stage has written to the ranks of all stages.

    written: position -> the buffers, one message for all of them. follows_first: they are those of
        the stage's first rank; otherwise those of its rank with the same samples.
    """
    axis = world.axis("pipeline")
    for position, buffers in sorted(written.items()):
        source = position % axis.size
        label = f"buffers of pipeline stage {position}"

        def send(flat: Tensor, source: int = source, label: str = label) -> Work:
            if follows_first:
                return world.broadcast(flat, source * world.mesh.stride("pipeline"), label)
            return axis.broadcast(flat, source, label)

        for buffer, value in zip(buffers, _sent(buffers, send), strict=True):
            buffer.copy_(value)


def _sent(values: Sequence[Tensor], send: Callable[[Tensor], Work]) -> list[Tensor]:
    """Return the values of these tensors after all of them were sent as one message."""
    # Widest dtypes first, so that each tensor is aligned within the message.
    order = sorted(range(len(values)), key=lambda i: -values[i].element_size())
    flat = torch.cat([_as_bytes(values[i]) for i in order])
    send(flat).wait()
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
