"""Tensors that keep their place: filled before each replay, read and copied out after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.compat.tensors import storage_identity


def blank_like(value: Any) -> Any:
    """Return a tensor of the same shape, strides and dtype in memory of its own; others as is."""
    if not isinstance(value, Tensor):
        return value
    with torch.inference_mode(False):  # it outlives the mode that first asked for it
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


def fill(places: Iterable[Any], values: Iterable[Any]) -> None:
    """Copy tensors into those that `blank_like` made of such."""
    for place, value in zip(places, values, strict=True):
        if isinstance(place, Tensor):
            _each_cell_once(place).copy_(_each_cell_once(value.detach()))


def _each_cell_once(tensor: Tensor) -> Tensor:
    """Return a view in which no two elements share memory, as those of an expanded tensor do."""
    if tensor.numel() == 0:
        return tensor
    reach = 0
    is_repeated = False
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            is_repeated |= stride <= reach
            reach += stride * (size - 1)
    return tensor.as_strided((reach + 1,), (1,)) if is_repeated else tensor


class Results:
    """What a recording returns, given out in memory that no later replay writes to.

    A result in an input's memory becomes the same view of the caller's own input, one in `lasting`
    memory (parameters, buffers) stays there. All others are copied; those that share memory still
    do in the copy.
    """

    def __init__(self, results: Sequence[Any], inputs: Sequence[Any], lasting: Sequence[Tensor]):
        self._results, self._inputs = list(results), list(inputs)
        homes = {storage_identity(t): i for i, t in enumerate(inputs) if isinstance(t, Tensor)}
        kept = {storage_identity(t) for t in lasting}
        self._of_inputs: list[tuple[int, int]] = []  # position of a result, of the input it views
        self._lasting: list[int] = []
        groups: dict[tuple[int, torch.dtype], list[int]] = {}
        for position, result in enumerate(results):
            if not isinstance(result, Tensor):
                continue
            storage = storage_identity(result)
            home = homes.get(storage)
            if home is not None and inputs[home].dtype is result.dtype:
                self._of_inputs.append((position, home))
            elif storage in kept:
                self._lasting.append(position)
            else:
                groups.setdefault((storage, result.dtype), []).append(position)
        self._groups = list(groups.values())

    def give_out(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the results for a caller who gave these inputs."""
        given = list(self._results)
        for position, home in self._of_inputs:
            given[position] = self._view_of(inputs[home], self._inputs[home], given[position])
        for position in self._lasting:
            given[position] = given[position].detach()
        for positions in self._groups:
            together = [given[p] for p in positions]
            for position, copy in zip(positions, _copies(together), strict=True):
                given[position] = copy
        return given

    @staticmethod
    def _view_of(theirs: Tensor, mine: Tensor, result: Tensor) -> Tensor:
        if result is mine:
            return theirs
        offset = theirs.storage_offset() + result.storage_offset() - mine.storage_offset()
        return theirs.as_strided(result.shape, result.stride(), offset)


def _copies(together: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors that lie in one storage, keeping where they lie relative to each other."""
    start = min(t.storage_offset() for t in together)
    stop = max(t.storage_offset() + _extent(t) for t in together)
    flat = together[0].as_strided((stop - start,), (1,), start).clone()
    return [flat.as_strided(t.shape, t.stride(), t.storage_offset() - start) for t in together]


def _extent(tensor: Tensor) -> int:
    """Return how many elements of its storage a tensor reaches over."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
