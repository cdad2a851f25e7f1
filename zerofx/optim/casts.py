"""What a step writes in the compute dtype beside the parameters, so that no refresh casts them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from zerofx.optim.runs import Run
from zerofx.runtime.param_piece import CastCopy, Ledger

_Key = tuple[int, int | None]  # a ledger's id, a bucket; None: of no compiled model


class StepCasts:
    """The slices of resident copies that are current when a step begins, and what it writes there.

    A slice stays current if the step writes there whatever it changes of the bucket: the elements
    of the step's runs are counted against those that were asked for. All else makes it stale, which
    costs a cast at the next refresh and nothing more.
    """

    def __init__(self, ledgers: Iterable[Ledger], runs: Iterable[Run]) -> None:
        self._copies: dict[_Key, CastCopy] = {
            (id(ledger), bucket): copy
            for ledger in ledgers
            for bucket, copy in ledger.copies.items()
            if copy.is_current
        }
        self._left = dict.fromkeys(self._copies, 0)  # elements that are changed but not yet written
        for run in runs:
            self._count(run, 1)

    def place_for(self, run: Run) -> Tensor | None:
        """Return where a run's new parameters must also go, rounded; None if nothing needs them."""
        copy = self._copies.get(_key(run))
        if copy is None:
            return None
        self._count(run, -1)
        return copy.part(run.offset, run.offset + run.numel)

    def end(self) -> None:
        """Mark the slices of which everything was written; the step's writes are counted."""
        for key, copy in self._copies.items():
            if self._left[key] == 0:
                copy.mark()

    def _count(self, run: Run, sign: int) -> None:
        key = _key(run)
        if key in self._left:
            self._left[key] += sign * sum(stop - start for start, stop in run.bounds)


def _key(run: Run) -> _Key:
    return id(run.ledger), None if run.bucket is None else run.bucket.index
