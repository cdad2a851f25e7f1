"""How values are written in emitted source: constants, shapes, identifiers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.errors import CaptureError
from zerofx.ir.text import describe as describe
from zerofx.ir.text import identifier as identifier


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
