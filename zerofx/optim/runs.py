"""Runs of a step: which neighbouring parameters are stepped as one flat tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zerofx.errors import OptimizerError
from zerofx.optim.places import name_of
from zerofx.runtime.layout import Bucket
from zerofx.runtime.param_piece import Ledger

Ranges = list[tuple[int, int]]  # half-open, of parameters


@dataclass(frozen=True)
class Run:
    """Parameters `first:last` of a stretch, all of which are stepped alike, as flat tensors.

    Shapes: param and each of states [numel] (or Codes); steps [last - first], equal numbers.
    bounds: the half-open range of each parameter's elements in the run.
    offset: the element of the bucket's shard that it begins with.
    """

    first: int
    last: int
    params: tuple[Tensor, ...]
    bounds: tuple[tuple[int, int], ...]
    param: Tensor
    states: Mapping[str, Any]
    steps: Tensor
    is_first: bool  # the states were made for this very step
    ledger: Ledger | None
    bucket: Bucket | None
    offset: int

    @property
    def numel(self) -> int:
        return self.param.numel()


def joined(
    grads: Sequence[Tensor | None], pointers: Sequence[int], bounds: Sequence[tuple[int, int]]
) -> Ranges:
    """Return ranges of parameters whose gradients lie like them, relative to one another.

    pointers: addresses of the parameters. bounds: the range of each one's elements.
    """
    ranges: Ranges = []
    last_delta: object = None
    for i, (grad, pointer) in enumerate(zip(grads, pointers, strict=True)):
        delta: object = None
        if grad is not None:
            # a transposed gradient, say, is flat memory in another order
            delta = grad.data_ptr() - pointer if grad.is_contiguous() else object()
            if not bounds[-1][1]:
                delta = 0
            if delta == last_delta:
                ranges[-1] = ranges[-1][0], i + 1
            else:
                ranges.append((i, i + 1))
        last_delta = delta
    return [r for whole in ranges for r in _within_storage(whole, grads, bounds)]


def _within_storage(
    whole: tuple[int, int], grads: Sequence[Tensor | None], bounds: Sequence[tuple[int, int]]
) -> Ranges:
    """Return the range, or each parameter alone if its gradients only happen to be neighbours.

    Where the first one's storage reaches over all of them, they lie in that storage.
    """
    first, last = whole
    grad = grads[first]
    assert grad is not None
    if last - first > 1:
        end = grad.storage_offset() + bounds[last - 1][1] - bounds[first][0]
        if end * grad.itemsize > grad.untyped_storage().nbytes():
            return [(i, i + 1) for i in range(first, last)]
    return [whole]


def split_by_steps(ranges: Sequence[tuple[int, int]], steps: Tensor) -> Ranges:
    """Cut ranges where the step counts (Shape: [parameters], or empty) differ."""
    if not steps.numel():
        return list(ranges)
    counts = steps.tolist()
    found: Ranges = []
    for first, last in ranges:
        cuts = [k for k in range(first + 1, last) if counts[k] != counts[k - 1]]
        found += pairwise([first, *cuts, last])
    return found


def strided(grad: Tensor, param: Tensor) -> Tensor:
    """Return a gradient that is dense.

    Raises:
        OptimizerError: it is not; names the parameter.
    """
    if grad.layout is not torch.strided:
        raise OptimizerError(
            f"{name_of(param)}: its gradient is {grad.layout}, but zerofx.optim takes dense ones; "
            "make it with sparse=False, or give the parameter to torch.optim.SparseAdam"
        )
    return grad
