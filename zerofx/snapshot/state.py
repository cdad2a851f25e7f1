"""The saved state of a model and its optimizer, by name, and the tensors that a load fills.

Parameters, and optimizer states of a parameter's shape, have that shape in a snapshot, and each
rank writes boxes of it. How they were sharded is not saved, so that any world size and stage, and
FSDP2, can load them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from zerofx.capture.original import SLOT
from zerofx.compat.modules import own_buffers, unsaved_buffers
from zerofx.errors import SnapshotError
from zerofx.layout.tiers import Tier
from zerofx.runtime.store.optimizer import STEP_STATES
from zerofx.runtime.store.shards import ShardStore
from zerofx.runtime.store.updates import BucketOptimizer
from zerofx.runtime.store.whole_updates import needs_whole
from zerofx.runtime.tensors.checkpoint import FlatPiece
from zerofx.runtime.tensors.piece import ParameterPiece, is_cut
from zerofx.snapshot import whole_states

_SHOWN = 6  # names per error


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the model's state; shared ones have their first name.

    Parameters that the plan ignores are plain tensors, and come first.
    """
    own = model.__dict__.get(SLOT)
    ignored = own.engine.store.ignored if own is not None else ()
    found: dict[int, tuple[str, Tensor]] = {
        id(param): (name, param) for name, param in model.named_parameters() if name in ignored
    }
    for path, module in model.named_modules():
        for key, buffer in own_buffers(module).items():
            if buffer is not None and key not in unsaved_buffers(module):
                found.setdefault(id(buffer), (f"{path}.{key}" if path else key, buffer))
    return dict(found.values())


def extra_states_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that define extra state (`get_extra_state`)."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield path, module


