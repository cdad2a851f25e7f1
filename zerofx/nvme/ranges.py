"""Which requests under way touch a stretch of a file."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofx.nvme.request import Request

Entry = tuple[int, int, int, "Request"]  # begin, end, a number that no other has, who


class RangeIndex:
    """Requests by the half-open byte ranges that they move.

    Kept sorted in one list for each power of two of their lengths: those that overlap [begin, end)
    then begin less than twice that power before `begin`, and no list is searched as a whole.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[Entry]] = {}
        self._entries: dict[Request, Entry] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, begin: int, end: int, request: Request) -> None:
        """Enter a request."""
        self._added += 1
        entry = (begin, end, self._added, request)
        self._entries[request] = entry
        insort(self._lists.setdefault((end - begin).bit_length(), []), entry)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        entry = self._entries.pop(request)
        size = (entry[1] - entry[0]).bit_length()
        entries = self._lists[size]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._lists[size]

    def overlapping(self, begin: int, end: int) -> list[Request]:
        """Return the requests that touch [begin, end), oldest first."""
        found: list[Entry] = []
        for size, entries in self._lists.items():
            first = bisect_left(entries, (begin - (1 << size),))
            near = entries[first : bisect_left(entries, (end,))]
            found += [entry for entry in near if entry[1] > begin]
        return [entry[3] for entry in sorted(found, key=lambda entry: entry[2])]

    def all(self) -> list[Request]:
        """Return all requests, oldest first."""
        return list(self._entries)
