"""Optimizers over shards: which ones are accepted, and the swap of parameters in a built one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zerofx.errors import ShardError
from zerofx.layout.buckets import Layout
from zerofx.layout.tiers import Tier
from zerofx.runtime.store import updates, whole_updates
from zerofx.runtime.tensors.piece import Ledger, is_cut, piece_of
from zerofx.runtime.tensors.refuse import ACCEPTED_OPTIMIZERS
from zerofx.runtime.tensors.tensor import whole_of

# 0-d states of torch's optimizers that describe the step, not elements of the parameter.
STEP_STATES = ("step", "mu_product", "eta", "mu")

REFUSED = {
    "LBFGS": "it keeps flat vectors of all parameters and needs a closure",
    "SparseAdam": "gradients of shards are dense",
}


def list_of(optimizer: Any) -> list[Any]:
    """Return the optimizers passed to a call: none, one, or several in a list or tuple."""
    if isinstance(optimizer, (list, tuple)):
        return list(optimizer)
    return [] if optimizer is None else [optimizer]


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise unless the optimizer may step sharded parameters, by its type and options.

    Optimizers outside torch are accepted; an operation that does not work on pieces raises when it
    is called.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(map(is_cut, params)):
        check_type(optimizer)


def check_before(optimizer: Optimizer, layout: Layout, in_backward: bool) -> None:
    """Raise, before a model is changed, unless a built optimizer may be moved to its shards."""
    if layout.is_cut:
        check_type(optimizer)
    if in_backward:
        updates.check_optimizer(optimizer)
    far = [b for b in layout.buckets if b.home is Tier.NVME and b.trainable]
    if far and not isinstance(optimizer, updates.BucketOptimizer):
        raise _not_staged(optimizer, far[0].names[0])


def _not_staged(optimizer: Optimizer, name: str) -> ShardError:
    kind = type(optimizer).__name__
    return ShardError(
        f"{name} lives on NVMe, and {kind} would keep its states in memory and write the parameter "
        "outside the schedule. Use zerofx.optim (AdamW, Adam, SGD, Lion, Lamb), which stores its "
        "states on NVMe and updates bucket by bucket, or Plan(offload={'optimizer': 'cpu'})."
    )


def check_type(optimizer: Optimizer) -> None:
    """Raise unless an optimizer of this type and these options may step shards."""
    known = _torch_bases(optimizer)
    reason = next((REFUSED[name] for name in known if name in REFUSED), None)
    if reason is None and any(g.get("differentiable") for g in optimizer.param_groups):
        reason = "differentiable=True records whole parameters for autograd"
    if reason is not None:
        raise ShardError(
            f"{type(optimizer).__name__} is not supported on sharded parameters: {reason}. Use one "
            f"of {ACCEPTED_OPTIMIZERS}, or Plan(stage=0)."
        )


def _torch_bases(optimizer: Optimizer) -> list[str]:
    """Return the names of the torch.optim classes that an optimizer is or derives from."""
    return [c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim")]


def swap_optimizer(optimizer: Optimizer, replaced: Mapping[int, nn.Parameter]) -> None:
    """Replace the parameters of a built optimizer; keep its groups, options and step counts.

    `replaced` maps id(old parameter) to the new one. State of the parameter's shape is cut like it;
    parameters that are not in `replaced` stay.

    Raises:
        ShardError: the optimizer is refused, or holds state that cannot be cut; it is unchanged.
    """
    swaps = [
        (old, replaced[id(old)])
        for group in optimizer.param_groups
        for old in group["params"]
        if id(old) in replaced
    ]
    if any(is_cut(new) for _, new in swaps):
        check_type(optimizer)
    check_optimizer(optimizer)  # the optimizer may have been built over sharded parameters
    is_whole = whole_updates.needs_whole(optimizer)
    states: dict[Tensor, Any] = {
        new: optimizer.state[old]
        if is_whole
        else {k: _cut_state(new, k, v) for k, v in optimizer.state[old].items()}
        for old, new in swaps
        if old in optimizer.state
    }
    for group in optimizer.param_groups:
        # In place, because some optimizers keep this very list.
        group["params"][:] = [replaced.get(id(p), p) for p in group["params"]]
    for old, _ in swaps:
        optimizer.state.pop(old, None)
    optimizer.state.update(states)
    _checked.pop(optimizer, None)
    whole = whole_updates.updates_of(optimizer)
    if whole is not None:
        whole.settle(optimizer)
    if isinstance(optimizer, updates.BucketOptimizer):
        optimizer.update_in_backward()


def _cut_state(param: Tensor, key: str, value: Any) -> Any:
    """Return the part of one state value that belongs to the parameter's piece."""
    piece = piece_of(param)
    if not isinstance(value, Tensor) or piece is None or not piece.is_cut:
        return value
    if value.shape != param.shape:
        if value.ndim == 0:
            return value
        raise ShardError(
            f"{piece.name}: the optimizer's state {key!r} has shape {list(value.shape)}, but the "
            f"parameter has {list(param.shape)}. Give zerofx.compile an optimizer without state."
        )
    is_count = key == "step" or (value.ndim == 0 and key in STEP_STATES)
    if is_count or is_cut(value):
        return value
    full = value.detach()
    if isinstance(full, DTensor):
        full = whole_of(full, piece, f"loading the optimizer's state {key!r}")
    local = piece.cut(full.reshape(-1))
    return piece.show(local.to(param.device, copy=True))


