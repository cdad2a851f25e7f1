"""Slots of experts: which row goes to which slot, rows to slots, and rows from slots.

An expert has `capacity` slots for the rows of each of `ranks` parts, so that shapes do not depend
on the router. Of more rows the first ones get a slot, in the order of the sequence, and the others
none (Switch, GShard). Slots without a row are zero, and so is what a row without a slot gets.

A part is what `Cut(0, groups)` gives to one rank. Called with `ranks` = 1, each function does for
one rank's rows what it does for all parts otherwise; numbers of rows and slots are those within a
part, so that a part's numbers are the same either way.

Source: Lepikhin et al. 2020, "GShard", algorithm 1; Fedus et al. 2021, "Switch Transformers".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Dropped(NamedTuple):
    """How many rows of a layer got no slot, of how many that the router sent to experts."""

    dropped: int
    of: int


class Drops:
    """The rows that got no slot in the last call of each layer, counted on the device."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Tensor, int]] = {}

    def note(self, layer: str, dropped: Tensor, of: int) -> None:
        self._last[layer] = dropped, of

    def read(self) -> dict[str, Dropped]:
        """Return the counts of each layer; waits for the device."""
        return {name: Dropped(int(n), of) for name, (n, of) in self._last.items()}


def _by_part(rows: Tensor, groups: int, ranks: int) -> Tensor:
    """Return rows [n, ...] as [ranks, n / ranks, ...]."""
    if ranks == 1:
        return rows.unsqueeze(0)
    each = rows.unflatten(0, (groups, ranks, -1)).movedim(1, 0)
    return each.flatten(1, 2)


def _in_order(parts: Tensor, groups: int) -> Tensor:
    """Return [ranks, n / ranks, ...] as the rows [n, ...] that `_by_part` has taken."""
    if parts.shape[0] == 1:
        return parts.squeeze(0)
    return parts.unflatten(1, (groups, -1)).movedim(0, 1).flatten(0, 2)


@torch.no_grad()
def expert_slots(
    engine: Any, ids: Tensor, layer: str, experts: int, capacity: int, groups: int, ranks: int
) -> tuple[Tensor, Tensor]:
    """Give rows their slots: `rows` has the row in each slot, and `slots` the slot of each row.

    Shapes: ids [n], the expert of each row; rows [experts, ranks * capacity], with n / ranks for a
    slot without a row; slots [n], with experts * capacity for a row without a slot.
    """
    parts = _by_part(ids, groups, ranks)
    number = parts.shape[1]
    order = parts.argsort(dim=1, stable=True)
    chosen = parts.gather(1, order)
    every = torch.arange(experts, device=ids.device, dtype=ids.dtype).expand(len(parts), -1)
    starts = torch.searchsorted(chosen, every.contiguous())
    place = torch.arange(number, device=ids.device) - starts.gather(1, chosen)
    full = experts * capacity
    taken = torch.where(place < capacity, chosen * capacity + place, full)
    rows = ids.new_full((len(parts), full + 1), number).scatter_(1, taken, order)[:, :full]
    slots = torch.empty_like(taken).scatter_(1, order, taken)
    if engine is not None:
        engine.drops.note(layer, (slots == full).sum(), slots.numel())
    by_expert = rows.unflatten(1, (experts, capacity)).movedim(0, 1).flatten(1, 2)
    return by_expert.contiguous(), _in_order(slots, groups)


@torch.no_grad()
def rows_to_slots(
    engine: Any, x: Tensor, rows: Tensor, groups: int, ranks: int, per: int
) -> Tensor:
    """Return the row in each slot, and zeros in slots without one.

    per: the number of experts to which a row of `x` goes: row i of those in `rows` is x[i // per].

    Shapes: x [n / per, width], rows [experts, ranks * capacity]; result [*rows.shape, width].
    """
    parts = _by_part(x, groups, ranks)
    taken = rows.unflatten(1, (ranks, -1)).movedim(1, 0).flatten(1)
    last = parts.shape[1] - 1
    picked = taken // per
    made = x.new_empty(rows.shape[0], rows.shape[1], x.shape[1])
    out = made.unflatten(1, (ranks, -1)).movedim(1, 0)
    if ranks == 1:
        torch.index_select(x, 0, picked[0].clamp_(max=last), out=made.view(-1, x.shape[1]))
    else:
        for number, part in enumerate(parts):
            index = picked[number].clamp(max=last)
            out[number].copy_(part[index].view(out[number].shape))
    return made.masked_fill_((rows == (last + 1) * per).unsqueeze(-1), 0)


@torch.no_grad()
def rows_from_slots(engine: Any, x: Tensor, slots: Tensor, groups: int, ranks: int) -> Tensor:
    """Return what each row's slot has, and zeros for rows without one.

    Shapes: x [experts, ranks * capacity, width], slots [n]; result [n, width].
    """
    width, full = x.shape[2], x.shape[0] * x.shape[1] // ranks
    taken = _by_part(slots, groups, ranks)
    if ranks == 1:
        made = x.new_empty(slots.shape[0], width)
        torch.index_select(x.view(-1, width), 0, slots.clamp(max=full - 1), out=made)
    else:
        parts = x.unflatten(1, (ranks, -1)).movedim(1, 0).flatten(1, 2)
        index = taken.clamp(max=full - 1).unsqueeze(-1).expand(-1, -1, width)
        made = _in_order(parts.gather(1, index), groups)
    return made.masked_fill_((slots == full).unsqueeze(-1), 0)
