"""Steps of parameters on NVMe: bucket by bucket through host memory, by all ranks or by none.

The parameters and states of a bucket are in host memory while it is updated. Meanwhile the next
bucket is read and the previous one is written. A disk may fail or be full on one rank, so the ranks
tell each other before they continue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain

from torch import Tensor

from zerofx.comm.together import tell
from zerofx.errors import NvmeError, OptimizerError
from zerofx.layout.buckets import Bucket
from zerofx.layout.tiers import Tier
from zerofx.optim.runs import FlatRun, Work
from zerofx.policy import staging
from zerofx.policy.staging import Move
from zerofx.runtime.tensors.piece import Ledger
from zerofx.runtime.tiers.arrival import Arrival
from zerofx.runtime.tiers.nvme_home import PARAMETERS, NvmeHome

Groups = list[Work]  # the runs of each group


def divide(work: Sequence[Work]) -> tuple[Groups, list[Groups]]:
    """Divide runs by where they live: those in memory, and those on NVMe, bucket by bucket.

    Buckets come in an order that is the same on all ranks, since an update may communicate.
    """
    near: Groups = [[] for _ in work]
    far: dict[tuple[int, int], Groups] = {}
    for number, pairs in enumerate(work):
        for run, grad in pairs:
            into = near
            if run.bucket is not None and run.bucket.home is Tier.NVME:
                assert run.ledger is not None
                key = run.ledger.number, run.bucket.index
                into = far.setdefault(key, [[] for _ in work])
            into[number].append((run, grad))
    return near, [far[key] for key in sorted(far)]


def update_staged(
    far: Sequence[Groups], update: Callable[[Groups], None], asks_others: bool
) -> None:
    """Update each bucket in host memory, while the next one is read and the last one is written.

    asks_others: `update` is a collective call, before which the ranks tell each other of faults.

    Raises:
        NvmeError: a read or write failed; names file, offset and bucket. No transfer is in flight
            then.
    """
    try:
        _update_staged(far, update, _together(far) if asks_others else _alone)
    except BaseException:
        for groups in far:
            _home_of(groups).drain()
        raise


def _alone(problem: NvmeError | None) -> None:
    if problem is not None:
        raise problem


def _together(far: Sequence[Groups]) -> Callable[[NvmeError | None], None]:
    """Return a function that raises on all ranks if there is a problem on one."""
    if not far:
        return _alone
    world = _ledger_of(far[0]).world
    return lambda problem: tell(world, "an update over NVMe", problem, NvmeError)


def _update_staged(
    far: Sequence[Groups],
    update: Callable[[Groups], None],
    check: Callable[[NvmeError | None], None],
) -> None:
    problem: NvmeError | None = None
    stages: dict[int, _Stage] = {}  # the buckets that are in host memory
    for move, k in staging.step_order(len(far)):
        arrived: Groups = []
        try:
            if problem is None and move is Move.READ:
                stages[k] = _Stage(far[k])
            elif problem is None and move is Move.UPDATE:
                arrived = stages[k].arrived()
            elif problem is None:
                stages.pop(k).written(stages.values())
        except NvmeError as error:
            problem = error
        if move is Move.UPDATE:
            check(problem)  # raises it, on the other ranks too if they would wait for this one
            with stages[k].noted():
                update(arrived)
            del arrived  # it holds the bucket's memory
            try:
                stages[k].leave()
            except NvmeError as error:
                problem = error
    _alone(problem)


class _Stage:
    """One bucket's parameters and states in host memory, from their reads to their writes."""

    def __init__(self, groups: Groups) -> None:
        self._groups, self._home = groups, _home_of(groups)
        run = next(_runs(groups))
        assert run.bucket is not None
        self._bucket: Bucket = run.bucket
        kinds = [PARAMETERS, *dict.fromkeys(k for r in _runs(groups) for k in r.states)]
        self._coming: dict[str, Arrival] = {k: self._take(k) for k in kinds}
        self._home.drop_early(self._bucket.index)  # states that this optimizer does not use
        self._held: dict[str, Tensor] = {}
        self._num_writes = 0

    def _take(self, kind: str) -> Arrival:
        return self._home.take(kind, self._bucket.index, self._bucket.dtype)

    def arrived(self) -> Groups:
        """Wait for the reads; return the runs over the memory that was read into."""
        self._held = {kind: arrival.wait() for kind, arrival in self._coming.items()}
        return [[(self._staged(run), grad) for run, grad in pairs] for pairs in self._groups]

    def _staged(self, run: FlatRun) -> FlatRun:
        stop = run.offset + run.numel
        states = {key: self._held[key][run.offset : stop] for key in run.states}
        return replace(run, param=self._held[PARAMETERS][run.offset : stop], states=states)

    def noted(self) -> AbstractContextManager[None]:
        """Return the context of an update, which a recording notes if there is one."""
        if (beside := self._home.beside) is None:
            return contextlib.nullcontext()
        return beside.updating(f"b{self._bucket.index}", beside.launched_ns())

    def leave(self) -> None:
        """Launch the writes, which hold the bucket's memory until they end."""
        for kind, values in self._held.items():
            self._home.write(kind, self._bucket.index, values)
        self._num_writes = len(self._held)
        self._held.clear()

    def written(self, later: Iterable[_Stage]) -> None:
        """Wait for the writes, but not for those of stages whose writes began later."""
        self._home.join(leave=sum(s._num_writes for s in later if s._home is self._home))