# -- loads ----------------------------------------------------------------------------------------
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _watch_loads(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Hook an optimizer so that loaded states, earlier ones included, are cut like its parameters.

    Otherwise a step would update this rank's part of states that every rank keeps whole.
    """
    if optimizer in _watched or not any(map(is_cut, params)):
        return
    _watched.add(optimizer)
    for param in params:
        if is_cut(param) and param in optimizer.state:
            states = optimizer.state[param]
            for key in [k for k, v in states.items() if _is_uncut(param, v)]:
                states[key] = _cut_state(param, key, states[key])
    optimizer.register_load_state_dict_pre_hook(_cut_loaded)


def _is_uncut(param: Tensor, value: Any) -> bool:
    is_whole = isinstance(value, Tensor) and not is_cut(value)
    return is_whole and value.shape == param.shape


def _cut_loaded(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Return a state dict about to be loaded with its whole states cut to pieces."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    if len(numbers) != len(params):
        return None  # torch will refuse it
    found = dict(state_dict["state"])
    for number, param in zip(numbers, params, strict=True):
        if is_cut(param) and isinstance(found.get(number), Mapping):
            found[number] = {
                key: _cut_state(param, key, value) if _is_uncut(param, value) else value
                for key, value in found[number].items()
            }
    return {**state_dict, "state": found}


@cache
def watch_steps() -> None:
    """Watch the steps of all optimizers, starting with the first compiled model.

    Steps over replicated parameters count as writes, unless the optimizer counts its own. These
    parameters are plain tensors to torch, and a fused step increments no version counter. Steps
    over parameters that shards have replaced raise, and so do steps that would divide by second
    moments in float16.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_note_step)


# optimizers of torch.optim that divide by the root of squared gradients plus eps, 0 in float16
_SECOND_MOMENTS = "Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop".split()
# -> number of parameters.
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Check that an optimizer may step; return the arguments of `step` if they must be replaced."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    _check_near(optimizer, params)
    ledgers = {id(p.ledger): p.ledger for each in params if (p := piece_of(each)) is not None}
    for ledger in ledgers.values():
        ledger.steps_begun += 1
    whole = whole_updates.updates_of(optimizer)
    if _checked.get(optimizer) != len(params):
        if whole is None:
            _watch_loads(optimizer, params)
        _check_moments(optimizer, params)
    return None if whole is None else whole.arguments(optimizer, args, kwargs)


def _check_moments(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Refuse, before it steps, an optimizer that needs float32 parameters but has none."""
    kind = type(optimizer).__name__
    has_moments = any(base in _SECOND_MOMENTS for base in _torch_bases(optimizer))
    for param in params if has_moments else ():
        piece = piece_of(param)
        if piece is not None and param.dtype == torch.float16:
            raise ShardError(
                f"{piece.name} is float16 without a float32 master copy, in which {kind}'s squared "
                "gradients and eps vanish. Keep the model in float32 and compute in 16 bits with "
                "Plan(precision='fp16'), or use SGD."
            )
    _checked[optimizer] = len(params)


def _check_near(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Refuse to let an optimizer that does not stage from NVMe step parameters that live there."""
    for param in params:
        piece = piece_of(param)
        if piece is None or piece.ledger.homes.nvme is None or not param.requires_grad:
            continue
        if isinstance(optimizer, updates.BucketOptimizer):
            return  # only asked here: checking a protocol is slow
        if piece.bucket.home is Tier.NVME:
            raise _not_staged(optimizer, piece.name)


_LEFT_BEHIND = "_zerofx_left_behind"


def leave_behind(original: nn.Parameter) -> None:
    """Mark a parameter that a shard has replaced: stepping an optimizer that holds it raises."""
    setattr(original, _LEFT_BEHIND, True)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if any(hasattr(p, _LEFT_BEHIND) for group in optimizer.param_groups for p in group["params"]):
        raise ShardError(
            f"this {type(optimizer).__name__} was built before zerofx.compile and still refers to "
            "the old parameters, so step() would have no effect. Build it over the compiled "
            "model's parameters(), or call zerofx.compile(model, plan, optimizer=optimizer)."
        )
    updating = whole_updates.updates_of(optimizer)
    if updating is not None:
        updating.finish()
    whole: dict[int, Ledger] = {}
    cut: dict[int, Ledger] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (piece := piece_of(param)) is not None:
                (cut if piece.is_cut else whole)[id(piece.ledger)] = piece.ledger
    if not getattr(optimizer, "counts_writes", False):
        for ledger in whole.values():  # writes to pieces are counted separately
            ledger.note_write()
    ledgers = (*whole.values(), *cut.values())
    for world in {id(ledger.world): ledger.world for ledger in ledgers}.values():
        # With one rank there is nothing to compare, and nothing would clear the list.
        if world.size > 1:
            world.steps.note(optimizer)
    for ledger in ledgers:
        if ledger.on_step is not None:
            ledger.on_step()
