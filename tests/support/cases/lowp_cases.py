"""Training loops that count how often resident copies are cast, and check each copy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from optim_cases import mixed_batch, mixed_groups, mixed_model, ours
from torch import Tensor

import zerofx
from zerofx.runtime.engine import Engine

FINE = {"kernels": "aten", "bucket_bytes": 2000, "stage": 2, "precision": "bf16"}


@contextlib.contextmanager
def as_compiled() -> Iterator[None]:
    """Let the interpreter round to bfloat16 as a GPU does: it cuts the low bits off."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return plain(data, source, target, mode)
        rounded = torch.tensor(data).bfloat16()
        return rounded.view(torch.uint16).numpy()

    with mock.patch.object(interpreter, "_convert_float", convert):
        yield


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Collect the sizes of the shards that are cast into resident copies."""
    found: list[int] = []
    cast = Engine.cast

    def note(engine: Engine, shard: Tensor, full: Tensor) -> Tensor:
        if any(full is copy for copy in engine._resident.values()):
            found.append(shard.numel())
        return cast(engine, shard, full)

    with mock.patch.object(Engine, "cast", note), as_compiled():
        yield found


def check_copies(engine: Engine) -> None:
    """After a forward, this rank's slice of each resident copy is its shard, rounded."""
    assert engine._resident
    rank = engine.world.shard_rank
    for bucket, full in engine._resident.items():
        shard = engine.store.shards[bucket]
        mine = full.view(engine.layout.shard_size, -1)[rank]
        assert torch.equal(mine, shard.to(full.dtype)), bucket


class Loop:
    """A model and its optimizer in the ordinary loop, every forward's copies checked."""

    def __init__(self, name: str = "adamw", plan: dict[str, Any] | None = None, **more: Any):
        self.model = zerofx.compile(mixed_model(), {**FINE, **(plan or {})})
        self.optimizer = ours(name, mixed_groups(self.model), **more)
        self.engine = self.model._engine
        self.number = 0

    def forward(self) -> Tensor:
        loss = self.model(*mixed_batch(self.number, int(os.environ.get("RANK", "0"))))
        check_copies(self.engine)
        return loss

    def step(self) -> float:
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        return float(loss.detach())

    def casts_now(self, found: list[int]) -> int:
        """Return how many buckets the next forward casts, which is checked."""
        before = len(found)
        self.forward()
        return len(found) - before


def settled(found: list[int], **given: Any) -> Loop:
    """Return a loop after two steps, of which the second's forward has cast nothing."""
    loop = Loop(**given)
    loop.step()
    before = len(found)
    assert before == len(loop.engine._resident)
    loop.step()
    assert len(found) == before
    return loop
