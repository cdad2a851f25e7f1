"""What a sharded tensor answers without touching elements: sizes, flags, aliases of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerofx.compat.callers import is_called_by_stager
from zerofx.compat.tensors import (
    DisableTorchFunctionSubclass,
    local_dtype,
    local_tensor,
    raw_version,
    version_of,
)
from zerofx.runtime.tensors.elementwise import with_refusing_backward
from zerofx.runtime.tensors.tensor import HANDLERS, ShardedTensor, handles, refuse, wrap

METHODS = """
size dim ndimension numel nelement stride is_contiguous element_size is_floating_point
is_same_size get_device is_inference is_signed is_conj is_neg type __len__ __dir__ retain_grad
""".split()
PROPERTIES = """
ndim layout is_leaf grad_fn is_cpu is_cuda is_meta is_xpu is_mps is_nested is_quantized is_mkldnn
is_sparse_csr is_dtensor itemsize nbytes retains_grad output_nr name volatile names
""".split()


def from_wrapper(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer from the wrapper, which carries the global sizes."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _getter(name: str) -> Callable[..., Any] | None:
    found = getattr(torch.Tensor, name, None)
    return getattr(found, "__get__", None)


for _name in METHODS:
    for _home in (torch, torch.Tensor):
        if hasattr(_home, _name):
            HANDLERS[getattr(_home, _name)] = from_wrapper
for _name in PROPERTIES:
    _get = _getter(_name)
    if _get is not None:
        HANDLERS[_get] = from_wrapper


@handles(torch.is_complex, torch.Tensor.is_complex)
def is_complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Answer what optimizers ask of every parameter in every step."""
    return local_dtype(args[0]).is_complex


@handles(torch.Tensor.detach, torch.detach)
def detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Return another wrapper of the same piece; writes through it are seen."""
    return args[0]._alias()


@handles(torch.Tensor.detach_)
def detach_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Leave the tensor as it is: it has no history."""
    return args[0]


@handles(torch.Tensor.new_empty)
def new_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Make a plain tensor of the asked size; for `async_save` one that is cut like the first.

    It fills the attributes of what it gets, the local tensor among them, with copies of the first's
    (as it does with every DTensor, whose `data_ptr()` is 0).
    """
    source = args[0]
    if is_called_by_stager():
        return wrap(local_tensor(source).new_empty(0, **kwargs), source.zfx)
    return func(local_tensor(source), *args[1:], **kwargs)


@handles(torch.Tensor.data_ptr)
def data_ptr(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Refuse, since the address of a piece is not that of the tensor; see `new_empty`."""
    if is_called_by_stager():
        return 0
    refuse(func, args, kwargs)


@handles(torch.Tensor.new_zeros, torch.Tensor.new_ones)
@handles(torch.Tensor.new_full, torch.Tensor.new_tensor)
def new_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Make a plain tensor of the asked size, with this dtype and device."""
    return func(local_tensor(args[0]), *args[1:], **kwargs)


@handles(torch.Tensor.view_as, torch.Tensor.reshape_as, torch.Tensor.expand_as)
def shaped_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Give a plain tensor the global shape of a sharded one.

    A tensor viewed as itself is another wrapper, in whose history it is found: the schedules of
    torch.distributed.pipelining that split backward look for parameters in that way.
    """
    plain, other = args
    if plain is other:
        return with_refusing_backward(func, plain, plain.detach())
    if isinstance(plain, ShardedTensor):
        refuse(func, args, kwargs)
    return getattr(plain, func.__name__[: -len("_as")])(other.shape)


@handles(raw_version.__get__)
def version(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the version of the piece, which is where writes land."""
    return version_of(local_tensor(args[0]))
