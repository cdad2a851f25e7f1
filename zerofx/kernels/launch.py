"""Launching kernels: how a Triton kernel is declared, and when it replaces the torch form.

Triton is optional: a kernel is a plain function decorated with `@kernel`. It is compiled at its
first launch, when `tl` is added to the globals of its module. The interpreter
(`TRITON_INTERPRET=1`, set before Triton is imported) runs the same source on CPU tensors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_interpreting() -> bool:
    """Return whether Triton kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and has_triton()


_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextlib.contextmanager
def plain_forms() -> Iterator[None]:
    """Run the equivalent ops in place of kernels within the block, as when emitted code is read."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def use_triton(device: torch.device) -> bool:
    """Return whether kernels over tensors on `device` run through Triton."""
    if _PLAIN.get():
        return False
    return (device.type == "cuda" and has_triton()) or is_interpreting()


class Kernel:
    """A Triton kernel that is compiled at its first launch: `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    @functools.cached_property
    def jitted(self) -> Any:
        import triton
        import triton.language as tl

        self.function.__globals__["tl"] = tl
        return triton.jit(self.function)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.jitted[grid]


def kernel(function: Callable[..., Any]) -> Kernel:
    """Make a Triton kernel of a function whose parameters are `tl.constexpr` or not annotated."""
    return Kernel(function)


def num_blocks(numel: int, block: int) -> int:
    """Return the number of blocks that cover `numel` elements."""
    return -(-numel // block)


def check_flat(numel: int, **tensors: Tensor | None) -> None:
    """Check that tensors are flat memory of one length: 1-D and contiguous.

    Raises:
        ValueError: names the tensor, its shape and the expected length.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dim() != 1 or tensor.numel() != numel or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and strides {tensor.stride()}. "
                f"Flat, contiguous memory of {numel} elements is needed. Pass tensor.view(-1)."
            )


# -- strides, for kernels that read tensors without a copy -----------------------------------------
def with_unit_stride(x: Tensor) -> Tensor:
    """Return x, copied only if its last dimension is not dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """Return x as [rows, D] with dense rows, copied only if no view has this form."""
    return with_unit_stride(x).reshape(-1, x.shape[-1])


def batch_stride(x: Tensor) -> int:
    """Return the stride of dimension 0, or 0 if its single element is broadcast."""
    return x.stride(0) if x.shape[0] > 1 else 0
