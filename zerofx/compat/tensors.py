"""Tensors from inside: DTensor wrappers, storages, and one call over many small tensors.

A sharded parameter is a DTensor whose local tensor has another number of dimensions than the global
shape; the public constructors derive one from the other, so the wrapper, its spec and a mesh
without process groups are made directly. One call over a list of tensors has no public name.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Skips __torch_function__ of subclasses inside the block.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass


def shard_mesh(device_type: str, size: int, rank: int) -> Any:
    """Return a 1-D DeviceMesh of the shard axis that owns no process group."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(
        device_type, torch.arange(size), mesh_dim_names=("shard",), _init_backend=False, _rank=rank
    )


def shard_spec(mesh: Any, shape: torch.Size, dtype: torch.dtype) -> Any:
    """Return the DTensorSpec of a contiguous tensor of `shape`, placed `Shard(0)` on `mesh`."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    meta = TensorMeta(shape, tuple(reversed(stride)), dtype)
    return DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)


# (value, message): raises if the value is false; on a GPU that shows later, as any fault there.
assert_async: Callable[[torch.Tensor, str], None] = torch._assert_async

# DTensor.__init__ costs more than the wrapper itself; this is its __new__.
new_dtensor = torch.Tensor._dtensor__new__

# What the wrapper keeps: the local tensor (a slot, so reading it costs no __torch_function__).
local_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")

local_dtype: Callable[[Any], torch.dtype] = operator.attrgetter("_local_tensor.dtype")


def set_local_tensor(wrapper: Any, local: torch.Tensor) -> None:
    """Make a DTensor keep another local tensor."""
    wrapper._local_tensor = local


local_device: Callable[[Any], torch.device] = operator.attrgetter("_local_tensor.device")


def allow_foreach(cls: type[torch.Tensor]) -> None:
    """Let optimizers and clipping choose foreach for tensors of `cls`, as DTensor itself does."""
    from torch.optim.optimizer import _foreach_supported_types as in_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as in_clipping

    for known in (in_optimizers, in_clipping):
        if cls not in known:
            known.append(cls)


# nn.Parameter's own way to make an instance over given memory, for subclasses of Tensor.
make_subclass: Callable[..., Any] = torch.Tensor._make_subclass

# The properties of Tensor behind those that a subclass overrides: `.__get__(t)`, `.__set__(t, v)`.
raw_data: Any = torch.Tensor.data
raw_grad: Any = torch.Tensor.grad
_raw_requires_grad: Any = torch.Tensor.requires_grad

raw_version: Any = torch.Tensor._version

# How often a tensor's memory was written to through torch; an inference tensor does not count.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def as_own_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as a tensor of its own on the same memory, with a version counter of its own.

    Autograd refuses writes to views that a custom Function made.
    """
    if not tensor._is_view():
        return tensor
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor)  # type: ignore[call-overload,no-any-return]


def require_grad(params: Sequence[torch.Tensor]) -> list[bool]:
    """Say which parameters require a gradient; subclasses are not asked one by one."""
    read = _raw_requires_grad.__get__
    with DisableTorchFunctionSubclass():
        return [read(p) for p in params]


# What clipping and GradScaler call with whole lists.
foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_norm

unscale_and_check: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_

foreach_copy_: Callable[..., None] = torch._foreach_copy_

foreach_zero_: Callable[..., None] = torch._foreach_zero_


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common which share a storage, also on meta."""
    return int(tensor.untyped_storage()._cdata)


def memory_range(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Return (which memory, first byte, end) of a strided tensor; an empty range where unknown."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return "", 0, 0
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.is_meta:
        memory = f"meta {storage_identity(tensor)}"
        start = tensor.storage_offset() * tensor.element_size()
    else:
        memory, start = str(tensor.device), tensor.data_ptr()
    return memory, int(start), int(start + span * tensor.element_size())


def storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors, and how many names of the storage itself, share its storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def keep_version(tensor: torch.Tensor) -> Any:
    """Return a context in which writes to a tensor leave its version counter as it is."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)
