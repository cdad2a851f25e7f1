"""The full state of an optimizer in the form of plain PyTorch, gathered to one rank or to all.

state = zerofx.full_optimizer_state_dict(model, optimizer)  # every rank calls; rank 0 has it
if rank == 0:
    torch.save(state, "optimizer.pt")  # loads into torch's optimizer of the plain model
zerofx.load_full_optimizer_state_dict(model, optimizer, state)  # and back, at any world size
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from zerofx.comm.together import exchange, tell
from zerofx.comm.world import World
from zerofx.errors import ArgumentError, SnapshotError
from zerofx.model.module import CompiledModule
from zerofx.runtime.store.optimizer import check_optimizer
from zerofx.runtime.store.shards import ShardStore
from zerofx.runtime.store.whole_updates import WholeUpdates, updates_of
from zerofx.runtime.tensors.piece import is_cut, piece_of
from zerofx.snapshot.whole_states import put_together, taken_apart


def full_optimizer_state_dict(
    model: CompiledModule, optimizer: Optimizer, rank0_only: bool = True
) -> dict[str, Any]:
    """Return the result of `optimizer.state_dict()` for the uncompiled model, on the host.

    A collective call: every rank must make it. States are gathered one tensor at a time. With
    `rank0_only`, all other ranks get an empty dict. Parameters are numbered as in `param_groups`,
    so plain torch can load the result into an optimizer built in the same way over the uncompiled
    model.

    Raises:
        ArgumentError: the arguments are not a compiled model and an optimizer.
        ShardError: the optimizer cannot step this model.
        DesyncError: a rank did not make this call; names it.

    Example:
        state = zerofx.full_optimizer_state_dict(model, optimizer)  # on all ranks
        if rank == 0:
            torch.save(state, "optimizer.pt")
    """
    store = _checked("full_optimizer_state_dict(model, optimizer)", model, optimizer)
    world = store.world
    keeps = not rank0_only or world.rank == 0
    world.agree("zerofx.full_optimizer_state_dict", f"optimizer={type(optimizer).__name__}")
    updates = updates_of(optimizer)
    if updates is not None:
        found = _of_owners(store, optimizer, updates, keeps)
    else:
        found = _of_shards(store, optimizer, keeps)
    return found if keeps else {}


def load_full_optimizer_state_dict(
    model: CompiledModule, optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load a result of `full_optimizer_state_dict` or of plain torch's `optimizer.state_dict()`.

    A collective call. Rank 0's `state_dict` is loaded; those of the other ranks are ignored and may
    be empty dicts. Tensors are sent one at a time, and each rank keeps the part that it owns.

    Raises:
        ArgumentError: the arguments are not a compiled model and an optimizer.
        SnapshotError: the state dict does not fit the optimizer's parameters; nothing is loaded.
        DesyncError: a rank did not make this call; names it.

    Example:
        state = zerofx.full_optimizer_state_dict(model, optimizer)  # or one of plain PyTorch
        zerofx.load_full_optimizer_state_dict(model, optimizer, state)  # on all ranks
    """
    store = _checked("load_full_optimizer_state_dict(model, optimizer, state)", model, optimizer)
    world, kind = store.world, type(optimizer).__name__
    what = "zerofx.load_full_optimizer_state_dict"
    world.agree(what, f"optimizer={kind}")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    apart: tuple[Any, list[Tensor]] = ({}, [])
    problem = None
    if world.rank == 0:
        problem = _misfit(optimizer, state_dict)
        if problem is None:
            apart = taken_apart(dict(state_dict))
    tell(world, what, problem, SnapshotError)
    described: Any = exchange(world, apart[0], what)[0]
    numbers = [n for group in described["param_groups"] for n in group["params"]]
    owner_of = dict(zip(numbers, params, strict=True))
    updates = updates_of(optimizer)

    def receive(param: Any, index: int, shape: list[int], dtype: torch.dtype) -> Tensor | None:
        mine = apart[1][index] if world.rank == 0 else None
        return _kept(optimizer, updates, param, _sent(world, mine, 0, shape, dtype))

    state = {}
    for number, states in described.pop("state").items():
        param = owner_of.get(number)
        held = put_together(states, partial(receive, param))
        if updates is None or param is None or updates.owns(optimizer, param):
            state[number] = held
    others = put_together(described, partial(receive, None))
    optimizer.load_state_dict({**others, "state": state})


def _checked(call: str, model: Any, optimizer: Any) -> ShardStore:
    """Check the arguments, and return the model's store once no update is in flight.

    Raises:
        ArgumentError: the arguments are not a compiled model and an optimizer.
        ShardError: the optimizer cannot step this model.
    """
    if not isinstance(model, CompiledModule):
        raise ArgumentError(
            f"model is of type {type(model).__name__}, not a model that zerofx.compile returned. "
            f"Call zerofx.{call} with the compiled model, or take optimizer.state_dict()."
        )
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"optimizer is of type {type(optimizer).__name__}, not an optimizer. Call "
            f"zerofx.{call}, once for each optimizer."
        )
    store = model._zerofx.engine.store
    store.settle()
    check_optimizer(optimizer)
    return store


