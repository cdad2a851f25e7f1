"""Updates inside backward: which optimizer makes them, and the check for one step per backward."""

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

    # An update communicates with other ranks, so it must run in collective order.
    communicates: bool

    def update_in_backward(self) -> None:
        """Start updating those of its parameters whose models update inside backward."""

    def make_states(self, params: Sequence[Any]) -> None:
        """Create missing states of these parameters, as zeros at step 0."""

    def begin_backward(self) -> None:
        """Prepare for the updates of one backward."""

    def take_bucket(self, ledger: Ledger, bucket: int) -> Callable[[], None]:
        """Take the current gradients of a bucket's parameters; return a function to apply them."""


class Updates:
    """Tracks which optimizers update the parameters of one model inside its backward passes.

    A backward leaves no gradients: they are freed bucket by bucket. Until the `step()` that follows
    it in the loop, `p.grad` may not be read and no other backward may run. If an exception ends a
    backward between two updates, the step is incomplete and cannot be undone. The next backward
    then raises, until `step()` accepts that state or a load replaces it.
    """

    def __init__(self) -> None:
        self._owners: dict[str, weakref.ref[Any]] = {}  # parameter -> its optimizer
        self._unstepped: weakref.WeakSet[Any] = weakref.WeakSet()
        # Optimizers of the running backward.
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()
        self._half_made = False
        self._checked: Collection[str] = ()

    def take_over(self, optimizer: Any, names: Iterable[str]) -> None:
        """Let `optimizer` update these parameters from now on, in place of any earlier one.

        Raises:
            ShardError: it cannot step buckets, or it clips, which requires all gradients to be
                known.
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
            GradientError: a parameter has no optimizer, or was updated since the last step, or a
                failed backward has left a step incomplete.
        """
        if self._half_made:
            raise GradientError(
                "an exception ended the last backward after some parameters were updated "
                f"({_PLAN}) and before others were. zerofx.load an earlier state, or call "
                "optimizer.step() to continue with the current one."
            )
        for name in trained if self._unstepped else ():
            if self._owner(name) in self._unstepped:
                raise GradientError(
                    f"{name}: a second backward ran since optimizer.step(). {_PLAN} updates the "
                    "parameters inside every backward and cannot sum the gradients of several. "
                    "Call optimizer.step() after each, freeze parameters that a loss should not "
                    "train (requires_grad_(False)) before its forward, or use Plan(update='step')."
                )
        if trained != self._checked:
            for name in trained:
                self._require_owner(name)
            self._checked = trained
        for optimizer in self._optimizers(trained):
            optimizer.begin_backward()

    def take(self, ledger: Ledger, bucket: int, names: Collection[str]) -> Callable[[], None]:
        """Take the gradients of a bucket; return a function that applies them, now or later.

        names: its parameters that have a gradient.
        """
        taken = []
        for optimizer in self._optimizers(names):
            self._running.add(optimizer)
            taken.append(optimizer.take_bucket(ledger, bucket))

        def update() -> None:
            while taken:  # its elements hold the gradients
                taken.pop(0)()
            ledger.note_update()

        return update

    def communicates(self, names: Iterable[str]) -> bool:
        """Return whether the update of any of these parameters communicates with other ranks."""
        return any(optimizer.communicates for optimizer in self._optimizers(names))

    def end(self) -> None:
        """Record that a backward has made its updates."""
        self._unstepped.update(self._running)
        self._running.clear()

    def abandon(self) -> None:
        """Record that an exception has ended a backward."""
        self._half_made |= bool(self._running)
        self.end()

    def _optimizers(self, names: Iterable[str]) -> list[BucketOptimizer]:
        found = (self._owner(name) for name in names)
        return list({id(o): o for o in found if o is not None}.values())

    def _require_owner(self, name: str) -> None:
        if self._owner(name) is None:
            raise GradientError(
                f"{name}: {_PLAN} updates it inside backward, but no optimizer of zerofx.optim has "
                "it. Build one over model.parameters() and keep it, or freeze the parameter "
                "(requires_grad_(False))."
            )

    # -- between two backward passes --------------------------------------------------------------
    def note_step(self, optimizer: Any) -> None:
        """Record the `step()` that follows a backward, or a load of its states."""
        self._unstepped.discard(optimizer)
        self._half_made = False

    def check_read(self, name: str) -> None:
        """Refuse to show p.grad of a parameter between its update and the next `step()`.

        Raises:
            GradientError: otherwise clipping, a norm or a log would silently find no gradient.
        """
        if self._owner(name) in self._unstepped:
            raise GradientError(
                f"{name}.grad was used and freed inside backward ({_PLAN}). The parameters are "
                "already updated, so gradients cannot be clipped, read or dropped before "
                "optimizer.step(). Use Plan(update='step') for that."
            )


def check_optimizer(optimizer: Any) -> None:
    """Raise unless an optimizer can update bucket by bucket.

    Raises:
        ShardError: it cannot step buckets, or it clips, which requires all gradients to be known.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, BucketOptimizer):
        raise ShardError(
            f"{_PLAN} needs an optimizer that steps bucket by bucket, which torch.optim.{kind} "
            "cannot. Use zerofx.optim (AdamW, Adam, SGD, Lion, Lamb), or Plan(update='step')."
        )
    limit = getattr(optimizer, "max_grad_norm", None)
    if limit is not None:
        raise ShardError(
            f"{kind}(max_grad_norm={limit}) clips by the norm of all gradients, but with {_PLAN} "
            "the first parameters are updated before the last gradient is known. Leave "
            "max_grad_norm out, or use Plan(update='step')."
        )
