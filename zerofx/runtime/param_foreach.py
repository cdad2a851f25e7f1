"""Foreach and fused calls: unwrapped to plain lists of pieces, they run once.

An optimizer step is a handful of these; reading the lists through `map` keeps the overhead between
it and torch at some microseconds a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, is_
from typing import Any

import torch

from zerofx.compat.optim import (
    foreach_names,
    fused_adagrad_,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
)
from zerofx.compat.tensors import local_tensor
from zerofx.runtime.param_elementwise import local_argument, register
from zerofx.runtime.param_tensor import ShardedTensor, refuse, wrap

FOREACH = """
abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp
expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt
sigmoid sign sin sinh sqrt sub tan tanh trunc zero
""".split()
FUSED = [f.__name__ for f in (fused_adam_, fused_adamw_, fused_sgd_, fused_adagrad_)]

# Read over whole lists: mapping these costs a third of a comprehension.
_piece = attrgetter("_piece")
ledger_of = attrgetter("_piece.ledger")
_aliases = attrgetter("_aliases")
_ndim = attrgetter("ndim")
_PLAIN = {torch.Tensor}


def _local_list(values: Any, like: Any, func: Any) -> Any:
    """Return the plain list for one list argument of a foreach call.

    Quick where every element is sharded and shares its piece with the same element of `like`.
    """
    if isinstance(values, ShardedTensor):
        refuse(func, (values,), {}, "takes a plain 0-d tensor or a list here")
    if not isinstance(values, (list, tuple)) or not values:
        return values
    if not isinstance(values[0], torch.Tensor):
        return values
    if set(map(type, values)) == _PLAIN and not any(map(_ndim, values)):
        return values  # step counts
    try:
        if values is like or all(map(is_, map(_piece, values), map(_piece, like))):
            return list(map(local_tensor, values))
    except AttributeError:
        pass  # plain tensors among them: one by one
    return [
        local_argument(v, p, func) if isinstance(p, ShardedTensor) else _plain(v, func)
        for v, p in zip(values, like, strict=True)
    ]


def _plain(value: Any, func: Any) -> Any:
    if isinstance(value, ShardedTensor):
        refuse(func, (value,), {}, "mixes it with a plain tensor in one list position")
    return value


def _note_writes(targets: Sequence[Any]) -> None:
    try:
        written = set(map(ledger_of, compress(targets, map(_aliases, targets))))
    except AttributeError:  # plain tensors among them
        written = {t._piece.ledger for t in targets if isinstance(t, ShardedTensor) and t._aliases}
    for ledger in written:
        ledger.note_write()


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an out-of-place foreach function on the pieces in one call."""
    base = args[0]
    locals_ = func(*[_local_list(a, base, func) for a in args], **_local_kwargs(func, base, kwargs))
    return tuple(
        wrap(out, p._piece) if isinstance(p, ShardedTensor) else out
        for out, p in zip(locals_, base, strict=True)
    )


def foreach_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place foreach or fused function on the pieces in one call."""
    base = args[0]
    func(*[_local_list(a, base, func) for a in args], **_local_kwargs(func, base, kwargs))
    _note_writes(base)
    return base


def _local_kwargs(func: Any, base: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: _local_list(v, base, func) for k, v in kwargs.items()}


register(foreach_names(FOREACH), foreach)
register(foreach_names(FOREACH, in_place=True), foreach_)
register(FUSED, foreach_)
