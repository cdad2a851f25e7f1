"""Unused places of host memory: the one that fits best, or none."""

from __future__ import annotations

from typing import Generic, TypeVar

P = TypeVar("P")


class FreePlaces(Generic[P]):
    """Places by their bytes, each lent again as it is. What is planned and what runs share this."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[P]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all places here."""
        return sum(size * len(places) for size, places in self._by_size.items())

    def take(self, nbytes: int) -> P | None:
        """Return the smallest place that holds `nbytes`, None where a new one has to be made.

        That takes the room of the largest which is too small: it is dropped.
        """
        if same := self._by_size.get(nbytes):
            return same.pop()
        sizes = [size for size, places in self._by_size.items() if places]
        if fitting := [size for size in sizes if size > nbytes]:
            return self._by_size[min(fitting)].pop()
        if sizes:
            self._by_size[max(sizes)].pop()
        return None

    def give_back(self, nbytes: int, place: P) -> None:
        """Keep a place of `nbytes` for the next who asks."""
        self._by_size.setdefault(nbytes, []).append(place)
