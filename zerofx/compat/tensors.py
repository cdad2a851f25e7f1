"""Tensor internals: DTensor wrappers, storages, and single calls over many small tensors.

A sharded parameter is a DTensor whose local tensor has a different number of dimensions than the
global shape. The public constructors derive one from the other, so the wrapper, its spec and a mesh
without process groups are created directly. Calls over a list of tensors have no public name.
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


# (value, message): raises if the value is false; on a GPU the error appears later, like any fault.
assert_async: Callable[[torch.Tensor, str], None] = torch._assert_async

# DTensor.__init__ costs more than the wrapper itself; this is its __new__.
new_dtensor = torch.Tensor._dtensor__new__

# Attributes of the wrapper: the local tensor (a slot, so reading it skips __torch_function__).
local_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")

local_dtype: Callable[[Any], torch.dtype] = operator.attrgetter("_local_tensor.dtype")

OF_DTENSORS = ("_local_tensor", "_spec")  # the attributes that make a tensor a DTensor


def set_local_tensor(wrapper: Any, local: torch.Tensor) -> None:
    """Replace a DTensor's local tensor."""
    wrapper._local_tensor = local


local_device: Callable[[Any], torch.device] = operator.attrgetter("_local_tensor.device")


def allow_foreach(cls: type[torch.Tensor]) -> None:
    """Let optimizers and clipping use foreach for tensors of `cls`, as for DTensor itself."""
    from torch.optim.optimizer import _foreach_supported_types as in_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as in_clipping

    for known in (in_optimizers, in_clipping):
        if cls not in known:
            known.append(cls)


# nn.Parameter's own way to create an instance over given memory, for subclasses of Tensor.
make_subclass: Callable[..., Any] = torch.Tensor._make_subclass

# The properties of Tensor behind those that a subclass overrides: `.__get__(t)`, `.__set__(t, v)`.
raw_data: Any = torch.Tensor.data
raw_grad: Any = torch.Tensor.grad
_raw_requires_grad: Any = torch.Tensor.requires_grad

raw_version: Any = torch.Tensor._version

# The number of writes to a tensor's memory through torch; an inference tensor has none.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def as_own_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as an independent tensor on the same memory, with its own version counter.

    Autograd refuses writes to views that a custom Function created.
    """
    if not tensor._is_view():
        return tensor
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor)  # type: ignore[call-overload,no-any-return]


def require_grad(params: Sequence[torch.Tensor]) -> list[bool]:
    """Return which parameters require a gradient, without a Python call per subclass instance."""
    read = _raw_requires_grad.__get__
    with DisableTorchFunctionSubclass():
        return [read(p) for p in params]


# Functions that clipping and GradScaler call with whole lists.
foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_norm

unscale_and_check: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_

foreach_copy_: Callable[..., None] = torch._foreach_copy_

foreach_zero_: Callable[..., None] = torch._foreach_zero_


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share a storage, also on meta."""
    return int(tensor.untyped_storage()._cdata)


def memory_range(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Return (memory id, first byte, end) of a strided tensor; an empty range if unknown."""
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
    """Return how many tensors, and references to the storage itself, share its storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def keep_version(tensor: torch.Tensor) -> Any:
    """Return a context in which writes to a tensor do not change its version counter."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)
