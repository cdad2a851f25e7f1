"""Where a parameter's elements lie on this rank: in which flat buffer, and next to whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofx.compat.tensors import local_tensor
from zerofx.errors import OptimizerError
from zerofx.runtime.layout import Bucket
from zerofx.runtime.param_piece import Ledger, is_cut, piece_of


@dataclass(frozen=True)
class Place:
    """Where a parameter's elements lie: `length` of them from element `offset` of a flat buffer.

    `bucket` and `ledger` are None for a parameter of no compiled model, which has memory of its
    own. `index` counts the bucket's parameters.
    """

    ledger: Ledger | None
    bucket: Bucket | None
    index: int
    offset: int
    length: int

    @property
    def buffer(self) -> Any:
        """What parameters of one flat buffer have in common."""
        return None if self.bucket is None else (id(self.ledger), self.bucket.index)

    @property
    def end(self) -> int:
        return self.offset + self.length

    def is_before(self, other: Place) -> bool:
        """Whether nothing but padding lies between this and the `other` parameter's elements."""
        if self.ledger is None or other.bucket is None or self.buffer != other.buffer:
            return False
        if other.index <= self.index:
            return False
        layout, rank = self.ledger.layout, self.ledger.world.shard_rank
        between = other.bucket.params[self.index + 1 : other.index]
        return not any(layout.piece(other.bucket, p, rank)[2] for p in between)


def place_of(param: Tensor) -> Place:
    """Return where the elements of `param` lie that this rank owns.

    Raises:
        OptimizerError: a parameter of no compiled model is not contiguous.
    """
    piece = piece_of(param)
    if piece is not None:
        return Place(piece.ledger, piece.bucket, piece.index, piece.shard_offset, piece.length)
    if not param.is_contiguous():
        raise OptimizerError(
            f"a parameter of shape {list(param.shape)} has strides {list(param.stride())}, but "
            "zerofx.optim steps over flat memory; make it contiguous (p.data = p.contiguous()), "
            "or use torch.optim for it"
        )
    return Place(None, None, 0, 0, param.numel())


def name_of(param: Tensor) -> str:
    """Return a parameter's name where it has one, else its shape: for errors."""
    piece = piece_of(param)
    return piece.name if piece is not None else f"a parameter of shape {list(param.shape)}"


def local_of(tensor: Tensor) -> Tensor:
    """Return the plain tensor of what this rank holds, for a parameter, gradient or state."""
    if is_cut(tensor):
        return local_tensor(tensor)
    return tensor.detach()


def shown(flat: Tensor, param: Tensor) -> Tensor:
    """Return what users see of a flat range that belongs to `param`: cut or shaped like it."""
    piece = piece_of(param)
    return flat.view(param.shape) if piece is None else piece.show(flat)


def flat_from(first: Tensor, numel: int) -> Tensor:
    """Return `numel` elements from where `first` begins, over the same storage."""
    return first.as_strided((numel,), (1,), first.storage_offset())


def neighbours(members: Iterable[tuple[int, Place]]) -> list[list[int]]:
    """Group numbered places so that in each group only padding lies between one and the next.

    Places of one buffer without elements form a group of their own.
    """
    groups: list[list[int]] = []
    empty: dict[Any, list[int]] = {}
    last: Place | None = None
    ordered = sorted(members, key=lambda m: (str(m[1].buffer), m[1].index))
    for number, place in ordered:
        if place.length == 0:
            alone = place.buffer is None
            empty.setdefault(number if alone else place.buffer, []).append(number)
            continue
        if last is not None and last.is_before(place):
            groups[-1].append(number)
        else:
            groups.append([number])
        last = place
    return [*groups, *empty.values()]


def check_dtype(param: Tensor, optimizer: str, takes_half: bool) -> None:
    """Raise for a parameter whose format cannot carry this optimizer's updates.

    Raises:
        OptimizerError: the parameter is float16, complex or no float; names it.
    """
    if param.dtype == torch.float16 and not takes_half:
        raise OptimizerError(
            f"{name_of(param)} is float16 without a float32 master copy, in which most updates of "
            f"{optimizer} vanish; keep the model in float32 and compute in 16 bits with "
            'Plan(precision="fp16"), or use SGD'
        )
    if not param.is_floating_point():
        raise OptimizerError(
            f"{name_of(param)} is {param.dtype}, but {optimizer} of zerofx.optim takes real floats "
            "only; give it to the torch.optim optimizer of that name"
        )
