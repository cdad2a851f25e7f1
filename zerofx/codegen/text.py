"""How values are written in emitted source: constants, shapes, identifiers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from zerofx.compat.graphs import OpOverload, op_name
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
    if isinstance(target, OpOverload):
        return ".".join(op_name(target))
    module = {"_operator": "operator"}.get(target.__module__, target.__module__)
    return f"{module}.{target.__name__}"


def wrap_tuple(names: list[str], column: int = 4, width: int = 96) -> str:
    """Write names as a tuple, over several lines where it would pass `width` from `column` on."""
    line = ", ".join(names) + ("," if len(names) == 1 else "")
    if len(names) <= 1:
        return line
    return f"({line})" if column + len(line) <= width else f"({_rows(names, width)})"


def wrap_list(names: list[str], column: int = 4, width: int = 96) -> str:
    """Write names as a list, over several lines where it would pass `width` from `column` on."""
    line = ", ".join(names)
    return f"[{line}]" if column + len(line) <= width else f"[{_rows(names, width)}]"


def _rows(names: list[str], width: int) -> str:
    rows, row = [], ""
    for name in names:
        piece = f"{name}, "
        if row and len(row) + len(piece) + 8 > width:
            rows.append(row.rstrip())
            row = ""
        row += piece
    rows.append(row.rstrip())
    return "\n" + "\n".join(f"    {r}" for r in rows) + "\n"
