"""Elementwise operations: functions of each element, which run once on the plain local pieces.

The accepted optimizers, clipping by value and exponential averages need nothing else. Foreach and
fused calls are unwrapped to plain lists of pieces and run in one call. An optimizer step consists
of a handful of these calls; reading the lists with `map` keeps the cost at a few microseconds per
call.

In-place random fills belong here too: every rank draws the whole tensor and keeps its piece. With
equal generators on all ranks (which zerofx keeps equal), the whole parameter has the same bits as
an unsharded one, so that `torch.nn.init` works on sharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from zerofx.compat.tensors import DisableTorchFunctionSubclass, local_tensor
from zerofx.errors import ShardError
from zerofx.runtime.tensors.refuse import calling_optimizer, op_name
from zerofx.runtime.tensors.tensor import (
    HANDLERS,
    VALUES,
    ShardedTensor,
    find_sharded,
    handles,
    local_of,
    local_value,
    refuse,
    wrap,
)

# Functions of each element; an in-place form `name_` is included if torch has one.
POINTWISE = """
abs absolute acos acosh add addcdiv addcmul arccos arccosh arcsin arcsinh arctan arctan2 arctanh
asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max
clamp_min clip clone copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv exp
exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac ge greater greater_equal gt
heaviside hypot isclose isfinite isinf isnan isneginf isposinf ldexp le lerp less less_equal lgamma
log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
masked_fill maximum minimum mul multiply nan_to_num ne neg negative nextafter not_equal
positive pow rad2deg reciprocal relu remainder round rsqrt rsub sgn sigmoid sign signbit sin sinc
sinh sqrt square sub subtract tan tanh threshold true_divide trunc where xlogy
""".split()
INPLACE_ONLY = ["copy_", "fill_", "zero_"]
CASTS = "bfloat16 bool contiguous cpu cuda double float half int long to type_as".split()
LIKES = ["empty_like", "full_like", "ones_like", "zeros_like"]
DUNDERS = """
add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs eq ne
lt le gt ge and rand or ror xor rxor invert
""".split()
INPLACE_DUNDERS = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split()


def local_argument(value: Any, like: ShardedTensor, func: Any) -> Any:
    """Return the value that `func` should see on this rank in place of one argument."""
    if isinstance(value, ShardedTensor) and value.zfx is like.zfx:
        return local_tensor(value)
    if isinstance(value, torch.Tensor):
        return local_value(like, value, op_name(func))
    return value


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: ShardedTensor) -> Any:
    local_args = [local_argument(a, like, func) for a in args]
    if not kwargs:
        return func(*local_args)
    return func(*local_args, **{k: local_argument(v, like, func) for k, v in kwargs.items()})


def _run_without_grad(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: ShardedTensor
) -> Any:
    if not torch.is_grad_enabled():
        return _run(func, args, kwargs, like)
    with torch.no_grad():
        return _run(func, args, kwargs, like)


class _NoGradientHere(torch.autograd.Function):
    """A result whose backward raises: only the program computes gradients of sharded parameters."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, op: str, out: torch.Tensor) -> torch.Tensor:
        ctx.op, ctx.name = op, anchor.zfx.name
        if isinstance(out, ShardedTensor):
            return wrap(local_tensor(out), out.zfx)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ShardError(
            f"{ctx.name}: a loss term computed by {ctx.op} outside the compiled module needs a "
            "gradient of a sharded parameter. Compute the term inside the model's forward, or "
            "detach it."
        )


def with_refusing_backward(func: Any, like: ShardedTensor, out: Any) -> Any:
    """Return `out` such that a backward through it raises; in eager it gives a gradient."""
    if not (torch.is_grad_enabled() and like.requires_grad):
        return out
    if not (out.is_floating_point() or out.is_complex()):
        return out
    return _NoGradientHere.apply(like, op_name(func), out)