# -- gathering ------------------------------------------------------------------------------------
def _of_shards(store: ShardStore, optimizer: Optimizer, keeps: bool) -> dict[str, Any]:
    """Return the state dict with every sharded state gathered."""

    def whole(value: Any) -> Any:
        if isinstance(value, Tensor):
            piece = piece_of(value)
            if piece is not None and piece.is_cut:
                local = store.homes.fetch(piece.local(value))
                value = piece.whole(local, "full_optimizer_state_dict")
                store.homes.rest()
            return value.detach().to("cpu", copy=True) if keeps else None
        if isinstance(value, Mapping):
            return {key: whole(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(whole(part) for part in value)
        return value

    found = optimizer.state_dict()
    numbers = [n for group in found["param_groups"] for n in group["params"]]
    state = {n: whole(found["state"][n]) for n in numbers if n in found["state"]}
    return {**found, "state": state}


def _of_owners(
    store: ShardStore, optimizer: Optimizer, updates: WholeUpdates, keeps: bool
) -> dict[str, Any]:
    """Return the state dict with the states of every owner."""
    world = store.world
    updates.settle(optimizer)
    found = optimizer.state_dict()
    owned = {
        number: taken_apart(dict(optimizer.state[param]))
        for number, param in _numbered(optimizer)
        if optimizer.state.get(param) and (world.replicate_rank == 0 or not is_cut(param))
    }
    mine = {number: states for number, (states, _) in owned.items()}
    options_here = updates.options_of_groups(optimizer)
    surveys = exchange(world, (mine, options_here), "full_optimizer_state_dict")
    state: dict[int, Any] = {}
    for number, param in _numbered(optimizer):
        holders = [rank for rank, (held, _) in enumerate(surveys) if number in held]
        if holders:
            source = holders[0] if is_cut(param) else world.rank
            tensors = owned[number][1] if source == world.rank else []
            gather = partial(_gathered, world, tensors, source, is_cut(param), keeps)
            state[number] = put_together(surveys[source][0][number], gather)
    groups = [dict(group) for group in found["param_groups"]]
    for _, options in reversed(surveys):
        for group, written in zip(groups, options, strict=True):
            group |= written
    return {**found, "param_groups": groups, "state": state}


def _numbered(optimizer: Optimizer) -> Iterator[tuple[int, Tensor]]:
    """Yield each parameter with the number that `state_dict()` gives it."""
    yield from enumerate(p for group in optimizer.param_groups for p in group["params"])


def _gathered(
    world: World,
    tensors: list[Tensor],
    source: int,
    travels: bool,
    keeps: bool,
    index: int,
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor | None:
    """Return tensor `index` of rank `source` on the host; None if this rank does not keep it."""
    mine = tensors[index] if tensors else None
    whole = _sent(world, mine, source, shape, dtype) if travels else mine
    return whole.to("cpu", copy=True) if keeps and whole is not None else None


def _sent(
    world: World, mine: Tensor | None, source: int, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """Return rank `source`'s tensor on every rank; a collective call."""
    if mine is None or world.rank != source:
        whole = torch.empty(shape, dtype=dtype, device=world.device)
    else:
        whole = mine.to(world.device).contiguous()
    world.broadcast(whole, source, "states of an optimizer").wait()
    return whole


# -- loading --------------------------------------------------------------------------------------
def _misfit(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> SnapshotError | None:
    """Return the error for a state dict that does not fit the optimizer's parameters."""
    kind = type(optimizer).__name__
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        return SnapshotError(
            f"the state of {kind} on rank 0 is a {type(state_dict).__name__} without 'state' and "
            "'param_groups'. Give the result of full_optimizer_state_dict or "
            "optimizer.state_dict()."
        )
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    here = [len(group["params"]) for group in groups]
    there = [len(group["params"]) for group in saved]
    if here != there:
        return SnapshotError(
            f"{kind} has groups of {here} parameters, but the state dict has groups of {there}. "
            "Build the optimizer as it was built when the state was saved."
        )
    if updates_of(optimizer) is not None:
        return None
    params = [p for group in groups for p in group["params"]]
    numbers = [n for group in saved for n in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            is_whole = isinstance(value, Tensor) and value.ndim > 0
            if is_cut(param) and is_whole and value.shape != param.shape:
                piece = piece_of(param)
                assert piece is not None
                return SnapshotError(
                    f"{piece.name}: state {key!r} has shape {list(value.shape)}, but the parameter "
                    f"has {list(param.shape)}. Only states of the parameter's shape can be sharded."
                )
    return None


def _kept(
    optimizer: Optimizer, updates: WholeUpdates | None, param: Any, whole: Tensor
) -> Tensor | None:
    """Return the part of a state that this rank keeps: its piece, the whole, or None."""
    if param is None or not is_cut(param):
        return whole
    if updates is not None:
        return whole if updates.owns(optimizer, param) else None
    piece = piece_of(param)
    assert piece is not None
    return piece.show(piece.cut(whole.reshape(-1)).to(param.device, copy=True))
