"""Views of flat buffers: created once for each place in memory and reused in every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zerofx.layout.buckets import Layout


class BucketViews:
    """The parameters in a bucket's flat buffer, and the padding between them.

    is_lasting: returns whether a buffer is the same tensor in every step, so that its views can be
        kept.
    """

    def __init__(self, layout: Layout, is_lasting: Callable[[Tensor, int], bool]) -> None:
        self._layout = layout
        self._is_lasting = is_lasting
        self._views: dict[tuple, tuple[Tensor, ...]] = {}
        # bucket and positions -> shape, strides and offset of each view
        self._taken: dict[tuple[int, tuple[int, ...]], list[tuple]] = {}
        self._ranges: dict[int, list[tuple[int, int]]] = {}  # bucket -> the ranges of its padding

    def params(self, full: Tensor, bucket: int, positions: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return views for the parameters at these positions in the bucket."""
        key = (id(full), bucket, positions)
        views = self._views.get(key)
        if views is None:
            # one call per view: slicing and viewing would cost more than twice as much
            base = full.storage_offset()
            places = self._places(bucket, positions)
            views = tuple(full.as_strided(size, stride, base + at) for size, stride, at in places)
            self._keep(key, views, full, bucket)
        return views

    def _places(self, bucket: int, positions: tuple[int, ...]) -> list[tuple]:
        places = self._taken.get((bucket, positions))
        if places is None:
            members = [self._layout.buckets[bucket].params[i] for i in positions]
            places = [(p.shape, _strides(p.shape), p.offset) for p in members]
            self._taken[bucket, positions] = places
        return places

    def gaps(self, full: Tensor, bucket: int) -> tuple[Tensor, ...]:
        """Return views of all padding."""
        key = (id(full), bucket, "gaps")
        views = self._views.get(key)
        if views is None:
            views = tuple(full[lo:hi] for lo, hi in self._gap_ranges(bucket))
            self._keep(key, views, full, bucket)
        return views

    def _gap_ranges(self, bucket: int) -> list[tuple[int, int]]:
        ranges = self._ranges.get(bucket)
        if ranges is None:
            b = self._layout.buckets[bucket]
            ends = [0, *(p.end for p in b.params)]
            starts = [*(p.offset for p in b.params), b.numel]
            pairs = zip(ends, starts, strict=True)
            ranges = self._ranges[bucket] = [(lo, hi) for lo, hi in pairs if hi > lo]
        return ranges

    def _keep(self, key: tuple, views: tuple[Tensor, ...], full: Tensor, bucket: int) -> None:
        if self._is_lasting(full, bucket):
            self._views[key] = views

    def clear(self) -> None:
        """Forget all views, because a buffer has moved."""
        self._views.clear()


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return torch.empty(shape, device="meta").stride()
