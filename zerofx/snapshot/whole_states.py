"""States of optimizers that step whole parameters: tensors of any shape, in nested containers.

In a snapshot, each tensor is one entry, and the containers are kept with numbers in place of their
tensors. In this way, Shampoo's preconditioners or SOAP's lists of bases are saved by their owner
and can be loaded by another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from zerofx.errors import SnapshotError
from zerofx.runtime.store.shards import ShardStore
from zerofx.runtime.store.whole_updates import needs_whole, updates_of

_NUMBER = "zerofx.tensor"  # the key that marks a tensor's place: {this: number, shape, dtype}


def settle(optimizer: Optimizer) -> None:
    """Bring all states to their owners; a collective call."""
    updates = updates_of(optimizer)
    if updates is not None:
        updates.settle(optimizer)


def states_here(store: ShardStore, optimizer: Optimizer) -> dict[str, Any]:
    """Return the states that this rank has to save, by parameter."""
    world = store.world
    is_sharded = updates_of(optimizer) is not None
    if world.replicate_rank if is_sharded else world.rank:
        return {}  # another rank saves the same states
    position = store.layout.position
    return {
        name: dict(optimizer.state[param])
        for name, param in store.params.items()
        if optimizer.state.get(param)
        # the first pipeline stage that holds a parameter saves its states
        and not (is_sharded and store.pieces[name].bucket.positions[0] != position)
    }


def options_here(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group that steps on this rank have written."""
    updates = updates_of(optimizer)
    if updates is None:
        return [{} for _ in optimizer.param_groups]
    return updates.options_of_groups(optimizer)


def is_owned(optimizer: Optimizer, param: Tensor) -> bool:
    """Return whether this rank keeps the states of a parameter."""
    updates = updates_of(optimizer)
    return updates is None or updates.owns(optimizer, param)


def taken_apart(states: Any) -> tuple[Any, list[Tensor]]:
    """Return nested states with numbers in place of tensors, and the list of tensors."""
    found: list[Tensor] = []

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach()
            if not value.ndim:
                return value.cpu()
            found.append(value)
            dtype = str(value.dtype).removeprefix("torch.")
            return {_NUMBER: len(found) - 1, "shape": [*value.shape], "dtype": dtype}
        return _over_parts(value, take)

    return take(states), found


def put_together(states: Any, tensor: Callable[[int, list[int], torch.dtype], Any]) -> Any:
    """Return nested states with `tensor(number, shape, dtype)` in place of each number."""

    def put(value: Any) -> Any:
        if isinstance(value, dict) and _NUMBER in value:
            dtype = getattr(torch, value["dtype"])
            return tensor(value[_NUMBER], value["shape"], dtype)
        return _over_parts(value, put)

    return put(states)


def _over_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(part) for part in value)
    return value


def numbered(states: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return {parameter: {number: tensor}} for states by parameter."""
    found = {name: taken_apart(held)[1] for name, held in states.items()}
    return {
        name: {str(number): tensor for number, tensor in enumerate(tensors)}
        for name, tensors in found.items()
        if tensors
    }


def targets(
    store: ShardStore, optimizer: Optimizer, saved: Mapping[str, Any], for_plan: bool
) -> dict[str, dict[str, Tensor]]:
    """Return {parameter: {number: tensor to load into}} for the states that belong to this rank.

    for_plan: the tensors have a shape but no memory.
    """
    found: dict[str, dict[str, Tensor]] = {
        name: {
            str(number): _empty(shape, dtype, param.device, for_plan)
            for number, shape, dtype in _listed(saved["whole"][name])
        }
        for name, param in _here(store, optimizer, saved["whole"])
    }
    for name, param in _here(store, optimizer, saved["pieces"]):
        found[name] = {
            key: _empty([*param.shape], param.dtype, param.device, for_plan)
            for key in saved["pieces"][name]
        }
    return {name: tensors for name, tensors in found.items() if tensors}


def _listed(states: Any) -> list[tuple[int, list[int], torch.dtype]]:
    """Return (number, shape, dtype) of the tensors in nested states."""
    found: list[tuple[int, list[int], torch.dtype]] = []
    put_together(states, lambda *described: found.append(described))
    return found


def _empty(shape: list[int], dtype: torch.dtype, device: torch.device, for_plan: bool) -> Tensor:
    return torch.zeros(() if for_plan else shape, dtype=dtype, device=device).expand(shape)


def loaded(
    store: ShardStore,
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    filled: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, dict[str, Any]]:
    """Return the states that belong to this rank, by parameter, built from the filled tensors."""
    found = {
        name: put_together(saved["whole"][name], lambda number, *_, n=name: filled[n][str(number)])
        for name, _ in _here(store, optimizer, saved["whole"])
    }
    for name, _ in _here(store, optimizer, saved["pieces"]):
        found[name] = dict(filled.get(name, {}))
    return found


def _here(
    store: ShardStore, optimizer: Optimizer, names: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    params = [(name, store.params[name]) for name in names]
    return [(name, param) for name, param in params if is_owned(optimizer, param)]


def check_kept_whole(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Check that the optimizer accepts whole states if such were saved.

    Raises:
        SnapshotError: names the optimizer and the fix.
    """
    if saved.get("whole") and not needs_whole(optimizer):
        kind = type(optimizer).__name__
        raise SnapshotError(
            f"the save has whole states of {kind}, but the optimizer that was given steps shards. "
            f"Give zerofx.optim.whole_matrices({kind}(...))."
        )