@handles(torch.autograd.grad, torch.autograd.backward)
def gradients_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward for some parameters; all ranks must name the same ones.

    The results of autograd.grad are cut like the parameters.
    """
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an out-of-place function of each element; the result is cut like its input."""
    target = kwargs.get("out")
    if target is not None:
        return _pointwise_out(func, args, kwargs, target)
    like = find_sharded(args)
    if like is None:
        like = find_sharded(kwargs)
    assert like is not None
    local = _run_without_grad(func, args, kwargs, like)
    if local is NotImplemented or isinstance(local, bool):
        return local  # a comparison with an object that is not a tensor
    if not isinstance(local, torch.Tensor) or local.shape != local_tensor(like).shape:
        refuse(func, args, kwargs)
    out = wrap(local, like.zfx)
    if not torch.is_grad_enabled():
        return out
    return with_refusing_backward(func, _requiring(args, like), out)


def cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `to`, `float` and similar casts; like torch, return the tensor itself if unchanged."""
    source = args[0]
    if not isinstance(source, ShardedTensor):  # plain.to(p): only dtype and device are read
        return func(source, *[local_tensor(a) for a in args[1:]], **kwargs)
    others = [local_of(a) for a in args[1:]]
    with torch.no_grad():
        local = func(local_tensor(source), *others, **kwargs)
    if local is local_tensor(source):
        return source
    return with_refusing_backward(func, source, wrap(local, source.zfx))


def _requiring(args: Iterable[Any], like: ShardedTensor) -> ShardedTensor:
    sharded = [a for a in args if isinstance(a, ShardedTensor) and a.requires_grad]
    return sharded[0] if sharded else like


def _pointwise_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
    if not isinstance(target, ShardedTensor):
        refuse(func, args, kwargs, "with out= needs a tensor that is cut alike")
    _run(func, args, kwargs, target)
    _note_write(target)
    return target


def _note_write(target: ShardedTensor) -> None:
    if target._aliases:
        target.zfx.ledger.note_write()


def pointwise_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place function of each element on the first argument.

    A plain first argument holds a whole parameter, for example an average of the weights created
    before the model was compiled. The sharded arguments are then gathered, which is a collective
    call.
    """
    target = args[0]
    if not isinstance(target, ShardedTensor):
        if calling_optimizer() is not None:  # its states would be whole on every rank
            refuse(func, args, kwargs, "would write a sharded tensor's piece into a plain tensor")
        return func(*map(_whole, args), **{k: _whole(v) for k, v in kwargs.items()})
    if torch.is_grad_enabled() and target.requires_grad:
        raise RuntimeError(
            f"{target.zfx.name}: {op_name(func)}: a leaf Variable that requires grad is being "
            "used in an in-place operation."
        )
    _run(func, args, kwargs, target)
    _note_write(target)
    return target


def _whole(value: Any) -> Any:
    """Return an argument as a whole: a sharded tensor is gathered in a collective call."""
    if isinstance(value, ShardedTensor):
        return value.zfx.whole(local_tensor(value), "writing a whole copy")
    return value


def like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `zeros_like` and similar functions: return a new tensor cut like the first argument."""
    requires_grad = kwargs.pop("requires_grad", False)
    source = args[0]
    out = wrap(func(local_tensor(source), *args[1:], **kwargs), source.zfx)
    return out.requires_grad_() if requires_grad else out


def masked_assign(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run `t[mask] = scalar` with a mask that is cut alike (Rprop); refuse other indices."""
    target, index, value = args
    plain_scalar = not isinstance(value, torch.Tensor) or (
        value.ndim == 0 and not isinstance(value, ShardedTensor)
    )
    is_mask = isinstance(index, ShardedTensor) and index.dtype == torch.bool
    if not (isinstance(target, ShardedTensor) and is_mask and plain_scalar):
        refuse(func, args, kwargs)
    pointwise_(torch.Tensor.masked_fill_, (target, index, value), {})


