"""Norms and reductions of sharded tensors: local partials, then one exchange for a whole list.

Every rank gathers the partials of all ranks and combines them in rank order, in float64, so that
the result has the same bits everywhere. It differs from the unsharded result only by the order of
summation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from zerofx.compat.optim import is_clipping
from zerofx.compat.tensors import foreach_norm, local_dtype, local_tensor, unscale_and_check
from zerofx.errors import ShardError
from zerofx.runtime.tensors.elementwise import ledger_of, with_refusing_backward
from zerofx.runtime.tensors.piece import over_parts
from zerofx.runtime.tensors.refuse import op_name, refuse_partial_norm
from zerofx.runtime.tensors.tensor import (
    VALUES,
    ShardedTensor,
    handles,
    local_of,
    local_value,
    refuse,
)

_SHARDED = {ShardedTensor}
_OF_A_LIST = "clip_grad_norm_ (or another norm of many tensors)"  # the usual caller, for errors
LOW_PRECISION = (torch.bfloat16, torch.float16)


def _local_norms(
    tensors: list[torch.Tensor], order: float, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return norms of plain pieces as float64 [n]; an empty piece gives the neutral element."""
    if dtype is None and tensors[0].dtype in LOW_PRECISION:
        dtype = torch.float32  # a partial rounded to 8 bits would not add up
    if math.isinf(order) and any(t.numel() == 0 for t in tensors):
        idle = 0.0 if order > 0 else math.inf
        idle_norm = tensors[0].new_full((), idle, dtype=dtype)
        full = [t for t in tensors if t.numel()]
        norms = iter(foreach_norm(full, order, dtype=dtype) if full else ())
        return torch.stack([next(norms) if t.numel() else idle_norm for t in tensors]).double()
    return torch.stack(foreach_norm(tensors, order, dtype=dtype)).double()


def _combine(gathered: torch.Tensor, order: float) -> torch.Tensor:
    """Combine norms of parts [ranks, n] into norms of wholes [n]."""
    if order == math.inf:
        return gathered.amax(0)
    if order == -math.inf:
        return gathered.amin(0)
    if order == 0:
        return gathered.sum(0)
    if order == 2:
        return gathered.square().sum(0).sqrt()
    return gathered.pow(order).sum(0).pow(1 / order)


def global_norms(
    tensors: Sequence[ShardedTensor], order: float, dtype: torch.dtype | None, what: str
) -> list[torch.Tensor]:
    """Return the norm of each (whole) tensor, with one exchange for the whole list."""
    piece = tensors[0].zfx
    axes = piece.ledger.world.other_axes
    if axes and is_clipping():
        refuse_partial_norm(piece.name, "clip_grad_norm_", axes)
    with torch.no_grad():
        local = _local_norms([local_tensor(t) for t in tensors], order, dtype)
        whole = _combine(tensors[0].zfx.gather_partials(local, what), order)
        whole = over_parts([t.zfx for t in tensors], whole, partial(_combine, order=order))
        return list(whole.to(dtype or tensors[0].dtype).unbind())


def _groups(tensors: Sequence[Any]) -> dict[Any, list[int]]:
    """Return positions grouped by store and dtype; plain tensors are in the group None."""
    if set(map(type, tensors)) == _SHARDED:
        kinds = set(zip(map(ledger_of, tensors), map(local_dtype, tensors), strict=True))
        if len(kinds) == 1:
            return {kinds.pop(): list(range(len(tensors)))}
    groups: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        is_sharded = isinstance(t, ShardedTensor)
        key = (t.zfx.ledger, t.dtype) if is_sharded else None
        groups.setdefault(key, []).append(i)
    return groups


@handles(foreach_norm)
def list_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the norm of each tensor of a list; plain tensors in it are taken as they are."""
    tensors = args[0]
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    groups = _groups(tensors)
    if len(groups) == 1:
        return tuple(global_norms(tensors, order, dtype, _OF_A_LIST))
    out: list[Any] = [None] * len(tensors)
    for key, indices in groups.items():
        members = [tensors[i] for i in indices]
        if key is None:
            norms = func(members, order, dtype=dtype)
        else:
            norms = global_norms(members, order, dtype, _OF_A_LIST)
        for i, norm in zip(indices, norms, strict=True):
            out[i] = norm
    return tuple(out)


@handles(torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm)
def one_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the norm of the whole tensor as one vector."""
    values = dict(zip(("p", "dim", "keepdim"), args[1:], strict=False)) | kwargs
    order = values.pop("ord", values.pop("p", 2))
    values.pop("self", None)
    dtype = values.pop("dtype", None)
    order = 2 if order in (None, "fro") else order
    if isinstance(order, str) or any(v is not None and v is not False for v in values.values()):
        refuse(func, args, kwargs)
    tensor = args[0]
    if op_name(func) == "linalg_norm" and "ord" in kwargs and len(tensor.shape) > 1:
        refuse(func, args, kwargs)  # a matrix norm in that function
    what = f"{op_name(func)} of {tensor.zfx.name}"
    [norm] = global_norms([tensor], float(order), dtype, what)
    return with_refusing_backward(func, tensor, norm)


