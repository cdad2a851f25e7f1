"""Reduction by rows: only the rows of a table's gradient that a rank has looked up are sent.

Ranks tell each other how many rows they have, then every rank sends its rows to all others. Each
rank sums the rows of its slice in rank order and scales once, as `comm.collectives` does for whole
buffers, so that the result has the values of a dense reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerofx.comm.collectives import Axis, Work
from zerofx.layout.buckets import Bucket, Layout
from zerofx.policy import reduction


@dataclass(slots=True)
class RowsWork(Work):
    """Rows of one table in flight to all ranks.

    out: this rank's slice of the sum, flat.
    first: the slice's offset in the table, in elements.
    numbers [ranks, rows], rows [ranks, rows, width]: the received data; row number -1 is padding.
    """

    works: Sequence[Work]
    out: Tensor
    first: int
    numbers: Tensor
    rows: Tensor
    scale: float

    def wait(self) -> None:
        """Wait for all rows, then sum and scale."""
        works, self.works = self.works, ()
        for work in works:
            work.wait()
        if works:
            sum_rows(self.out, self.first, self.numbers, self.rows, self.scale)


def launch_rows(
    axis: Axis, layout: Layout, bucket: Bucket, out: Tensor, packed: Tensor,
    indices: Sequence[Tensor], scale: float, label: str,
) -> Work | None:  # fmt: skip
    """Launch the reduction of a table by rows; return None if a dense one sends less.

    packed: the gradients of the bucket, whose single parameter is the table.
    indices: the indices of all rows that may be nonzero.
    out: receives the result; it may share memory with `packed`.
    """
    height, width = bucket.params[0].shape
    mine = torch.cat([each.reshape(-1) for each in indices]).unique()
    counts = mine.new_tensor([len(mine)] * axis.size)
    axis.all_gather(counts, counts[axis.rank], f"numbers of rows for the {label}").wait()
    most = max(int(counts.max()), 1)
    if not reduction.rows_are_less(layout, bucket, most):
        return None
    numbers = mine.new_full((axis.size, most), -1)
    rows = packed.new_zeros(axis.size, most, width)
    numbers[axis.rank, : len(mine)] = mine
    rows[axis.rank, : len(mine)] = packed[: height * width].view(height, width)[mine]
    works = [
        axis.all_gather(all_of.view(-1), all_of[axis.rank].view(-1), label)
        for all_of in (numbers, rows)
    ]
    first = axis.rank * out.numel() if layout.shard_size > 1 else 0
    return RowsWork(works, out, first, numbers, rows, scale)


def sum_rows(out: Tensor, first: int, numbers: Tensor, rows: Tensor, scale: float) -> None:
    """Set `out` to scale * the sum of the rows of all ranks, in rank order, and zeros elsewhere.

    A slice may begin or end within a row, so rows are cut into pieces that no boundary divides.
    """
    ranks, _, width = rows.shape
    piece = math.gcd(width, out.numel(), first)
    slice_, per_row = out.view(-1, piece), width // piece
    places = numbers[:, :, None] * per_row - first // piece
    places = (places + torch.arange(per_row, device=out.device)).view(ranks, -1)
    is_here = (places >= 0) & (places < len(slice_)) & (numbers >= 0).repeat_interleave(per_row, 1)
    places = places.where(is_here, 0)
    pieces = rows.view(ranks, -1, piece).masked_fill(~is_here[:, :, None], 0)
    out.zero_()
    for at, added in zip(places, pieces, strict=True):  # each rank has a row at most once
        slice_.index_add_(0, at, added)
    if scale != 1.0:
        out.mul_(scale)
