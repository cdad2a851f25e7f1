"""What all optimizers here share: parameters and states as flat runs, a norm, then one update."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from zerofx.compat.optim import foreach_add_
from zerofx.errors import NvmeError, OptimizerError
from zerofx.optim.casts import StepCasts
from zerofx.optim.clip import divisor, global_norm
from zerofx.optim.in_backward import Owner, StepsInBackward, is_stepped, owner_of
from zerofx.optim.places import check_dtype, neighbours, place_of
from zerofx.optim.staged import divide, tell_ranks, update_staged
from zerofx.optim.stretch import Run, Stretch
from zerofx.runtime.param_piece import Ledger

Work = list[tuple[Run, Tensor]]  # runs with their flat gradients


def alike(work: Work) -> list[Work]:
    """Divide runs into those of one dtype and device: one call of a fused kernel takes no more."""
    found: dict[Any, Work] = {}
    for run, grad in work:
        found.setdefault((run.param.dtype, run.param.device), []).append((run, grad))
    return list(found.values())


def near(scale: Tensor | None, run: Run) -> Tensor | None:
    """Return what gradients are divided by, on the device where a run's parameters live."""
    return None if scale is None else scale.to(run.param.device)


@dataclass
class _Group:
    """How one parameter group is laid out."""

    params: list[Tensor]
    keys: tuple[str, ...]
    stretches: list[Stretch]
    waiting: list[Tensor]  # without state, since they had no gradient so far


class FlatOptimizer(StepsInBackward, Optimizer, ABC):
    """An optimizer that steps flat runs of parameters, with torch.optim's states and groups.

    A subclass names its states and updates runs; closures, clipping, loss scales, step counts,
    loading and layout are here. `grad_norm` is the norm over all groups and ranks of the last
    step's gradients before clipping, float64 [], None without max_grad_norm.

    Parameters without a gradient are left out of a step, as in torch. `GradScaler` hands its scale
    to the step itself, so that unscaling is no pass of its own; where it found an infinity (on any
    rank), nothing is changed.
    """

    counts_steps: ClassVar[bool] = True
    communicates: ClassVar[bool] = False  # within an update
    takes_half: ClassVar[bool] = False
    counts_writes: ClassVar[bool] = True  # zerofx's hook behind every step need not
    stretch_type: type[Stretch] = Stretch
    _step_supports_amp_scaling = True

    max_grad_norm: float | None
    grad_norm: Tensor | None
    _laid: dict[int, _Group]
    _casts: StepCasts | None = None  # within a step
    _unmade: Sequence[Ledger] = ()  # whose states could not be made on some rank
    _half_made: str | None = None  # what ended a step in the middle, since the last load

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
    @abstractmethod
    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the states, of a parameter's shape, that the group's options need."""

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
                "CUDA graph would repeat the same ones for ever; step outside the graph"
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

    def _make_fresh_together(self, laid: Sequence[_Group]) -> None:
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

    def _update_and_count(self, laid: Sequence[_Group], work: Sequence[Work]) -> None:
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

    @property
    def state_bytes(self) -> int:
        """Bytes of the states on this rank, without step counts."""
        return sum(s.state_bytes for laid in self._laid.values() for s in laid.stretches)

    def state_dict(self) -> dict[str, Any]:
        """Return states and groups as the torch optimizer of this name would."""
        self._settle()
        found = super().state_dict()
        found["state"] = {
            k: dict(v) if isinstance(v, Mapping) else v for k, v in found["state"].items()
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

    @torch.no_grad()
    def make_states(self, params: Sequence[Tensor]) -> None:
        """Make the states, zeros of no step, of those of these parameters that have none."""
        wanted = set(map(id, params))
        with torch.inference_mode(False):
            for number in range(len(self.param_groups)):
                laid = self._layout(number)
                fresh = [p for p in laid.waiting if id(p) in wanted]
                laid.stretches += self._stretches(fresh, laid.keys)
                laid.waiting = [p for p in laid.waiting if id(p) not in wanted]

    # -- layout -------------------------------------------------------------------------------
    def _works(self, laid: Sequence[_Group], is_due: Callable[[Owner], bool]) -> list[Work]:
        """Return each group's runs that are due and have gradients; counts a step of each.

        States are made where there are none yet: for all groups before any step is counted, since
        there may be no room for them.
        """
        self._make_fresh(laid, is_due)
        return [self._work(each, is_due) for each in laid]

    def _make_fresh(self, laid: Sequence[_Group], is_due: Callable[[Owner], bool]) -> None:
        """Make the states of what has its first gradient."""
        for each in laid:
            fresh = [p for p in each.waiting if is_due(owner_of(p)) and p.grad is not None]
            if fresh:
                each.stretches += self._stretches(fresh, each.keys)
                made = set(map(id, fresh))
                each.waiting = [p for p in each.waiting if id(p) not in made]

    def _work(self, laid: _Group, is_due: Callable[[Owner], bool]) -> Work:
        work: Work = []
        for stretch in laid.stretches:
            if is_due((stretch.ledger, stretch.bucket)):
                work += stretch.runs([p.grad for p in stretch.params])
        if work and self.counts_steps:
            foreach_add_([run.steps for run, _ in work], 1)
        return work

    def _layout(self, number: int) -> _Group:
        """Return the layout of a group, made anew where parameters or states are not as they were.

        States that were loaded, or that torch's own optimizer made, are taken into flat tensors.
        """
        group = self.param_groups[number]
        params, keys = group["params"], self.state_keys(group)
        laid = self._laid.get(number)
        if laid is not None and self._is_current(laid, params, keys):
            return laid
        self._laid.pop(number, None)
        for param in params:
            check_dtype(param, type(self).__name__, self.takes_half)
        has_state = [p for p in params if self._has_state(p, keys)]
        known = set(map(id, has_state))
        waiting = [p for p in params if id(p) not in known]
        laid = _Group(list(params), keys, self._stretches(has_state, keys), waiting)
        self._laid[number] = laid
        return laid

    def _is_current(self, laid: _Group, params: list[Tensor], keys: tuple[str, ...]) -> bool:
        return (
            laid.keys == keys
            and len(laid.params) == len(params)
            and all(map(is_, laid.params, params))
            and all(stretch.is_intact(self.state) for stretch in laid.stretches)
            and not any(self._has_state(p, keys) for p in laid.waiting)
        )

    def _has_state(self, param: Tensor, keys: tuple[str, ...]) -> bool:
        needed = (*keys, "step") if self.counts_steps else keys
        if not needed:
            return True
        held = self.state.get(param) or {}
        return all(held.get(key) is not None for key in needed)

    def _stretches(self, params: Sequence[Tensor], keys: tuple[str, ...]) -> list[Stretch]:
        places = [place_of(p) for p in params]
        made = []
        for numbers in neighbours(enumerate(places)):
            stretch = self.stretch_type([params[i] for i in numbers], [places[i] for i in numbers])
            stretch.owner = weakref.ref(self)
            stretch.adopt(self.state, keys, self.counts_steps)
            made.append(stretch)
        return made