Reduce = Callable[[torch.Tensor], torch.Tensor]


def _partial(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the reduction of a plain piece, or the neutral element if it is empty."""
    if name in ("max", "amax", "min", "amin") and tensor.numel() == 0:
        floor = name.endswith("max")
        if tensor.is_floating_point():
            return tensor.new_full((), -math.inf if floor else math.inf)
        info = torch.iinfo(tensor.dtype)
        return tensor.new_full((), info.min if floor else info.max)
    if name in ("sum", "mean") and tensor.is_floating_point():
        return tensor.sum(dtype=torch.float64)
    return getattr(torch, "sum" if name == "mean" else name)(tensor)


COMBINE: dict[str, Reduce] = {
    "sum": lambda t: t.sum(), "mean": lambda t: t.sum(), "count_nonzero": lambda t: t.sum(),
    "max": lambda t: t.amax(), "amax": lambda t: t.amax(), "min": lambda t: t.amin(),
    "amin": lambda t: t.amin(), "any": lambda t: t.any(), "all": lambda t: t.all(),
}  # fmt: skip


def reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return `sum`, `mean`, `max`, `any`, ... over all elements; refuse a single dimension."""
    name, tensor = op_name(func), args[0]
    dtype = kwargs.get("dtype")
    options = [v for k, v in kwargs.items() if k not in ("dtype", "input")]
    if len(args) > 1 or any(v is not None and v is not False for v in options):
        refuse(func, args, kwargs)
    local, what = local_tensor(tensor), f"{name} of {tensor.zfx.name}"
    with torch.no_grad():
        here = _partial(local if dtype is None else local.to(dtype), name)
        as_bytes = here.to(torch.uint8) if here.dtype == torch.bool else here
        whole = COMBINE[name](tensor.zfx.gather_partials(as_bytes.reshape(1), what))
        whole = over_parts([tensor.zfx], whole.reshape(1), lambda t: COMBINE[name](t)[None])[0]
        if name == "mean":
            whole = whole / tensor.numel()
        if name in ("any", "all"):
            whole = whole.bool()
        elif local.is_floating_point() and name != "count_nonzero":
            whole = whole.to(dtype or local.dtype)
    return with_refusing_backward(func, tensor, whole)


for _name in COMBINE:
    handles(getattr(torch, _name), getattr(torch.Tensor, _name))(reduction)
VALUES.update((one_norm, reduction))


@handles(unscale_and_check)
def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale the pieces of gradients; an overflow on one rank sets `found_inf` on all ranks."""
    grads, found_inf, inv_scale = args
    sharded = [g for g in grads if isinstance(g, ShardedTensor)]
    piece = sharded[0].zfx
    axes = piece.ledger.world.other_axes
    if axes:
        raise ShardError(
            f"{piece.name}: GradScaler.unscale_ does not tell ranks along the mesh axes {axes} "
            "about an overflow, so they would step and this one would not. The model is compiled "
            "over a slice of that mesh. Compute in bf16 without a GradScaler."
        )
    func([local_of(g) for g in grads], found_inf, inv_scale)
    found = piece.gather_partials(found_inf.reshape(1), "GradScaler.unscale_")
    anywhere = found.amax().reshape(1)
    for name in ("tensor", "pipeline"):
        axis = piece.ledger.world.axis(name)
        if axis.size > 1:
            flags = anywhere.new_empty(axis.size)
            axis.all_gather(flags, anywhere, "GradScaler.unscale_").wait()
            anywhere = flags.amax().reshape(1)
    found_inf.copy_(anywhere.reshape(()))


@handles(torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose)
def same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all pieces on all ranks agree with the other tensor."""
    tensor, other, *rest = args
    if not isinstance(tensor, ShardedTensor):
        tensor, other = other, tensor
    if tuple(other.shape) != tuple(tensor.shape):
        return False
    local = local_tensor(tensor)
    mine = func(local, local_value(tensor, other, op_name(func)), *rest, **kwargs)
    votes = torch.tensor([mine], dtype=torch.uint8, device=local.device)
    what = f"{op_name(func)} of {tensor.zfx.name}"
    mine_all = tensor.zfx.gather_partials(votes, what).amin(0)
    return bool(over_parts([tensor.zfx], mine_all, lambda t: t.amin(0)).all())
