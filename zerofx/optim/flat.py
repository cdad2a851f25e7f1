"""What all optimizers here share: parameters and states as flat runs, a norm, then one update."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from zerofx.errors import OptimizerError
from zerofx.optim.clip import divisor, global_norm
from zerofx.optim.in_backward import StepsInBackward, is_stepped
from zerofx.optim.laid import LaidOut, Work
from zerofx.optim.places import check_dtype
from zerofx.optim.runs import Run
from zerofx.optim.staged import divide, update_staged
from zerofx.optim.whole_steps import WholeSteps


def alike(work: Work) -> list[Work]:
    """Divide runs into those of one dtype and device: one call of a fused kernel takes no more."""
    found: dict[Any, Work] = {}
    for run, grad in work:
        found.setdefault((run.param.dtype, run.param.device), []).append((run, grad))
    return list(found.values())


def near(scale: Tensor | None, run: Run) -> Tensor | None:
    """Return what gradients are divided by, on the device where a run's parameters live."""
    return None if scale is None else scale.to(run.param.device)


class FlatOptimizer(StepsInBackward, WholeSteps, LaidOut, Optimizer, ABC):
    """An optimizer that steps flat runs of parameters, with torch.optim's states and groups.

    A subclass names its states and updates runs; closures, clipping, loss scales and loading are
    here. `grad_norm` is the norm over all groups and ranks of the last step's gradients before
    clipping, float64 [], None without max_grad_norm.

    Parameters without a gradient are left out of a step, as in torch. `GradScaler` hands its scale
    to the step itself, so that unscaling is no pass of its own; where it found an infinity (on any
    rank), nothing is changed.
    """

    communicates: ClassVar[bool] = False  # within an update
    counts_writes: ClassVar[bool] = True  # zerofx's hook behind every step need not
    _step_supports_amp_scaling = True

    max_grad_norm: float | None
    grad_norm: Tensor | None

    def _begin(self, max_grad_norm: float | None) -> None:
        """Set what the constructor adds to torch's.

        Raises:
            OptimizerError: max_grad_norm is not positive, or a group asks for what is not done.
        """
        if max_grad_norm is not None and not max_grad_norm > 0.0:
            raise OptimizerError(
                f"max_grad_norm is {max_grad_norm}, but must be positive; None does not clip"
            )
        self.max_grad_norm = max_grad_norm
        self.grad_norm = None
        self._laid, self._updates = {}, []

    # -- what a subclass says -------------------------------------------------------------------
    def update(self, group: dict[str, Any], work: Work, scale: Tensor | None) -> None:
        """Update runs of one dtype and device, none empty; gradients are divided by `scale`.

        A subclass that has work between groups or ranks overrides `update_groups` instead.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither update nor update_groups")

    def update_groups(self, work: Sequence[tuple[dict[str, Any], Work]], scale: Any) -> None:
        """Update all groups; called on every rank, also where it owns no element of them."""
        for group, pairs in work:
            for part in alike([pair for pair in pairs if pair[0].numel]):
                self.update(group, part, near(scale, part[0][0]))

    def cast_place(self, run: Run) -> Tensor | None:
        """Return where a kernel must also write a run's new parameters, rounded, if anywhere."""
        return None if self._casts is None else self._casts.place_for(run)

    # -- torch's interface --------------------------------------------------------------------
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        kind = type(self).__name__
        if group.get("differentiable"):
            raise OptimizerError(
                f"{kind}: differentiable=True would record every update for autograd; use "
                f"torch.optim.{kind} on an uncompiled model for it"
            )
        for param in group["params"]:
            check_dtype(param, kind, self.takes_half)
        self.update_in_backward()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what `closure` returns."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise OptimizerError(
                f"{type(self).__name__}: a step reads rates and step counts on the host, so that a "
                "CUDA graph would repeat the same ones at every replay; step outside the graph"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_whole()
        self._note_step()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0.0:
            return loss
        with torch.inference_mode(False):
            laid = [self._layout(number) for number in range(len(self.param_groups))]
            self._make_fresh_together(laid)
            self._update_and_count(laid, self._works(laid, is_stepped))
        return loss

    def _update_all(
        self, work: Sequence[Work], groups: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Update runs, of each group some, with the groups' options or with those of `groups`."""
        grad_scale = getattr(self, "grad_scale", None)
        norm = None
        if self.max_grad_norm is not None:
            norm = global_norm(pair for pairs in work for pair in pairs)
            self.grad_norm = norm if grad_scale is None else norm / grad_scale
        scale = divisor(norm, self.max_grad_norm, grad_scale)
        near, far = divide(work)

        def update(part: Sequence[Work]) -> None:
            self.update_groups(list(zip(groups or self.param_groups, part, strict=True)), scale)

        if any(near) or not far:
            update(near)
        update_staged(far, update, self.communicates)

    def state_dict(self) -> dict[str, Any]:
        """Return states and groups as the torch optimizer of this name would.

        States come in the order of the parameters, which all ranks have in common: states are made
        in the order in which the pieces lie on a rank, and gathering them takes all ranks together.
        """
        self._settle()
        found = super().state_dict()
        states = found["state"]
        numbers = [n for group in found["param_groups"] for n in group["params"] if n in states]
        order = [*numbers, *(states.keys() - set(numbers))]
        found["state"] = {
            k: dict(states[k]) if isinstance(states[k], Mapping) else states[k] for k in order
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._settle()
        super().load_state_dict(state_dict)
        self._laid.clear()
        self._half_made = None
        with torch.inference_mode(False), torch.no_grad():
            for number in range(len(self.param_groups)):
                self._layout(number)
        self._note_load()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("max_grad_norm", "stretch_type")
        return {**super().__getstate__(), **{k: getattr(self, k) for k in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch comes here too when it loads a state_dict
        self._laid, self._updates = {}, self.__dict__.get("_updates", [])
        self.grad_norm = None
        super().__setstate__(state)
