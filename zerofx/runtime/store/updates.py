"""Updates inside backward: which optimizer makes them, and that each is one step of the loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from zerofx.errors import GradientError, ShardError

if TYPE_CHECKING:
    from zerofx.runtime.tensors.piece import Ledger

_PLAN = "Plan(update='in-backward')"


@runtime_checkable
class BucketOptimizer(Protocol):
    """An optimizer that can step one bucket of a model at a time."""

    communicates: bool  # an update asks other ranks, so it must run where collectives do

    def update_in_backward(self) -> None:
        """Take over its parameters of models whose backward updates them."""

    def make_states(self, params: Sequence[Any]) -> None:
        """Make the states, zeros of no step, of those of these parameters that have none."""

    def begin_backward(self) -> None:
        """Make ready for the updates of one backward."""

    def take_bucket(self, ledger: Ledger, bucket: int) -> Callable[[], None]:
        """Take the gradients that a bucket's parameters have now; return what updates with them."""


class Updates:
    """Who updates the parameters of one model inside its backward passes.

    A backward leaves no gradients: they are freed bucket by bucket, so `p.grad` may not be read
    until the `step()` that follows it in the loop, nor may another backward run. One that an
    exception ends between two updates leaves a step half made, which nothing here can take back:
    the next backward raises, until `step()` accepts it or a load replaces it.
    """

    def __init__(self) -> None:
        self._owners: dict[str, weakref.ref[Any]] = {}  # parameter -> its optimizer
        self._unstepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()  # in the backward that runs now
        self._half_made = False
        self._checked: Collection[str] = ()

    def take_over(self, optimizer: Any, names: Iterable[str]) -> None:
        """Let `optimizer` update these parameters from now on, in place of any earlier one.

        Raises:
            ShardError: it cannot step buckets, or clips, for which all gradients must be known.
        """
        check_optimizer(optimizer)
        for name in names:
            self._owners[name] = weakref.ref(optimizer, self._note_loss)
        self._checked = ()

    def _note_loss(self, ref: weakref.ref[Any]) -> None:
        self._checked = ()

    def _owner(self, name: str) -> Any:
        held = self._owners.get(name)
        return None if held is None else held()

    # -- a backward -----------------------------------------------------------------------------
    def begin(self, trained: Sequence[str]) -> None:
        """Check, before anything is launched, that a backward may update these parameters.

        Raises:
            GradientError: a parameter has no optimizer, or was updated since the last step; or a
                backward that failed has left a step half made.
        """
        if self._half_made:
            raise GradientError(
                f"an exception ended the last backward after some parameters were updated "
                f"({_PLAN}) and before others were; zerofx.load an earlier state, or call "
                "optimizer.step() to go on with what there is"
            )
        for name in trained if self._unstepped else ():
            if self._owner(name) in self._unstepped:
                raise GradientError(
                    f"{name}: a second backward since optimizer.step(): {_PLAN} updates the "
                    "parameters inside every backward and cannot sum the gradients of several; "
                    "call optimizer.step() after each, freeze what a loss is not meant to train "
                    "(requires_grad_(False)) before its forward, or use Plan(update='step')"
                )
        if trained != self._checked:
            for name in trained:
                self._require_owner(name)
            self._checked = trained
        for optimizer in self._optimizers(trained):
            optimizer.begin_backward()

    def take(self, ledger: Ledger, bucket: int, names: Collection[str]) -> Callable[[], None]:
        """Take the gradients of a bucket; return what updates it, at once or later.

        names: its parameters that have a gradient.
        """
        taken = []
        for optimizer in self._optimizers(names):
            self._running.add(optimizer)
            taken.append(optimizer.take_bucket(ledger, bucket))

        def update() -> None:
            while taken:  # what was taken holds the gradients
                taken.pop(0)()
            ledger.note_update()

        return update

    def communicates(self, names: Iterable[str]) -> bool:
        """Tell whether the update of any of these parameters asks other ranks."""
        return any(optimizer.communicates for optimizer in self._optimizers(names))

    def end(self) -> None:
        """Note that a backward has made its updates."""
        self._unstepped.update(self._running)
        self._running.clear()

    def abandon(self) -> None:
        """Note that an exception has ended a backward."""
        self._half_made |= bool(self._running)
        self.end()

    def _optimizers(self, names: Iterable[str]) -> list[BucketOptimizer]:
        found = (self._owner(name) for name in names)
        return list({id(o): o for o in found if o is not None}.values())

    def _require_owner(self, name: str) -> None:
        if self._owner(name) is None:
            raise GradientError(
                f"{name}: {_PLAN} updates it inside backward, but no optimizer of zerofx.optim "
                "has it; build one over model.parameters() and keep it, or freeze the parameter "
                "(requires_grad_(False))"
            )

    # -- between backward and the next ------------------------------------------------------------
    def note_step(self, optimizer: Any) -> None:
        """Note the `step()` that follows a backward, or a load of its states."""
        self._unstepped.discard(optimizer)
        self._half_made = False

    def check_read(self, name: str) -> None:
        """Refuse to show p.grad of a parameter that was updated and not yet stepped.

        Raises:
            GradientError: clipping, a norm or a log would find no gradient and say nothing.
        """
        if self._owner(name) in self._unstepped:
            raise GradientError(
                f"{name}.grad was used and freed inside backward ({_PLAN}): before "
                "optimizer.step() gradients can be neither clipped nor looked at nor dropped, the "
                "parameters are updated already; for that use Plan(update='step')"
            )


def check_optimizer(optimizer: Any) -> None:
    """Raise unless an optimizer can update bucket by bucket.

    Raises:
        ShardError: it cannot step buckets, or clips, for which all gradients must be known.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, BucketOptimizer):
        raise ShardError(
            f"{_PLAN} needs an optimizer that steps bucket by bucket, which torch.optim.{kind} "
            f"cannot; use zerofx.optim (AdamW, Adam, SGD, Lion, Lamb), or Plan(update='step')"
        )
    limit = getattr(optimizer, "max_grad_norm", None)
    if limit is not None:
        raise ShardError(
            f"{kind}(max_grad_norm={limit}) clips by the norm of all gradients, but with {_PLAN} "
            "the first parameters are updated before the last gradient is known; leave "
            "max_grad_norm out, or use Plan(update='step')"
        )
