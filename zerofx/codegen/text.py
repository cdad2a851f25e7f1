"""How values are written in emitted source: constants, shapes, identifiers."""

from __future__ import annotations

import keyword
import math
import re
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.errors import CaptureError

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
        return f"{short_dtype(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(v) for v in value)})"
    return repr(value)


def identifier(text: str) -> str:
    """Turn a qualified name into a Python identifier."""
    name = re.sub(r"\W+", "_", text).strip("_")
    if not name or name[0].isdigit():
        name = f"v_{name}" if name else "v"
    return f"{name}_" if keyword.iskeyword(name) else name


def literal(value: Any, names: dict[fx.Node, str]) -> str:
    """Write an argument: a node by its name, a constant as a Python expression."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        inner = ", ".join(literal(v, names) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {literal(v, names)}" for k, v in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    raise CaptureError(
        f"a graph argument of type {type(value).__name__} ({value!r}) cannot be written as source; "
        "pass it as a tensor or a Python number instead"
    )


def callee(target: Any) -> str:
    """Write an op as source: `aten.mm.default`, `operator.getitem`, `math.sqrt`."""
    if isinstance(target, compat.OpOverload):
        return ".".join(compat.op_name(target))
    module = {"_operator": "operator"}.get(target.__module__, target.__module__)
    return f"{module}.{target.__name__}"


def wrap_tuple(names: list[str], indent: int = 4, width: int = 98) -> str:
    """Write names as a tuple target, over several lines where it is long."""
    line = ", ".join(names) + ("," if len(names) == 1 else "")
    if indent + len(line) <= width:
        return line if len(names) <= 1 else f"({line})"
    rows, row = [], ""
    for name in names:
        piece = f"{name}, "
        if len(row) + len(piece) + indent + 4 > width:
            rows.append(row.rstrip())
            row = ""
        row += piece
    rows.append(row.rstrip())
    pad = " " * (indent + 4)
    return "(\n" + "\n".join(pad + r for r in rows) + "\n" + " " * indent + ")"
