"""How values and names are written, in dumps and in emitted source."""

from __future__ import annotations

import keyword
import re
from functools import lru_cache
from typing import Any

import torch

_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def short_dtype(dtype: torch.dtype) -> str:
    """Return `f32` for torch.float32."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def describe(value: Any) -> str:
    """Return `f32[8, 16]` for a fake tensor, a tuple of those for several."""
    if isinstance(value, torch.Tensor):
        return _typed(value.dtype, tuple(value.shape))
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(v) for v in value)})"
    return repr(value)


@lru_cache(maxsize=4096)
def _typed(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{short_dtype(dtype)}[{', '.join(map(str, shape))}]"


@lru_cache(maxsize=16384)
def identifier(text: str) -> str:
    """Turn a qualified name into a Python identifier."""
    name = re.sub(r"\W+", "_", text).strip("_")
    if not name or name[0].isdigit():
        name = f"v_{name}" if name else "v"
    return f"{name}_" if keyword.iskeyword(name) else name


@lru_cache(maxsize=16384)
def without_numbers(text: str) -> str:
    """Return a qualified name with its layer numbers left out: `blocks.*.fc1`."""
    return re.sub(r"\d+", "*", text)
