"""Steps that all ranks take or none: states made together, updates that fail told to every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerofx.errors import NvmeError, OptimizerError
from zerofx.optim.casts import StepCasts
from zerofx.optim.in_backward import Owner, is_stepped, owner_of
from zerofx.optim.laid import Group, Work
from zerofx.optim.staged import tell_ranks
from zerofx.runtime.param_piece import Ledger


class WholeSteps:
    """The part of an optimizer that keeps a step whole, as far as disks and other ranks let it."""

    _casts: StepCasts | None = None  # within a step
    _unmade: Sequence[Ledger] = ()  # whose states could not be made on some rank
    _half_made: str | None = None  # what ended a step in the middle, since the last load
    _make_fresh: Callable[[Sequence[Group], Callable[[Owner], bool]], None]
    _update_all: Callable[..., None]

    def _make_fresh_together(self, laid: Sequence[Group]) -> None:
        """Make the states that a step needs, on all ranks or none: there may be no room for them.

        Raises:
            NvmeError: there is none on some rank; no step was counted anywhere.
        """
        owners = (owner_of(p)[0] for each in laid for p in each.waiting if p.grad is not None)
        found = {id(ledger): ledger for ledger in owners if ledger is not None}
        # where it failed before, some ranks have all of theirs
        ledgers, self._unmade = self._unmade or list(found.values()), ()
        problem = None
        try:
            self._make_fresh(laid, is_stepped)
        except NvmeError as error:
            problem = error
        try:
            tell_ranks(ledgers, f"making states of {type(self).__name__}", problem)
        except NvmeError:
            self._unmade = ledgers
            raise

    def _update_and_count(self, laid: Sequence[Group], work: Sequence[Work]) -> None:
        """Update runs; count one write to each model, also if the update fails in the middle."""
        found = {id(s.ledger): s.ledger for each in laid for s in each.stretches}
        ledgers = [ledger for ledger in found.values() if ledger is not None]
        casts = self._casts = StepCasts(ledgers, (run for pairs in work for run, _ in pairs))
        problem = None
        try:
            try:
                self._update_all(work)
            except NvmeError as error:
                problem = error
            tell_ranks(ledgers, f"a step of {type(self).__name__} over NVMe", problem)
        except BaseException as error:
            self._note_fault(ledgers, error)
            raise
        finally:
            self._casts = None
            for ledger in ledgers:
                ledger.note_update()
        casts.end()

    def _note_fault(self, ledgers: Sequence[Ledger], error: BaseException) -> None:
        """Take no further step after one over NVMe that failed in the middle, on this rank or any.

        Of what is no fault of the disk the other ranks do not know yet.
        """
        for ledger in ledgers:
            if ledger.homes.nvme is not None:
                self._half_made = f"{type(error).__name__}: {error}"
                if isinstance(error, NvmeError):
                    ledger.half_made = str(error)
                else:
                    ledger.world.report_failure(repr(error))

    def _check_whole(self) -> None:
        if self._half_made is not None:
            raise OptimizerError(
                f"the last step of this {type(self).__name__} failed after some parameters were "
                f"updated and before others were ({self._half_made}); zerofx.load an earlier state "
                "before going on"
            )
