"""Compute formats: the number formats of a forward, if parameters are kept in another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.compat.graphs import pytree
from zerofx.compat.modules import own_parameters
from zerofx.compat.tensors import version_of
from zerofx.errors import CaptureError, PlanError
from zerofx.layout.buckets import LOW_OR_SINGLE
from zerofx.plan.fields import Patterns, covers


def compute_dtypes(
    model: nn.Module, dtype: torch.dtype | None, modules: Patterns | None = None
) -> dict[str, torch.dtype]:
    """Return the format in which each parameter is used, under every name it has.

    dtype: the format for parameters of 32 or 16 bits; None keeps the format of each.
    modules: the formats of modules that use another one, by name pattern.

    Norms with running statistics keep their format: they sum over a whole batch, and their kernels
    accept weights only in the format of the statistics.

    Raises:
        CaptureError: dtype is not a format that parameters can be cast to.
        PlanError: a pattern matches no parameter, or a tied one has two formats.
    """
    if dtype is not None and dtype not in LOW_OR_SINGLE:
        raise CaptureError(
            f"capture: compute_dtype = {dtype} is not supported. Use one of "
            f"{', '.join(map(str, LOW_OR_SINGLE))}, or None for the parameters' own."
        )
    found: dict[str, torch.dtype] = {}
    first: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, param in own_parameters(module).items():
            if param is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            own = param.dtype
            if own in LOW_OR_SINGLE:
                chosen = modules.match(name) if modules else None
                own = chosen or (own if dtype is None or _keeps(module) else dtype)
            other = first.setdefault(id(param), name)
            if modules and found.get(other, own) is not own:
                raise PlanError(
                    f"Plan.precision.modules: {other} is computed in {found[other]}, and as {name} "
                    f"in {own}, but the two are one tied parameter. Give both modules one format."
                )
            found[name] = found.get(other, own)
    for pattern in modules or ():
        if not any(covers(pattern, name) for name in found):
            raise PlanError(
                f"Plan.precision.modules: {pattern!r} covers no parameter of "
                f"{type(model).__name__}. Its parameters are {', '.join(list(found)[:8])}"
                f"{' and others' if len(found) > 8 else ''}."
            )
    return found


def dtype_at(path: str, dtype: torch.dtype | None, modules: Patterns | None) -> torch.dtype | None:
    """Return the format of a module's inputs when it is called on its own."""
    return (modules.match(path) if modules and path else None) or dtype


def _keeps(module: nn.Module) -> bool:
    """Return whether a module normalises by running statistics."""
    return isinstance(getattr(module, "running_mean", None), Tensor)


def cast_inputs(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    """Return a call's tensors, with those of 32 or 16 floating-point bits in the compute format.

    A tensor without dimensions is unchanged. It does not widen the result of an operation, and may
    be a count that 16 bits cannot hold, such as the token count by which transformers divides its
    loss. Under torch.autocast no tensor is cast: autocast casts for the operators that need it, and
    leaves sums along the model (residual streams, norms, losses) wide.
    """
    if dtype is None:
        return tuple(tensors)
    return tuple(t.to(dtype) if _is_cast(t) else t for t in tensors)


def _is_cast(tensor: Tensor) -> bool:
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return False
    return tensor.dim() > 0 and tensor.dtype in LOW_OR_SINGLE


def cast_modules(
    model: nn.Module,
    units: Mapping[str, str],
    computes: Mapping[str, torch.dtype],
    dtype: torch.dtype | None,
    modules: Patterns | None = None,
) -> dict[str, torch.dtype]:
    """Return the modules whose floating-point inputs are cast, and the format of each.

    Units with parameters computed in `dtype` receive their inputs in it, because a buffer in
    another format may have widened a value between units. If some modules have a format of their
    own, every module with parameters receives its inputs in the format of these parameters.
    """
    found: dict[str, torch.dtype] = {}
    if dtype is not None:
        found = {units[n]: dtype for n, own in computes.items() if own is dtype and units[n]}
    if modules is None:
        return found
    for path, module in model.named_modules(remove_duplicate=False):
        own = [
            computes[f"{path}.{k}"]
            for k, p in own_parameters(module).items()
            if p is not None and path
        ]
        chosen = modules.match(path) if path else None
        if chosen is None and own and own[0] in LOW_OR_SINGLE and not _keeps(module):
            chosen = own[0]
        if chosen is not None:
            found[path] = chosen
    return found


def casting(forward: Callable[..., Any], name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a module's forward, wrapped to cast the floating-point tensors among its arguments."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        own = [v for v in leaves if isinstance(v, Tensor)]
        given = iter(copies := cast_inputs(own, dtype))
        before = counted_writes(own, copies)
        leaves = [next(given) if isinstance(v, Tensor) else v for v in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        result = forward(*args, **kwargs)
        check_unwritten(own, copies, before, f"{name}.forward")
        return result

    return call


def counted_writes(tensors: Sequence[Tensor], given: Sequence[Tensor]) -> list[int | None]:
    """Return the number of writes to each copy made by `cast_inputs`, None for other tensors."""
    pairs = zip(tensors, given, strict=True)
    return [None if t is own or t.is_inference() else version_of(t) for own, t in pairs]


def check_unwritten(
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    before: Sequence[int | None],
    where: str = "forward",
) -> None:
    """Raise if a forward wrote to its cast copy of an input: the user's tensor would not change.

    Raises:
        CaptureError: names the input by its position among the tensors of the call.
    """
    for i, (was, now) in enumerate(zip(before, counted_writes(tensors, given), strict=True)):
        if was != now:
            raise CaptureError(
                f"capture: {where} writes in place to input tensor {i}, which it gets as a "
                f"{given[i].dtype} copy of the {tensors[i].dtype} given. Give it in "
                f"{given[i].dtype}, or return the new value."
            )
