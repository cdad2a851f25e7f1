"""Emitted text: constants, shapes, identifiers, comments and templates.

Everything that is not Python source already goes through `literal`, `identifier` or `escaped`:
comments through `comment`, inserted values of templates through `templates()`. A name from the
user's model is therefore never read as code, whatever characters it contains.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Sequence
from typing import Any

import jinja2
import torch
from torch import fx

from zerofx.compat.graphs import OpOverload, op_name
from zerofx.errors import CaptureError
from zerofx.ir.sizes import Ratio, Size
from zerofx.ir.text import describe as describe
from zerofx.ir.text import escaped, unescaped
from zerofx.ir.text import identifier as identifier


class Source(str):
    """Text that is Python source already: templates insert it unchanged, any other text escaped."""

    __slots__ = ()


def templates() -> jinja2.Environment:
    """Return the templates of emitted files; inserted values are escaped unless they are `Source`.

    The filter `source` marks the rendered result of a template's macro as source.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("zerofx.codegen"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # the output is Python source, not markup
        finalize=_inserted,
    )
    environment.filters["source"] = Source
    return environment


def _inserted(given: Any) -> Any:
    return escaped(given) if isinstance(given, str) and not isinstance(given, Source) else given


# -- comments -----------------------------------------------------------------------------------
_MARK = "  # "  # begins a comment; no field contains it
_BETWEEN = "  "  # separates fields; no field contains it or has a space at its ends
_TIGHT = re.compile(r"(?<= ) |^[ #]| $")
_LINE = re.compile(r".+:\d+$")


def with_comment(statement: str, *fields: str) -> str:
    """Return a statement followed by a comment of the nonempty fields."""
    return _beside(statement, [_field(f) for f in fields])


def _beside(statement: str, fields: Sequence[str]) -> str:
    shown = _BETWEEN.join(f for f in fields if f)
    return f"{statement}{_MARK}{shown}" if shown else statement


def _field(text: str) -> str:
    return _TIGHT.sub(lambda found: f"\\x{ord(found[0]):02x}", escaped(text))


def with_origin(statement: str, kind: str, module: str, line: str) -> str:
    """Return a statement with a comment: `t = aten.t.default(w)  # f32[8, 8]  fc  model.py:12`.

    kind: dtype and shape. module: within its unit. line: the user's.
    """
    within = _field(module)
    if _LINE.match(within):  # it must not be mistaken for a line
        name, _, digits = within.rpartition(":")
        within = f"{name}\\x3a{digits}"
    return _beside(statement, [_field(kind), within, _field(line)])


def read_comment(row: str) -> list[str]:
    """Return the fields of the comment after a statement, in their original form."""
    return [unescaped(f) for f in _fields(row)]


def read_origin(row: str) -> tuple[str, str]:
    """Return the module (within its unit) and the user's line from the comment of `with_origin`."""
    fields = _fields(row)
    line = fields.pop() if fields and _LINE.match(fields[-1]) else ""
    return unescaped(fields[1]) if len(fields) > 1 else "", unescaped(line)


def _fields(row: str) -> list[str]:
    before, _, said = row.rstrip().rpartition(_MARK)
    return [f.strip() for f in said.split(_BETWEEN) if f.strip()] if before else []


# -- expressions --------------------------------------------------------------------------------


def literal(value: Any, names: dict[fx.Node, str]) -> str:
    """Write an argument: a node by its name, a constant as a Python expression."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        inner = ", ".join(literal(v, names) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {literal(v, names)}" for k, v in value.items()) + "}"
    if isinstance(value, (Size, Ratio)):
        return value.text
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, complex) and not math.isfinite(abs(value)):
        return f"complex({literal(value.real, names)}, {literal(value.imag, names)})"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    for kind in (bool, int, float, complex, str):
        if isinstance(value, kind):
            return kind.__repr__(value)  # a subclass may have another repr
    if value is None:
        return "None"
    raise CaptureError(
        f"a graph argument of type {type(value).__name__} ({value!r}) cannot be written as source. "
        "Pass it as a tensor or a Python number instead."
    )


def callee(target: Any) -> str:
    """Write an op as source: `aten.mm.default`, `operator.getitem`, `math.sqrt`."""
    if isinstance(target, OpOverload):
        space, *rest = op_name(target)
        return attributes(namespace(space), *rest)
    module = {"_operator": "operator"}.get(target.__module__, target.__module__)
    return f"{module}.{target.__name__}"


# names that a region's function reads besides its values; `args` is its argument list
RESERVED = frozenset({"args", "aten", "complex", "float", "getattr", "operator", "torch"})


def namespace(space: str) -> str:
    """Return the name that emitted source gives to `torch.ops.<space>`."""
    is_taken = space in RESERVED - {"aten"} or keyword.iskeyword(space)
    return f"{space}_ops" if is_taken else space


def attributes(source: str, *names: str) -> str:
    """Write nested attributes: `aten.mm.default`, or `getattr(aten.random, "from")`."""
    for name in names:
        is_plain = name.isidentifier() and not keyword.iskeyword(name)
        source = f"{source}.{name}" if is_plain else f"getattr({source}, {name!r})"
    return source


def wrap_tuple(names: list[str], column: int = 4, width: int = 96) -> str:
    """Write names as a tuple, over several lines if it would exceed `width` from `column` on."""
    line = ", ".join(names) + ("," if len(names) == 1 else "")
    if len(names) <= 1:
        return line
    return f"({line})" if column + len(line) <= width else f"({_rows(names, width)})"


def wrap_list(names: list[str], column: int = 4, width: int = 96) -> str:
    """Write names as a list, over several lines if it would exceed `width` from `column` on."""
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