def register(names: Iterable[str], handler: Callable[..., Any]) -> None:
    for name in names:
        for home in (torch, torch.Tensor, torch.special):
            func = getattr(home, name, None)
            if func is not None:
                HANDLERS[func] = handler


register(POINTWISE, pointwise)
register(CASTS, cast)
register([f"{name}_" for name in POINTWISE] + INPLACE_ONLY, pointwise_)
register(LIKES, like)
register([f"__{name}__" for name in DUNDERS], pointwise)
register([f"__{name}__" for name in INPLACE_DUNDERS], pointwise_)
HANDLERS[torch.Tensor.__setitem__] = masked_assign
VALUES.update((pointwise, pointwise_, cast, like))


FOREACH = """
abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp
expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt
sigmoid sign sin sinh sqrt sub tan tanh trunc zero
""".split()
FUSED = [f.__name__ for f in (fused_adam_, fused_adamw_, fused_sgd_, fused_adagrad_)]

# Reads a whole list: mapping these costs a third of a list comprehension.
_piece = attrgetter("zfx")
ledger_of = attrgetter("zfx.ledger")
_aliases = attrgetter("_aliases")
_ndim = attrgetter("ndim")
_PLAIN = {torch.Tensor}


def _local_list(values: Any, like: Any, func: Any) -> Any:
    """Return the list of plain tensors for one list argument of a foreach call.

    Takes a fast path if every element is sharded and shares its piece with the same element of
    `like`.
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
        pass  # some are plain tensors: convert one by one
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
    except AttributeError:  # some are plain tensors
        written = {t.zfx.ledger for t in targets if isinstance(t, ShardedTensor) and t._aliases}
    for ledger in written:
        ledger.note_write()


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an out-of-place foreach function on the pieces in one call."""
    base = args[0]
    locals_ = func(*[_local_list(a, base, func) for a in args], **_local_kwargs(func, base, kwargs))
    return tuple(
        wrap(out, p.zfx) if isinstance(p, ShardedTensor) else out
        for out, p in zip(locals_, base, strict=True)
    )


def foreach_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place foreach or fused function on the pieces in one call.

    Plain tensors written from sharded ones are written one by one; see `pointwise_`.
    """
    base = args[0]
    if not any(map(_is_sharded, base)) and calling_optimizer() is None:
        for number in range(len(base)):
            func(*[_at(a, number) for a in args], **{k: _at(v, number) for k, v in kwargs.items()})
        return base
    func(*[_local_list(a, base, func) for a in args], **_local_kwargs(func, base, kwargs))
    _note_writes(base)
    return base


def _is_sharded(value: Any) -> bool:
    return isinstance(value, ShardedTensor)


def _at(values: Any, number: int) -> Any:
    """Return element `number` of a list argument, as a whole and in a list; pass others through."""
    return [_whole(values[number])] if isinstance(values, (list, tuple)) else values


def _local_kwargs(func: Any, base: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: _local_list(v, base, func) for k, v in kwargs.items()}


register(foreach_names(FOREACH), foreach)
register(foreach_names(FOREACH, in_place=True), foreach_)
register(FUSED, foreach_)


FILLS = """
bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_
""".split()


# These torch.nn.init functions pass the whole call to subclasses, with keyword arguments.
INITS = (
    torch.nn.init.constant_,
    torch.nn.init.kaiming_uniform_,
    torch.nn.init.normal_,
    torch.nn.init.uniform_,
)


def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Draw a tensor of the global shape and keep this rank's range of it."""
    target = args[0]
    local = local_tensor(target)
    full = torch.empty(target.shape, dtype=local.dtype, device=local.device)
    func(full, *args[1:], **kwargs)
    with torch.set_grad_enabled(func not in INITS and torch.is_grad_enabled()):
        return pointwise_(torch.Tensor.copy_, (target, full), {})


HANDLERS.update({getattr(torch.Tensor, name): fill for name in FILLS})
HANDLERS.update(dict.fromkeys(INITS, fill))
