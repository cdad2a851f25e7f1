"""Ring attention: which keys each rank attends to in which step, and what it sends.

Each rank keeps its queries. Keys and values travel to the next rank after every step, so that in
step s rank r has those of rank r - s. In zigzag order rank r has chunks r and 2N-1-r of 2N. Under
a causal mask its queries then see, of the keys of rank s:

    s = r   its own: causal, since its positions are in order
    s < r   all queries see the first chunk of keys, and none the second
    s > r   only the second chunk of queries sees keys, and sees all of them

So that in each step every rank computes half of a block: the work is the same on all ranks.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Zhu 2024,
"ring-flash-attention", for the zigzag order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from zerofx.layout.placements import chunks_of


@dataclass(frozen=True)
class Block:
    """One step of a rank: queries [rows) attend to keys [columns) of the rank `source`.

    is_causal: the n-th of these queries attends to the first n of these keys only.
    """

    source: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    is_causal: bool

    @property
    def num_scores(self) -> int:
        """The number of pairs of a query and a key, of one head of one sample."""
        rows, columns = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        return rows * (rows + 1) // 2 if self.is_causal else rows * columns


@lru_cache(maxsize=4096)
def blocks(rank: int, ranks: int, queries: int, keys: int, causal: bool) -> tuple[Block, ...]:
    """Return a rank's steps. queries, keys: how many of each a rank has."""
    all_rows, all_columns = (0, queries), (0, keys)
    found = [Block(rank, all_rows, all_columns, causal)]
    for step in range(1, ranks):
        source = (rank - step) % ranks
        rows, columns = all_rows, all_columns
        if causal and source < rank:
            columns = (0, keys // 2)
        elif causal:
            rows = (queries // 2, queries)
        found.append(Block(source, rows, columns, False))
    return tuple(found)


@lru_cache(maxsize=64)
def fault_of(ranks: int, causal: bool) -> str:
    """Return what is wrong with the steps of all ranks together, "" if nothing is.

    Each chunk of queries attends once to each chunk of keys that its mask lets it see.
    """
    seen: Counter[tuple[int, int, bool]] = Counter()
    for rank in range(ranks):
        for block in blocks(rank, ranks, 2, 2, causal):
            own = chunks_of(rank, ranks, zigzag=True)
            theirs = chunks_of(block.source, ranks, zigzag=True)
            seen.update(
                (own[row], theirs[column], block.is_causal and row == column)
                for row in range(*block.rows)
                for column in range(*block.columns)
                if not block.is_causal or column <= row
            )
    due = [
        (row, column, causal and row == column)
        for row in range(2 * ranks)
        for column in range(row + 1 if causal else 2 * ranks)
    ]
    wrong = sorted(pair for pair in {*seen, *due} if seen[pair] != due.count(pair))
    if not wrong:
        return ""
    row, column, is_diagonal = wrong[0]
    times = seen[wrong[0]]
    return f"queries {row} attend to keys {column} {times} times{' in part' * is_diagonal}"


def message_numel(keys: Sequence[int], values: Sequence[int]) -> int:
    """Return the elements of one message. keys, values: the shapes of a rank's parts."""
    return math.prod(keys) + math.prod(values)


def sent_bytes(numel: int, itemsize: int, ranks: int, is_backward: bool) -> int:
    """Return the bytes that a rank sends around the ring in all messages of `numel` elements.

    Forward: keys and values to N - 1 ranks. Backward: again, and the sums of their gradients, which
    begin at the first rank that is not their own and end at their own. These are sums in fp32 at
    least.
    """
    forward = (ranks - 1) * numel * itemsize
    return forward + (ranks - 1) * numel * max(itemsize, 4) if is_backward else forward
