"""What an optimizer does inside backward, where a model's plan has its updates there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.errors import OptimizerError
from zerofx.optim.places import local_of, name_of, place_of
from zerofx.runtime.layout import Bucket
from zerofx.runtime.param_piece import Ledger
from zerofx.runtime.param_tensor import ShardedTensor
from zerofx.runtime.sharded_parameter import ReplicatedParameter
from zerofx.runtime.updates import Updates, check_optimizer

_PLAN = "Plan(update='in-backward')"
Owner = tuple[Ledger | None, Bucket | None]  # whose a parameter is: None if not compiled


class StepsInBackward:
    """The part of an optimizer that a backward with `Plan(update="in-backward")` calls.

    `step()` then only notes that the loop has come round; parameters of other models, and of none,
    are stepped by it as ever.
    """

    param_groups: list[dict[str, Any]]
    _updates: list[Updates]  # of the models whose backward updates parameters of this optimizer
    _options: list[dict[str, Any]] | None = None  # as the last backward found them
    _laid: dict[int, Any]
    _layout: Callable[[int], Any]
    _works: Callable[[Any, Callable[[Owner], bool]], Any]
    _update_all: Callable[..., None]
    state: Any
    make_states: Callable[[Sequence[Tensor]], None]

    def update_in_backward(self) -> None:
        """Take over the updates of all parameters whose model has them inside backward.

        Raises:
            ShardError: this optimizer clips, for which all gradients must be known.
        """
        found: dict[int, tuple[Updates, list[str]]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                updates = _updates_of(param)
                if updates is not None:
                    found.setdefault(id(updates), (updates, []))[1].append(name_of(param))
        for updates, names in found.values():
            updates.take_over(self, names)
        self._updates = [updates for updates, _ in found.values()]

    def begin_backward(self) -> None:
        """Look once a backward at whether parameters, states and options are as they were.

        Raises:
            ShardError: this optimizer clips by now.
        """
        check_optimizer(self)
        self._options = _options(self.param_groups)
        with torch.inference_mode(False), torch.no_grad():
            for number in range(len(self.param_groups)):
                self._layout(number)

    @torch.no_grad()
    def take_bucket(self, ledger: Ledger, bucket: int) -> Callable[[], None]:
        """Take the gradients that a bucket's parameters have now; return what updates with them.

        It updates with the options that the groups have now.
        """

        def is_due(owner: Owner) -> bool:
            return owner[0] is ledger and owner[1] is not None and owner[1].index == bucket

        with torch.inference_mode(False):
            laid = [self._laid[number] for number in range(len(self.param_groups))]
            work = self._works(laid, is_due)
        groups = [{k: _as_now(v) for k, v in group.items()} for group in self.param_groups]

        @torch.no_grad()
        def update() -> None:
            with torch.inference_mode(False):
                self._update_all(work, groups)
            work.clear()  # which holds the gradients

        return update

    def _note_step(self) -> None:
        """Tell the models that the loop has come to `step()`.

        Raises:
            OptimizerError: what happened since backward comes too late for its updates: a
                GradScaler's unscaling, another learning rate, a gradient set by hand.
        """
        if not self._updates:
            return
        kind = type(self).__name__
        if getattr(self, "grad_scale", None) is not None:
            raise OptimizerError(
                f"{kind}: a GradScaler cannot unscale gradients that {_PLAN} has used inside "
                "backward already; compute in bf16 without a scaler, or use Plan(update='step')"
            )
        if self._options not in (None, _options(self.param_groups)):
            raise OptimizerError(
                f"{kind}: the options of a group (a learning rate, say) were changed between "
                f"backward, which has updated with the old ones ({_PLAN}), and step(); change them "
                "behind step(), as schedulers do, or use Plan(update='step')"
            )
        self._options = None
        for updates in self._updates:
            updates.note_step(self)
        given = [
            param
            for group in self.param_groups
            for param in group["params"]
            if _updates_of(param) is not None and param.grad is not None
        ]
        if given and self._only_makes_states(given):
            self.make_states(given)
        elif given:
            raise OptimizerError(
                f"{name_of(given[0])}.grad was set by hand, but {_PLAN} makes all updates inside "
                "backward; set it to None, or use Plan(update='step')"
            )

    def _only_makes_states(self, given: Sequence[Tensor]) -> bool:
        """Whether a step with gradients set by hand is the one by which torch makes states.

        `get_optimizer_state_dict` and `set_optimizer_state_dict` of torch take a step with
        gradients of zeros and rates of 0 with an optimizer that has no states yet.
        """
        if self.state or any(float(group.get("lr", 1.0)) for group in self.param_groups):
            return False
        grads = [param.grad for param in given]
        return not any(grad is not None and bool(local_of(grad).any()) for grad in grads)

    def _settle(self) -> None:
        """Wait for updates that run beside the schedule: states are about to be looked at."""
        owners = [owner_of(p)[0] for group in self.param_groups for p in group["params"]]
        for ledger in {id(owner): owner for owner in owners if owner is not None}.values():
            ledger.pending.join()

    def _note_load(self) -> None:
        """Take over again after a load; no step is owed for what came before it."""
        self._options = None
        self.update_in_backward()
        for updates in self._updates:
            updates.note_step(self)


def _as_now(option: Any) -> Any:
    """Return an option of a group that stays what it is now: schedulers fill tensors in place."""
    if isinstance(option, Tensor):
        return option.detach().clone()
    if isinstance(option, tuple):
        return tuple(_as_now(part) for part in option)
    return option


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups' options as they are now, without their parameters."""
    return [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in groups
    ]


def owner_of(param: Tensor) -> Owner:
    """Return the ledger and bucket of a compiled model's parameter."""
    place = place_of(param)
    return place.ledger, place.bucket


def is_stepped(owner: Owner) -> bool:
    """Say whether `step()` updates such parameters, not backward."""
    return owner[0] is None or owner[0].updates is None


def _updates_of(param: Tensor) -> Updates | None:
    if isinstance(param, ShardedTensor):
        return param._piece.ledger.updates
    if isinstance(param, ReplicatedParameter):
        return param._ledger.updates
    return None