def describe(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what a save and a model must share, as text: {"fc.weight": "float32 [64, 16]"}."""
    return {
        name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
        for name, t in tensors.items()
    }


def check_same_model(kind: str, saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Check that both descriptions have the same names, shapes and dtypes.

    Raises:
        SnapshotError: lists the differences.
    """
    differences = [
        *(f"{name} is only in the save" for name in saved.keys() - here.keys()),
        *(f"{name} is only in the model" for name in here.keys() - saved.keys()),
        *(
            f"{name} is {saved[name]} in the save and {here[name]} in the model"
            for name in saved.keys() & here.keys()
            if saved[name] != here[name]
        ),
    ]
    if differences:
        raise SnapshotError(f"the save is of another model: {kind} {few(sorted(differences))}.")


def few(texts: list[str]) -> str:
    rest = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + rest


# -- the generators -------------------------------------------------------------------------------
def one_row(states: Mapping[str, Tensor], row: int, rows: int) -> dict[str, FlatPiece]:
    """Return each 1-D state as row `row` of a table with one row per rank."""
    return {
        key: FlatPiece.of(state, ((row * n, (row + 1) * n),), rows * n)
        for key, state in states.items()
        for n in [state.numel()]
    }


# -- the optimizer --------------------------------------------------------------------------------
def group_names(store: ShardStore, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group.

    Raises:
        SnapshotError: the optimizer has a parameter that is not the model's.
    """
    names = {id(p): name for name, p in store.params.items()}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise SnapshotError(
                    f"group {number} of {type(optimizer).__name__} has a parameter of shape "
                    f"{list(param.shape)} that is not the model's. Build the optimizer over "
                    "model.parameters() after zerofx.compile, and another one for other "
                    "parameters. Or, if one optimizer trains several models, put these into one "
                    "module before zerofx.compile, call them as both.gen(z) and both.disc(x), and "
                    "save that: torch.nn.ModuleDict(dict(gen=..., disc=...)) is one."
                )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def optimizer_tensors(store: ShardStore, optimizer: Optimizer) -> dict[str, Any]:
    """Return {parameter: {state: this rank's shard}} for all states of a parameter's shape.

    For an optimizer that steps whole parameters, return {parameter: {number: tensor}} of the states
    that this rank owns.
    """
    if needs_whole(optimizer):
        return whole_states.numbered(whole_states.states_here(store, optimizer))
    return {
        name: shards
        for name, param in _stepped(optimizer, group_names(store, optimizer))
        if (
            shards := {
                key: value.detach()
                for key, value in optimizer.state[param].items()
                if _is_elementwise(param, key, value)
            }
        )
    }


def optimizer_values(optimizer: Optimizer, names: list[list[str]]) -> dict[str, Any]:
    """Return everything else: groups by parameter name with options, step counts, other states.

    Raises:
        SnapshotError: a state is a tensor that has neither its parameter's shape nor one element.
    """
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": members}
        for group, members in zip(optimizer.param_groups, names, strict=True)
    ]
    pieces: dict[str, list[str]] = {}
    others: dict[str, dict[str, Any]] = {}
    for name, param in _stepped(optimizer, names):
        for key, value in optimizer.state[param].items():
            if _is_elementwise(param, key, value):
                pieces.setdefault(name, []).append(key)
                continue
            if isinstance(value, Tensor) and value.numel() != 1:
                raise SnapshotError(
                    f"{name}: state {key!r} of {type(optimizer).__name__} has shape "
                    f"{list(value.shape)}, but the parameter has {list(param.shape)}. Only states "
                    "of the parameter's shape and single numbers can be sharded again. Give "
                    "zerofx.optim.whole_matrices(optimizer), whose states are saved whole."
                )
            others.setdefault(name, {})[key] = value
    return {"type": type(optimizer).__name__, "groups": groups, "pieces": pieces, "others": others}


def whole_values(
    optimizer: Optimizer, names: list[list[str]], surveys: Sequence[Survey]
) -> dict[str, Any]:
    """Return the same for a whole-parameter optimizer, from the surveys of all ranks."""
    groups = []
    for number, (group, members) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        options = {k: v for k, v in group.items() if k != "params"}
        for survey in reversed(surveys):
            options |= survey.options[number]
        groups.append({**options, "params": members})
    whole = {name: states for survey in surveys for name, states in survey.states.items()}
    kind = type(optimizer).__name__
    return {"type": kind, "groups": groups, "pieces": {}, "others": {}, "whole": whole}


@dataclass(frozen=True)
class Survey:
    """The part of a whole-parameter optimizer that a rank holds.

    states: nested states by parameter, with numbers in place of tensors. options: for each group,
        those that steps on this rank have written.
    """

    states: dict[str, Any]
    options: list[dict[str, Any]]

    @classmethod
    def of(cls, store: ShardStore, optimizer: Optimizer) -> Survey:
        """Return what this rank has to save, without the tensors."""
        states = whole_states.states_here(store, optimizer)
        described = {name: whole_states.taken_apart(held)[0] for name, held in states.items()}
        return cls(described, whole_states.options_here(optimizer))


def _stepped(optimizer: Optimizer, names: list[list[str]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters for which the optimizer has states."""
    for group, members in zip(optimizer.param_groups, names, strict=True):
        for name, param in zip(members, group["params"], strict=True):
            if optimizer.state.get(param):
                yield name, param


def _is_elementwise(param: Tensor, key: str, value: Any) -> bool:
    if not isinstance(value, Tensor) or value.shape != param.shape:
        return False
    return value.ndim > 0 or key not in STEP_STATES


def check_same_groups(
    optimizer: Optimizer, names: list[list[str]], saved: Mapping[str, Any]
) -> None:
    """Check that the saved optimizer has this type, and the same parameters in each group.

    Raises:
        SnapshotError: names both types, or the parameters that differ.
    """
    kind = type(optimizer).__name__
    if saved["type"] != kind:
        raise SnapshotError(f"the save has the state of {saved['type']}, but {kind} was given.")
    groups = saved["groups"]
    if len(groups) != len(names):
        raise SnapshotError(f"{kind} has {len(names)} groups, but the save has {len(groups)}.")
    for number, (mine, group) in enumerate(zip(names, groups, strict=True)):
        only = sorted(set(mine) ^ set(group["params"]))
        if only:
            raise SnapshotError(
                f"group {number} of {kind} has other parameters than in the save: {few(only)}."
            )


def make_far_states(store: ShardStore, optimizer: Optimizer, names: Iterable[str]) -> None:
    """Create the states of parameters on NVMe there, so that a load fills them in place."""
    if isinstance(optimizer, BucketOptimizer) and store.homes.nvme is not None:
        far = [n for n in names if store.pieces[n].bucket.home is Tier.NVME]
        optimizer.make_states([store.params[n] for n in far])


def optimizer_targets(
    store: ShardStore,
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    for_plan: bool = False,
) -> dict[str, dict[str, Tensor]]:
    """Return a tensor to load each saved state into: the current one if it fits, or a new one.

    for_plan: new tensors have a shape but no memory.
    """
    if needs_whole(optimizer):
        return whole_states.targets(store, optimizer, {"whole": {}, **saved}, for_plan)
    params = store.params
    found: dict[str, dict[str, Tensor]] = {}
    pieces: Mapping[str, Iterable[str]] = saved["pieces"]
    for name, keys in pieces.items():
        param = params[name]
        states = optimizer.state.get(param) or {}
        found[name] = {
            key: states[key]
            if _fits(states.get(key), param)
            else _like(param, store.pieces[name], for_plan)
            for key in keys
        }
    return found


def shards_of(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return {parameter: {state: this rank's shard}}, sharing memory with the states."""
    return {
        name: {key: value.detach() for key, value in held.items()} for name, held in states.items()
    }


def _fits(state: Any, param: nn.Parameter) -> bool:
    """Return whether a state can be filled in place: it is dense and sharded as the parameter."""
    if not isinstance(state, Tensor) or is_cut(state) != is_cut(param):
        return False
    if is_cut(state):
        return state.dtype == param.dtype
    same = (state.shape, state.dtype, state.device) == (param.shape, param.dtype, param.device)
    return same and state.is_contiguous()


def _like(param: nn.Parameter, piece: ParameterPiece, for_plan: bool) -> Tensor:
    local = piece.local(param)
    zeros = torch.zeros(() if for_plan else local.shape, dtype=param.dtype, device=param.device)
    return piece.show(zeros.expand(local.shape))


def load_optimizer(
    store: ShardStore,
    optimizer: Optimizer,
    names: list[list[str]],
    saved: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Give the optimizer its loaded states and options through its own `load_state_dict`."""
    order = [name for group in names for name in group]
    if needs_whole(optimizer):
        tensors = whole_states.loaded(store, optimizer, {"whole": {}, **saved}, tensors)
    state = {
        position: {**tensors.get(name, {}), **saved["others"].get(name, {})}
        for position, name in enumerate(order)
        if name in tensors
        or (name in saved["others"] and whole_states.is_owned(optimizer, store.params[name]))
    }
    groups, start = [], 0
    for group, members in zip(saved["groups"], names, strict=True):
        positions = list(range(start, start + len(members)))
        groups.append({**group, "params": positions})
        start += len(members)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
