"""`to`, `half`, `cuda` and the like: what of them a compiled model can follow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zerofx.compat.modules import own_buffers
from zerofx.errors import ShardError
from zerofx.runtime.engine import Engine


def check_shards_stay(engine: Engine, fn: Callable[[Tensor], Tensor]) -> None:
    """Refuse a conversion that would give the shards another dtype or device.

    Raises:
        ShardError: `fn` moves or casts a tensor like the shards; the message names both.
    """
    for bucket in engine.layout.buckets:
        before = torch.empty(0, dtype=bucket.dtype, device=engine.world.device)
        after = fn(before)
        if (after.dtype, after.device) != (before.dtype, before.device):
            raise ShardError(
                f"a compiled model holds {before.dtype} shards on {before.device}; moving it "
                f"to {after.dtype} on {after.device} would need another layout: convert the "
                "model before zerofx.compile, or pass device="
            )


def convert_buffers(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Give buffers another dtype; a buffer held in several places stays one.

    Raises:
        ShardError: a buffer would move to another device; nothing was converted.
    """
    made: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for key, buffer in own_buffers(module).items():
            if buffer is None:
                continue
            after = fn(torch.empty(0, dtype=buffer.dtype, device=buffer.device))
            if after.device != buffer.device:
                raise ShardError(
                    f"{path or 'the model'}: buffer {key} lies on {buffer.device} and cannot "
                    f"move to {after.device}; pass device= to zerofx.compile"
                )
            if after.dtype != buffer.dtype:
                made.setdefault(id(buffer), fn(buffer))
    for module in model.modules():
        for key, buffer in own_buffers(module).items():
            own_buffers(module)[key] = made.get(id(buffer), buffer)
