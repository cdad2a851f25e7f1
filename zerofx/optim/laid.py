"""Parameters and states of an optimizer as flat runs; states are made when they are needed."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor

from zerofx.compat.optim import foreach_add_
from zerofx.optim.in_backward import Owner, owner_of
from zerofx.optim.places import check_dtype, neighbours, place_of
from zerofx.optim.runs import Run
from zerofx.optim.stretch import Stretch

Work = list[tuple[Run, Tensor]]  # runs with their flat gradients


@dataclass
class Group:
    """How one parameter group is laid out."""

    params: list[Tensor]
    keys: tuple[str, ...]
    stretches: list[Stretch]
    waiting: list[Tensor]  # without state, since they had no gradient so far


class LaidOut:
    """The part of an optimizer that knows where its parameters and states lie, group by group."""

    counts_steps: ClassVar[bool] = True
    takes_half: ClassVar[bool] = False
    stretch_type: type[Stretch] = Stretch

    param_groups: list[dict[str, Any]]
    state: Any
    _laid: dict[int, Group]

    @abstractmethod
    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the states, of a parameter's shape, that the group's options need."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the states on this rank, without step counts."""
        return sum(s.state_bytes for laid in self._laid.values() for s in laid.stretches)

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

    def _works(self, laid: Sequence[Group], is_due: Callable[[Owner], bool]) -> list[Work]:
        """Return each group's runs that are due and have gradients; counts a step of each.

        States are made where there are none yet: for all groups before any step is counted, since
        there may be no room for them.
        """
        self._make_fresh(laid, is_due)
        return [self._work(each, is_due) for each in laid]

    def _make_fresh(self, laid: Sequence[Group], is_due: Callable[[Owner], bool]) -> None:
        """Make the states of what has its first gradient."""
        for each in laid:
            fresh = [p for p in each.waiting if is_due(owner_of(p)) and p.grad is not None]
            if fresh:
                each.stretches += self._stretches(fresh, each.keys)
                made = set(map(id, fresh))
                each.waiting = [p for p in each.waiting if id(p) not in made]

    def _work(self, laid: Group, is_due: Callable[[Owner], bool]) -> Work:
        work: Work = []
        for stretch in laid.stretches:
            if is_due((stretch.ledger, stretch.bucket)):
                work += stretch.runs([p.grad for p in stretch.params])
        if work and self.counts_steps:
            foreach_add_([run.steps for run, _ in work], 1)
        return work

    def _layout(self, number: int) -> Group:
        """Return the layout of a group, made again if parameters or states have changed.

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
        laid = Group(list(params), keys, self._stretches(has_state, keys), waiting)
        self._laid[number] = laid
        return laid

    def _is_current(self, laid: Group, params: list[Tensor], keys: tuple[str, ...]) -> bool:
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