def _runs(groups: Groups) -> Iterator[FlatRun]:
    return (run for run, _ in chain.from_iterable(groups))


def _ledger_of(groups: Groups) -> Ledger:
    ledger: Ledger | None = next(_runs(groups)).ledger
    assert ledger is not None
    return ledger


def _home_of(groups: Groups) -> NvmeHome:
    home = _ledger_of(groups).homes.nvme
    assert home is not None
    return home


def tell_ranks(ledgers: Iterable[Ledger], what: str, problem: NvmeError | None) -> None:
    """Raise an NVMe problem of one rank on all ranks, in this call.

    A collective call of the models that have data on NVMe.
    """
    far = [ledger for ledger in ledgers if ledger.homes.nvme is not None]
    for world in {ledger.world: None for ledger in far}:
        tell(world, what, problem, NvmeError)
    _alone(problem)


# -- all ranks or none -----------------------------------------------------------------------------
class WholeSteps:
    """The part of an optimizer that completes a step on all ranks or on none, as far as possible.

    kind: the optimizer's name, for errors.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._unmade: Sequence[Ledger] = ()  # those whose states could not be created on some rank
        self._half_made: str | None = None  # the error that ended a step partway

    def check(self) -> None:
        """Raise if a step has failed partway.

        Raises:
            OptimizerError: some parameters were updated and others were not.
        """
        if self._half_made is not None:
            raise OptimizerError(
                f"the last step of this {self._kind} failed after some parameters were "
                f"updated and before others were ({self._half_made}). Load an earlier state "
                "with zerofx.load before going on."
            )

    def forget(self) -> None:
        """Forget the earlier failure: a load has replaced all parameters and states."""
        self._half_made = None

    def make_states(self, ledgers: Sequence[Ledger], make: Callable[[], None]) -> None:
        """Create the states that a step needs, on all ranks or none: space may be short.

        ledgers: those of the models with parameters that have their first gradient.

        Raises:
            NvmeError: there is no space on some rank; no step was counted anywhere.
        """
        # after a failure, some ranks have all of their states
        ledgers, self._unmade = self._unmade or ledgers, ()
        problem = None
        try:
            make()
        except NvmeError as error:
            problem = error
        try:
            tell_ranks(ledgers, f"making states of {self._kind}", problem)
        except NvmeError:
            self._unmade = ledgers
            raise

    def update(self, ledgers: Sequence[Ledger], update: Callable[[], None]) -> None:
        """Update all runs of a step.

        Raises:
            NvmeError: the disk of some rank failed; raised on every rank.
        """
        problem = None
        try:
            try:
                update()
            except NvmeError as error:
                problem = error
            tell_ranks(ledgers, f"a step of {self._kind} over NVMe", problem)
        except BaseException as error:
            self._note_fault(ledgers, error)
            raise

    def _note_fault(self, ledgers: Sequence[Ledger], error: BaseException) -> None:
        """Refuse further steps after one over NVMe that failed partway, on this rank or any other.

        The other ranks do not know yet of an error that is not a fault of the disk.
        """
        for ledger in ledgers:
            if ledger.homes.nvme is not None:
                self._half_made = f"{type(error).__name__}: {error}"
                if isinstance(error, NvmeError):
                    ledger.half_made = str(error)
                else:
                    ledger.world.report_failure(repr(error))
