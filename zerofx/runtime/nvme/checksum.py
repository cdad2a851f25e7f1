"""The checksum of a block: quick enough to take of all that moves.

    sum over words i of (2 i + 1) * word[i]  mod 2^64,  words of 64 bits, the last filled with zeros

Any change within one word is found, because an odd factor can be undone; words, sectors or pages
that changed places are found too, because each has its own factor.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from zerofx.runtime.nvme.aligned import Bytes


@cache
def _factors(num_words: int) -> np.ndarray:
    return np.arange(num_words, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def checksum(block: Bytes, block_bytes: int) -> int:
    """Return the checksum of a block of at most `block_bytes`; never 0."""
    factors = _factors(block_bytes // 8)
    whole = block.size // 8 * 8
    words = block[:whole].view(np.uint64)
    total = int(np.dot(words, factors[: words.size]))
    if whole < block.size:
        last = int.from_bytes(block[whole:].tobytes(), "little")
        total += last * (2 * words.size + 1)
    return total % 2**64 or 1
