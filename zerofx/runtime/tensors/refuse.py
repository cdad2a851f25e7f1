"""Errors for operations that a piece of a parameter does not support: each names the fix."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zerofx.errors import ShardError

if TYPE_CHECKING:
    from zerofx.runtime.tensors.piece import ParameterPiece

ACCEPTED_OPTIMIZERS = (
    "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, RMSprop, ASGD and Rprop"
)


def op_name(func: Any) -> str:
    """Return the name by which a user calls `func`: `view`, `__getitem__`, or a property's name."""
    name = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__"):
        return str(getattr(func.__self__, "__name__", name))
    return str(name)


def refusal(op: str, piece: ParameterPiece, why: str = "") -> ShardError:
    """Return the error for `op` on a tensor cut like `piece`; `why` replaces the usual reason."""
    reason = why or (
        f"needs the whole tensor, but this rank holds elements {piece.says()} of its "
        f"{piece.shape.numel()} {list(piece.shape)}"
        if sum(end - start for start, end in piece.own) < piece.shape.numel()
        else "needs a plain tensor, but a compiled model keeps this one in its own storage"
    )
    optimizer = calling_optimizer()
    if optimizer is not None:
        return ShardError(
            f"{piece.name}: {op} {reason}. {optimizer} needs whole matrices or vectors of "
            "parameters. Give zerofx.optim.whole_matrices(optimizer), which steps each parameter "
            f"whole on one rank, use one of {ACCEPTED_OPTIMIZERS}, or Plan(stage=0)."
        )
    return ShardError(
        f"{piece.name}: {op} {reason}. Use zerofx.full_tensor(p), which also takes p.grad, "
        "zerofx.full_state_dict(model) or the block of zerofx.whole(model) on all ranks, or "
        "p.to_local() for the piece."
    )


def refuse_partial_norm(name: str, doing: str, other_axes: str) -> NoReturn:
    """Raise for an operation that needs the norm of a whole model if the world has only a part."""
    raise ShardError(
        f"{name}: {doing} would use a different norm on each rank along the mesh axes "
        f"{other_axes}. The model is compiled over a slice of that mesh, and zerofx does not know "
        "which of its parameters these ranks share. Mark those that are slices "
        "(docs/from-megatron.md), or add the squares of torch.nn.utils.get_total_norm over those "
        "ranks, and clip with torch.nn.utils.clip_grads_with_norm_ (docs/multi-node.md)."
    )


def calling_optimizer() -> str | None:
    """Return the class name of the optimizer whose method is running on this thread, if any."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer):
            return type(owner).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None


def refuse_hook(name: str, method: str) -> NoReturn:
    """Raise for a gradient hook: the program assigns p.grad itself, so the hook would never run."""
    raise ShardError(
        f"{name}: {method} on a compiled model's parameter would never run, since the program "
        "assigns p.grad itself. Use register_post_accumulate_grad_hook, whose hook finds the "
        "reduced gradient in p.grad and may change it, or hook the tensor inside forward."
    )
