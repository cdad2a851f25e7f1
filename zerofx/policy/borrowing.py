"""Borrowed buffers: which buffer a borrower gets, when one is created, and when one is dropped.

The runtime borrows memory by these classes. The planner borrows stand-ins that have only a size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

B = TypeVar("B")


class FreeBuffers(Generic[B]):
    """Buffers that are not borrowed, by size.

    A borrower gets the smallest buffer that is large enough. If there is none, a new one must be
    created, and the largest buffer (too small) is dropped to make room for it. In the end, buffers
    of one size serve all borrowers.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, list[B]] = {}

    def __iter__(self) -> Iterator[B]:
        for buffers in self._by_size.values():
            yield from buffers

    @property
    def size(self) -> int:
        """The sum of the sizes of all free buffers."""
        return sum(size * len(buffers) for size, buffers in self._by_size.items())

    def take(self, size: int) -> tuple[B | None, B | None]:
        """Return (buffer to borrow, None), or (None, buffer dropped to make room or None)."""
        if same := self._by_size.get(size):
            return same.pop(), None
        sizes = [s for s, buffers in self._by_size.items() if buffers]
        if fitting := [s for s in sizes if s > size]:
            return self._by_size[min(fitting)].pop(), None
        return None, self._by_size[max(sizes)].pop() if sizes else None

    def give_back(self, size: int, buffer: B) -> None:
        """Keep a buffer of this size for the next borrower."""
        self._by_size.setdefault(size, []).append(buffer)

    def drop(self, is_dropped: Callable[[int], bool]) -> list[B]:
        """Remove and return the buffers of every size for which `is_dropped` holds."""
        sizes = [size for size in self._by_size if is_dropped(size)]
        return [buffer for size in sizes for buffer in self._by_size.pop(size)]


@dataclass(eq=False)
class Loan(Generic[B]):
    """A borrowed buffer of `numel` elements, at least as many as the borrower asked for."""

    numel: int
    dtype: torch.dtype
    buffer: B


class Scratch(Generic[B]):
    """Buffers that collectives borrow in turn. A buffer keeps its dtype.

    make: creates a buffer of the given number of elements. dropped: is called with each freed one.
    """

    def __init__(
        self,
        make: Callable[[int, torch.dtype], B],
        dropped: Callable[[B], None] | None = None,
    ) -> None:
        self._make, self._dropped = make, dropped
        self._free: dict[torch.dtype, FreeBuffers[Loan[B]]] = {}

    def borrow(self, numel: int, dtype: torch.dtype) -> Loan[B]:
        """Return a flat buffer of at least `numel` elements."""
        free = self._free.get(dtype)
        if free is None:
            free = self._free[dtype] = FreeBuffers()
        found, replaced = free.take(numel)
        if replaced is not None:
            self._drop([replaced])
        return Loan(numel, dtype, self._make(numel, dtype)) if found is None else found

    def give_back(self, loans: Iterable[Loan[B]]) -> None:
        """Take loans back. Nothing in flight may still use their buffers."""
        for loan in loans:
            self._free[loan.dtype].give_back(loan.numel, loan)

    def rest(self, frees: Callable[[int], bool]) -> None:
        """Free each buffer that is not borrowed and for whose size in bytes `frees` holds."""
        for dtype, free in self._free.items():
            width = dtype.itemsize
            self._drop(free.drop(lambda numel, width=width: frees(numel * width)))  # type: ignore[misc]

    def _drop(self, loans: Iterable[Loan[B]]) -> None:
        if self._dropped is not None:
            for loan in loans:
                self._dropped(loan.buffer)
