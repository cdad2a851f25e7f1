"""Views that take a flat buffer apart: made once for each place in memory, reused every step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zerofx.runtime.layout import Layout


class BucketViews:
    """The parameters in a bucket's flat buffer, and the padding between them.

    is_lasting: tells whether a buffer is the same tensor every step, so that its views can be kept.
    A bucket's own gradient buffer (`own`) is one that may be exchanged: its views go with it.
    """

    def __init__(self, layout: Layout, is_lasting: Callable[[Tensor, int], bool]) -> None:
        self._layout = layout
        self._is_lasting = is_lasting
        self._views: dict[tuple, tuple[Tensor, tuple[Tensor, ...]]] = {}

    def params(
        self, full: Tensor, bucket: int, positions: tuple[int, ...], own: bool = False
    ) -> tuple[Tensor, ...]:
        """Return views for the parameters at these positions in the bucket."""
        key = (-1 if own else id(full), bucket, positions)
        views = self._known(key, full)
        if views is None:
            members = [self._layout.buckets[bucket].params[i] for i in positions]
            views = tuple(full[p.offset : p.end].view(p.shape) for p in members)
            self._keep(key, views, full, bucket, own)
        return views

    def gaps(self, full: Tensor, bucket: int, own: bool = False) -> tuple[Tensor, ...]:
        """Return views of all padding."""
        key = (-1 if own else id(full), bucket, "gaps")
        views = self._known(key, full)
        if views is None:
            b = self._layout.buckets[bucket]
            ends = [0, *(p.end for p in b.params)]
            starts = [*(p.offset for p in b.params), b.numel]
            pairs = zip(ends, starts, strict=True)
            views = tuple(full[lo:hi] for lo, hi in pairs if hi > lo)
            self._keep(key, views, full, bucket, own)
        return views

    def _known(self, key: tuple, full: Tensor) -> tuple[Tensor, ...] | None:
        kept = self._views.get(key)
        return kept[1] if kept is not None and kept[0] is full else None

    def _keep(
        self, key: tuple, views: tuple[Tensor, ...], full: Tensor, bucket: int, own: bool
    ) -> None:
        if own or self._is_lasting(full, bucket):
            self._views[key] = full, views

    def clear(self) -> None:
        """Forget all views: a buffer has moved."""
        self._views.clear()
