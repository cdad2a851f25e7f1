"""The choice of an option for every segment: least recomputation that frees enough bytes in time.

Activations accumulate from segment to segment and are freed in reverse order. The bytes given up by
the first j segments therefore count at every moment between the forward of the j-th one and the
backward of the next one. The choice has the least total time whose running sums of given-up bytes
reach the need of each such moment. It is a shortest path over segments and bytes, linear in the
number of segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

QUANTA = 32768  # units in which bytes are counted, rounded down so that every need is met


def solve(
    given_up: Sequence[Sequence[int]], time_us: Sequence[Sequence[float]], need: Sequence[int]
) -> list[int] | None:
    """Return an option's index for each segment, or None if giving up everything is not enough.

    given_up[i][o], time_us[i][o]: bytes and microseconds of option o of segment i.
    need[j]: bytes that the first j segments must have given up, for j from 0 to all of them.
    """
    most = max(max(need), 0)
    if need[0] > 0 or any(
        sum(max(g) for g in given_up[:j]) < wanted for j, wanted in enumerate(need)
    ):
        return None
    quantum = max(most // QUANTA, 1)
    top = -(-most // quantum)  # larger sums are clipped to this
    best = np.full(top + 1, np.inf)
    best[0] = 0.0
    choices: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    for i, (freed, times) in enumerate(zip(given_up, time_us, strict=True)):
        after, choice, source = _step(best, [f // quantum for f in freed], times)
        after[: min(-(-max(need[i + 1], 0) // quantum), top)] = np.inf
        best = after
        choices.append(choice)
        sources.append(source)
    at = int(np.argmin(best))
    if not np.isfinite(best[at]):  # enough in bytes, but not in whole quanta
        return [max(range(len(g)), key=g.__getitem__) for g in given_up]
    picked = []
    for choice, source in zip(reversed(choices), reversed(sources), strict=True):
        picked.append(int(choice[at]))
        at = int(source[at])
    return picked[::-1]


def _step(
    best: np.ndarray, freed: Sequence[int], times: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the best time for each sum of bytes after a segment, its option and predecessor."""
    size = len(best)
    after = np.full(size, np.inf)
    choice = np.zeros(size, dtype=np.int16)
    source = np.zeros(size, dtype=np.int32)
    for option, (quanta, time) in enumerate(zip(freed, times, strict=True)):
        shift = min(quanta, size - 1)
        landed, origin = np.full(size, np.inf), np.zeros(size, dtype=np.int32)
        landed[shift:] = best[: size - shift] + time
        origin[shift:] = np.arange(size - shift)
        over = size - 1 - shift + int(np.argmin(best[size - 1 - shift :]))  # ends at the top too
        landed[-1], origin[-1] = best[over] + time, over
        better = landed < after
        after[better], choice[better] = landed[better], option
        source[better] = origin[better]
    return after, choice, source
