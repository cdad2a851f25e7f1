"""What a sharded tensor answers without touching elements: sizes, flags, aliases of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerofx.compat.tensors import (
    DisableTorchFunctionSubclass,
    local_dtype,
    local_tensor,
    raw_version,
)
from zerofx.runtime.param_tensor import HANDLERS, ShardedTensor, handles, refuse

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
    return args[0].data


@handles(torch.Tensor.detach_)
def detach_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Leave the tensor as it is: it has no history."""
    return args[0]


@handles(torch.Tensor.new_zeros, torch.Tensor.new_empty, torch.Tensor.new_ones)
@handles(torch.Tensor.new_full, torch.Tensor.new_tensor)
def new_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Make a plain tensor of the asked size, with this dtype and device."""
    return func(local_tensor(args[0]), *args[1:], **kwargs)


@handles(torch.Tensor.view_as, torch.Tensor.reshape_as, torch.Tensor.expand_as)
def shaped_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Give a plain tensor the global shape of a sharded one."""
    plain, other = args
    if isinstance(plain, ShardedTensor):
        refuse(func, args, kwargs)
    return getattr(plain, func.__name__[: -len("_as")])(other.shape)


@handles(raw_version.__get__)
def version(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the version of the piece, which is where writes land."""
    return local_tensor(args[0])._version
