"""Updates inside backward: the part of an optimizer that a plan with update="in-backward" uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zerofx.errors import OptimizerError
from zerofx.layout.buckets import Bucket
from zerofx.optim.runs import ledgers_of, name_of
from zerofx.runtime.store.updates import Updates, check_optimizer
from zerofx.runtime.tensors.piece import Ledger, piece_of
from zerofx.runtime.tensors.tensor import local_of

if TYPE_CHECKING:
    from zerofx.optim.flat import FlatOptimizer

_PLAN = "Plan(update='in-backward')"


class BackwardUpdates:
    """The part of an optimizer that a backward with `Plan(update="in-backward")` calls.

    For these parameters, `step()` only notes that the loop has reached it; parameters of other
    models, and of no model, are stepped as usual. It holds no reference to the optimizer, which
    passes itself to each call.
    """

    def __init__(self) -> None:
        # those of the models whose backward updates parameters of this optimizer
        self._updates: list[Updates] = []
        self._options: list[dict[str, Any]] | None = None  # when the last backward began

    def take_over(self, optimizer: FlatOptimizer) -> None:
        """Take over the updates of all parameters whose model updates them inside backward.

        Raises:
            ShardError: the optimizer clips, which needs all gradients first.
        """
        found: dict[int, tuple[Updates, list[str]]] = {}
        for param in _params(optimizer):
            piece = piece_of(param)
            if piece is not None and (updates := piece.ledger.updates) is not None:
                found.setdefault(id(updates), (updates, []))[1].append(piece.name)
        for updates, names in found.values():
            updates.take_over(optimizer, names)
        self._updates = [updates for updates, _ in found.values()]

    def begin(self, optimizer: FlatOptimizer) -> None:
        """Record the options at the beginning of a backward.

        Raises:
            ShardError: the optimizer clips.
        """
        check_optimizer(optimizer)
        self._options = _options(optimizer)

    def note_step(self, optimizer: FlatOptimizer) -> None:
        """Tell the models that the loop has reached `step()`.

        Raises:
            OptimizerError: a change since backward comes too late for its updates: a GradScaler's
                unscaling, another learning rate, or a gradient set by hand.
        """
        if not self._updates:
            return
        kind = type(optimizer).__name__
        if getattr(optimizer, "grad_scale", None) is not None:
            raise OptimizerError(
                f"{kind}: a GradScaler cannot unscale gradients that {_PLAN} has used inside "
                "backward already. Compute in bf16 without a scaler, or use Plan(update='step')."
            )
        if self._options not in (None, _options(optimizer)):
            raise OptimizerError(
                f"{kind}: the options of a group (for example, the learning rate) were changed "
                f"between backward, which has used the old ones ({_PLAN}), and step(). Change them "
                "after step(), as schedulers do, or use Plan(update='step')."
            )
        self._options = None
        for updates in self._updates:
            updates.note_step(optimizer)
        given = [p for p in _params(optimizer) if _is_updated(p) and p.grad is not None]
        if given and _only_makes_states(optimizer, given):
            optimizer.make_states(given)
        elif given:
            raise OptimizerError(
                f"{name_of(given[0])}.grad was set by hand, but {_PLAN} makes all updates inside "
                "backward. Set it to None, or use Plan(update='step')."
            )

    def note_load(self, optimizer: FlatOptimizer) -> None:
        """Take over again after a load, and expect no step for the backward before it."""
        self._options = None
        self.take_over(optimizer)
        for updates in self._updates:
            updates.note_step(optimizer)


def _params(optimizer: FlatOptimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_updated(param: Tensor) -> bool:
    """Return whether backward updates a parameter."""
    piece = piece_of(param)
    return piece is not None and piece.ledger.updates is not None


def _only_makes_states(optimizer: FlatOptimizer, given: Sequence[Tensor]) -> bool:
    """Return whether gradients set by hand are those with which torch creates states.

    If an optimizer has no states yet, torch's `get_optimizer_state_dict` and
    `set_optimizer_state_dict` run a step with zero gradients and learning rates of 0.
    """
    if optimizer.state or any(float(g.get("lr", 1.0)) for g in optimizer.param_groups):
        return False
    return not any(p.grad is not None and bool(local_of(p.grad).any()) for p in given)


def settle(optimizer: FlatOptimizer) -> None:
    """Wait for updates that run during the schedule, because states are about to be read."""
    for ledger in ledgers_of(_params(optimizer)):
        ledger.pending.join()


def groups_as_now(optimizer: FlatOptimizer) -> list[dict[str, Any]]:
    """Return the groups with copies of their options, which later changes do not affect."""
    return [{k: _as_now(v) for k, v in group.items()} for group in optimizer.param_groups]


def _as_now(option: Any) -> Any:
    """Return a copy of an option of a group: schedulers change tensors in place."""
    if isinstance(option, Tensor):
        return option.detach().clone()
    if isinstance(option, tuple):
        return tuple(_as_now(part) for part in option)
    return option


def _options(optimizer: FlatOptimizer) -> list[dict[str, Any]]:
    """Return the groups' current options, without their parameters."""
    return [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def is_stepped(ledger: Ledger | None, bucket: Bucket | None) -> bool:
    """Return whether `step()`, and not backward, updates the parameters of a ledger."""
    return ledger is None or ledger.updates is None
