"""Neighbouring parameters and their states as flat tensors."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.compat.tensors import local_tensor
from zerofx.errors import OptimizerError
from zerofx.optim.places import Place, flat_from, local_of, name_of, shown
from zerofx.optim.runs import Run, joined, split_by_steps, strided
from zerofx.runtime.param_tensor import ShardedTensor, local_value
from zerofx.runtime.tiers import Tier


class Stretch:
    """Parameters of one group between which lies nothing but padding, with one flat tensor a state.

    Padding is zero in parameters, gradients and states, and every update keeps it so. States that
    are made new are zero, as are their step counts, which lie on the host: kernels take the count
    as a number.
    """

    owner: Any = None  # a weak reference to the optimizer whose it is

    def __init__(self, params: Sequence[Tensor], places: Sequence[Place]) -> None:
        self.params = tuple(params)
        self.ledger, self.bucket = places[0].ledger, places[0].bucket
        self._offset = start = places[0].offset
        self._bounds = tuple(
            (p.offset - start, p.end - start) if p.length else (0, 0) for p in places
        )
        self.numel = self._bounds[-1][1]
        # what carries the memory: a local tensor, or the parameter itself
        self._carriers = [local_tensor(p) if isinstance(p, ShardedTensor) else p for p in params]
        self._pointers = self._read_pointers()
        self.flat = flat_from(local_of(params[0]), self.numel)
        self.states: dict[str, Tensor] = {}
        self.steps = torch.zeros(0)
        self.is_first = True
        # of each parameter: its states, as `state` and as a dict holds them, and what is in there
        self._held: list[tuple[Tensor, Any, dict[str, Any], list[tuple[str, Any]]]] = []
        self._pattern: tuple[tuple[int, int], ...] = ()
        self._runs: list[Run] | None = None

    def _read_pointers(self) -> list[int]:
        return [t.data_ptr() for t in self._carriers]

    # -- states -------------------------------------------------------------------------------
    def adopt(
        self,
        state: MutableMapping[Tensor, Any],
        keys: Sequence[str],
        counts: bool,
    ) -> None:
        """Lay out the states `keys` and the step counts, with what `state` has of them.

        What `state[param]` then holds of them are views of the flat tensors; values of other keys
        are left alone.
        """
        old = [state.get(p) or {} for p in self.params]
        self.is_first = not any(d.get(key) is not None for d in old for key in keys)
        if not keys and not counts:
            return
        if counts:
            counted = [d.get("step") for d in old]
            self.steps = torch.tensor([0.0 if c is None else float(c) for c in counted])
        new = self._adopt_states(old, keys)
        for number, (param, values) in enumerate(zip(self.params, new, strict=True)):
            if counts:
                values["step"] = self.steps[number]
            state[param] = values
            held: Any = getattr(values, "held", values)
            names = (*keys, "step") if counts else keys
            self._held.append((param, values, held, [(name, held[name]) for name in names]))

    def _adopt_states(
        self, old: Sequence[MutableMapping[str, Any]], keys: Sequence[str]
    ) -> Sequence[MutableMapping[str, Any]]:
        """Return each parameter's states, with `keys` laid out; made where there were none."""
        kept = {key for key in keys if self._lies_there(key, old)}
        others = [key for key in keys if key not in kept]
        new = [self._detached(values, others) for values in old]
        self.states = {key: self._zeros(key, key in kept) for key in keys}
        for number, (param, values) in enumerate(zip(self.params, new, strict=True)):
            start, stop = self._bounds[number]
            for key, flat in self.states.items():
                view = shown(flat[start:stop], param)
                if key not in kept and values.get(key) is not None:
                    fill(view, values[key], param, key)
                values[key] = view
        if self.ledger is not None:
            self.ledger.homes.rest()  # looking at states on NVMe has taken memory
        return new

    def _lies_there(self, key: str, old: Sequence[Mapping[str, Any]]) -> bool:
        """Say whether a state of all parameters is already where it lives on NVMe."""
        if self.ledger is None or self.bucket is None or self.bucket.home is not Tier.NVME:
            return False
        start = self.ledger.homes.state_at(key, self.bucket, self._offset)
        for held, (first, last) in zip(old, self._bounds, strict=True):
            if start is None or not isinstance(held.get(key), Tensor):
                return False
            value = local_of(held[key])
            is_alike = value.dtype == self.flat.dtype and value.is_contiguous()
            if not is_alike or value.numel() != last - first:
                return False
            if last > first and value.data_ptr() != start + first * value.itemsize:
                return False
        return True

    def _zeros(self, key: str, keeps: bool) -> Tensor:
        """Return zeros like the parameters for a state, where their bucket lives.

        keeps: its place there is filled already, and stays as it is.
        """
        ledger, bucket = self.ledger, self.bucket
        if ledger is None or bucket is None or not bucket.is_away:
            return torch.zeros_like(self.flat)
        return ledger.homes.state(key, bucket, self.numel, self._offset, self.owner, keeps)

    def _detached(self, values: MutableMapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        """Return a parameter's states, off the place on NVMe that new ones are about to get."""
        found = dict(values)
        if self.bucket is not None and self.bucket.home is Tier.NVME:
            found |= {k: found[k].clone() for k in keys if found.get(k) is not None}
        return found

    def _states_of(self, first: int, last: int) -> dict[str, Any]:
        """Return the flat states of the parameters first:last."""
        start, stop = self._bounds[first][0], self._bounds[last - 1][1]
        return {key: flat[start:stop] for key, flat in self.states.items()}

    @property
    def state_bytes(self) -> int:
        """Bytes of the states on this rank, without step counts."""
        return sum(flat.nbytes for flat in self.states.values())

    def is_intact(self, state: Mapping[Tensor, Any]) -> bool:
        """Whether parameters and states still are what was laid out."""
        return self._read_pointers() == self._pointers and all(
            state.get(param) is values and all(held.get(k) is v for k, v in known)
            for param, values, held, known in self._held
        )

    # -- a step -------------------------------------------------------------------------------
    def runs(self, grads: Sequence[Tensor | None]) -> list[tuple[Run, Tensor]]:
        """Return what is to be stepped, each run with its flat gradient; counts the step.

        A run ends where a parameter has no gradient, where the gradients do not lie like the
        parameters, and where the step counts differ.
        """
        locals_ = [
            None if g is None else strided(local_of(g), p)
            for g, p in zip(grads, self.params, strict=True)
        ]
        pattern = tuple(joined(locals_, self._pointers, self._bounds))
        if self._runs is None or pattern != self._pattern:
            self._runs = [self._run(i, j) for i, j in split_by_steps(pattern, self.steps)]
            self._pattern = pattern
        found = self._runs
        if self.is_first:  # those that are made for this step know it; the next are new
            self.is_first, self._runs = False, None
        return [(run, self._flat_grad(locals_[run.first], run)) for run in found]

    def _run(self, first: int, last: int) -> Run:
        start, stop = self._bounds[first][0], self._bounds[last - 1][1]
        return Run(
            first,
            last,
            self.params[first:last],
            tuple((a - start, b - start) for a, b in self._bounds[first:last]),
            self.flat[start:stop],
            self._states_of(first, last),
            self.steps[first:last],
            self.is_first,
            self.ledger,
            self.bucket,
            self._offset + start,
        )

    def _flat_grad(self, first: Tensor | None, run: Run) -> Tensor:
        assert first is not None
        if run.last - run.first == 1:
            return first.reshape(-1)
        return flat_from(first, run.numel)


def fill(view: Tensor, value: Tensor, param: Tensor, key: str) -> None:
    """Copy a state that was loaded, cut like the parameter or whole, into its place.

    Raises:
        ShardError, OptimizerError: it has another shape; names the parameter and both shapes.
    """
    if isinstance(view, ShardedTensor):
        local_tensor(view).copy_(local_value(view, value, f"the state {key!r}"))
        return
    if value.shape != view.shape:
        raise OptimizerError(
            f"{name_of(param)}: the loaded state {key!r} has shape {list(value.shape)}, the "
            f"parameter {list(view.shape)}"
        )
    view.copy_(value)
