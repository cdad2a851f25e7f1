"""Sizes that vary from call to call: their representation in a graph, and their values at a call.

A dimension of an input that varies has a symbol, `s0`. A graph contains no symbols and no nodes
that compute with them. An argument of a node that depends on one is a `Size` (or a `Ratio`): a
number that also carries the expression that it is the value of. The number is the value at one
choice of sizes, the program's hints, and so are all fake values. Passes and analyses therefore see
plain numbers, and no comparison they make can narrow the sizes that the program serves. Written
forms contain the
expression: emitted source, dumps, and the digests of the proof.

A node's `form` is its value's shape and strides with such sizes.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import fx

from zerofx.errors import ProgramError
from zerofx.ir.meta import value
from zerofx.ir.text import describe, short_dtype
from zerofx.runtime.regions.keys import usual_sizes

FORM = "zfx_form"  # key in a node's meta
NUMBER = -1  # instead of a dimension: the argument itself, an int or a float


class _Expression:
    """A number that depends on sizes: its value at the hints, and its expression."""

    text: str
    real: Any  # the number alone

    def __new__(cls, hint: Any, text: str) -> Any:
        made = super().__new__(cls, hint)  # type: ignore[call-arg]
        made.text = text
        return made

    def __repr__(self) -> str:
        return self.text

    def __reduce__(self) -> Any:
        return type(self), (self.real, self.text)

    def __deepcopy__(self, memo: Any) -> _Expression:
        return self


class Size(_Expression, int):
    """A whole number that depends on sizes."""


class Ratio(_Expression, float):
    """A fraction that depends on sizes."""


# -- The sizes of a call that vary, and the values that a program serves ---------------------------


@dataclass(frozen=True)
class Dim:
    """A dimension of an input: that of the leaf with this number, which the user calls `name`.

    dim: `NUMBER` if the leaf is a number itself.
    is_stride: the stride of the dimension instead of its size, for a tensor that is not contiguous.
    """

    leaf: int
    dim: int
    name: str = ""
    is_stride: bool = False

    def __str__(self) -> str:
        if self.dim == NUMBER:
            return self.name
        where = f"stride({self.dim})" if self.is_stride else f"shape[{self.dim}]"
        return f"{self.name}.{where}"

    def read(self, leaves: Sequence[Any]) -> Any:
        """Return the value at a call with these leaves."""
        tensor = leaves[self.leaf]
        if self.dim == NUMBER:
            return tensor
        return int(tensor.stride(self.dim) if self.is_stride else tensor.shape[self.dim])


@dataclass(frozen=True)
class Symbol:
    """A size that varies, and the dimensions that have it; its value is read from the first one."""

    name: str
    hint: int
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a program that vary.

    conditions: Python expressions of the symbols' names. The program serves the sizes for which all
        of them are true and which are at least 2 (torch treats 0 and 1 specially),
        or fractions.
    """

    symbols: tuple[Symbol, ...] = ()
    conditions: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.symbols)

    @property
    def hints(self) -> dict[str, int]:
        return {symbol.name: symbol.hint for symbol in self.symbols}

    @property
    def typical(self) -> dict[str, int]:
        """Return the sizes for which regions are compiled: usual values near the hints."""
        found = usual_sizes(self.hints)
        return found if self.allow(found) else self.hints

    def of(self, leaves: Sequence[Any]) -> dict[str, int]:
        """Return the symbols' values at a call with these leaves."""
        return {s.name: s.dims[0].read(leaves) for s in self.symbols}

    def allow(self, values: Mapping[str, int]) -> bool:
        """Return whether the program serves these sizes."""
        if any(isinstance(v, int) and v < 2 for v in values.values()):
            return False
        return all(evaluate(text, values) for text in self.conditions)


def evaluate(text: str, values: Mapping[str, int]) -> Any:
    """Return the value of an expression for some sizes."""
    return eval(_compiled(text), {"__builtins__": {}, "math": math, **_BUILTINS}, dict(values))


@lru_cache(maxsize=4096)
def _compiled(text: str) -> Any:
    """Compile an expression of sizes; only arithmetic is accepted.

    Raises:
        ProgramError: the text is not such an expression.
    """
    try:
        tree = ast.parse(text, "<size>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(f"{text[:80]!r} is not an expression of sizes ({error}).") from error
    nodes = list(ast.walk(tree))
    if sum(isinstance(node, ast.Pow) for node in nodes) > 2 or not all(map(_is_arithmetic, nodes)):
        raise ProgramError(f"{text[:80]!r} is not an expression of sizes.")
    return compile(tree, "<size>", "eval")


def _is_arithmetic(node: ast.AST) -> bool:
    """Return whether a node of an expression can only compute a number, in a short time."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node.value) == "math" and node.attr in _OF_MATH
    if isinstance(node, ast.Call):
        is_known = isinstance(node.func, ast.Name) and node.func.id in _BUILTINS
        return not node.keywords and (is_known or isinstance(node.func, ast.Attribute))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        most = node.right.value if isinstance(node.right, ast.Constant) else None
        return type(most) in (int, float) and abs(most) <= 8  # type: ignore[arg-type]
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float, bool)
    return isinstance(node, _ARITHMETIC)


_BUILTINS: dict[str, Any] = {"max": max, "min": min, "float": float, "int": int, "abs": abs}
_OF_MATH = frozenset({"sqrt", "ceil", "floor", "trunc", "log", "log2", "exp"})
_ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Name, ast.Load,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.unaryop, ast.boolop,
    ast.cmpop,
)  # fmt: skip


def is_number(text: str) -> bool:
    """Return whether an expression depends on no size."""
    return not _names(text)


def _names(text: str) -> frozenset[str]:
    return frozenset(_compiled(text).co_names) - _FUNCTIONS


def at(given: Any, values: Mapping[str, int]) -> Any:
    """Evaluate a `Size`, or those inside tuples, lists and dicts, for some sizes."""
    if isinstance(given, (Size, Ratio)):
        return evaluate(given.text, values)
    if isinstance(given, dict):
        return {k: at(v, values) for k, v in given.items()}
    if isinstance(given, (tuple, list)):
        return type(given)([at(v, values) for v in given])
    return given


def names_in(given: Any) -> frozenset[str]:
    """Return the names of the symbols that an argument of a node depends on."""
    if isinstance(given, (Size, Ratio)):
        return _names(given.text)
    if isinstance(given, dict):
        given = tuple(given.values())
    if isinstance(given, (tuple, list)):
        return frozenset().union(*map(names_in, given))
    return frozenset()


_FUNCTIONS = frozenset({"math", *_BUILTINS, *_OF_MATH})


def form(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and strides of a node's tensor, with a `Size` for each value that varies."""
    known = node.meta.get(FORM)
    if known is not None:
        return known
    val = value(node)
    return tuple(val.shape), tuple(val.stride())


def describe_node(node: fx.Node) -> str:
    """Return `f32[s0_0, 16]` for a node's value, with varying sizes as expressions."""
    known, val = node.meta.get(FORM), value(node)
    if known is None:
        return describe(val)
    return f"{short_dtype(val.dtype)}[{', '.join(map(str, known[0]))}]"
