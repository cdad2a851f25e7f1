"""Sizes that vary from call to call: how a graph holds them, and what they are at a call.

A dimension of an input that varies has a symbol, `s0`. A graph holds no symbols and no nodes that
compute with them. An argument of a node that depends on one is a `Size` (or a `Ratio`): a number,
which also knows the expression that it is the value of. Its number belongs to one choice of sizes,
the program's hints, and so do all fake values. Passes and analyses therefore see plain numbers:
nothing that they compare can narrow what the program holds for. What is written says the
expression: emitted source, dumps, and the digests of the proof.

A node's `form` is its value's shape and strides in this form, for what is written of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.compat.graphs import FakeTensorMode
from zerofx.compat.symbols import Symbols, hint_of, is_symbolic
from zerofx.compat.tracing import new_fake_mode
from zerofx.ir.meta import Role, info, value

FORM = "zfx_form"  # in a node's meta


class Size(int):
    """A whole number that depends on sizes: its value at the hints, and its expression."""

    text: str

    def __new__(cls, hint: int, text: str) -> Size:
        made = super().__new__(cls, hint)
        made.text = text
        return made

    def __repr__(self) -> str:
        return self.text

    def __reduce__(self) -> Any:
        return type(self), (int(self), self.text)

    def __deepcopy__(self, memo: Any) -> Size:
        return self


class Ratio(float):
    """A fraction that depends on sizes: its value at the hints, and its expression."""

    text: str

    def __new__(cls, hint: float, text: str) -> Ratio:
        made = super().__new__(cls, hint)
        made.text = text
        return made

    def __repr__(self) -> str:
        return self.text

    def __reduce__(self) -> Any:
        return type(self), (float(self), self.text)

    def __deepcopy__(self, memo: Any) -> Ratio:
        return self


# -- Which sizes of a call vary, and for which values a program holds ------------------------------


@dataclass(frozen=True)
class Dim:
    """A dimension of an input: of the leaf of this number, called `name` by the user."""

    leaf: int
    dim: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name}.shape[{self.dim}]"


@dataclass(frozen=True)
class Symbol:
    """A size that varies, and the dimensions that have it, the first of which it is read from."""

    name: str
    hint: int
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a program that vary.

    conditions: Python expressions of the symbols' names. The program serves the sizes for which all
        of them are true, and which are at least 2: torch computes with 0 and 1 in ways of its own.
    """

    symbols: tuple[Symbol, ...] = ()
    conditions: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.symbols)

    @property
    def hints(self) -> dict[str, int]:
        return {symbol.name: symbol.hint for symbol in self.symbols}

    def of(self, leaves: Sequence[Any]) -> dict[str, int]:
        """Return the symbols' values at a call with these leaves."""
        return {s.name: leaves[s.dims[0].leaf].shape[s.dims[0].dim] for s in self.symbols}

    def allow(self, values: Mapping[str, int]) -> bool:
        """Tell whether the program serves these sizes."""
        if any(v < 2 for v in values.values()):
            return False
        return all(evaluate(text, values) for text in self.conditions)


def evaluate(text: str, values: Mapping[str, int]) -> Any:
    """Return what an expression is for some sizes."""
    return eval(_compiled(text), {"math": math}, dict(values))


@lru_cache(maxsize=4096)
def _compiled(text: str) -> Any:
    return compile(text, "<size>", "eval")


def at(given: Any, values: Mapping[str, int]) -> Any:
    """Return a `Size`, or what holds some in tuples, lists and dicts, as it is for some sizes."""
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
        return frozenset(_compiled(given.text).co_names) - _FUNCTIONS
    if isinstance(given, dict):
        given = tuple(given.values())
    if isinstance(given, (tuple, list)):
        return frozenset().union(*map(names_in, given))
    return frozenset()


_FUNCTIONS = frozenset({"max", "min", "float", "int", "math", "sqrt", "ceil", "floor", "abs"})


def form(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and strides of a node's tensor, with a `Size` for what varies."""
    known = node.meta.get(FORM)
    if known is not None:
        return known
    val = value(node)
    return tuple(val.shape), tuple(val.stride())


# -- From symbols to sizes: a graph that was traced, or read, on symbolic fakes --------------------


def settle(graph: fx.Graph, symbols: Symbols, hints: Mapping[str, int]) -> None:
    """Put sizes in the place of symbols, and give every node the value that it has at the hints.

    Nodes that computed sizes are gone.
    """
    mode = new_fake_mode()
    written = _Written(symbols, hints)
    symbolic = {node for node in graph.nodes if is_symbolic(value(node))}
    for node in graph.nodes:
        if node not in symbolic:
            node.args = _replaced(node.args, written, symbolic)
            node.kwargs = _replaced(node.kwargs, written, symbolic)
            note_form(node, value(node), written)
    for node in reversed(list(graph.nodes)):
        if node in symbolic:
            graph.erase_node(node)
    values = Values(mode, hints)
    for node in graph.nodes:
        if node.op == "output":
            continue
        node.meta.pop("tensor_meta", None)
        made = values.placeholder(node) if node.op in ("placeholder", "get_attr") else None
        node.meta["val"] = values.run(node) if made is None else made
        values.of[node] = node.meta["val"]


class _Written:
    """Turns symbolic values into sizes."""

    def __init__(self, symbols: Symbols, hints: Mapping[str, int]) -> None:
        self._symbols, self._hints = symbols, hints
        self._known: dict[str, Any] = {}

    def __call__(self, given: Any) -> Any:
        if not is_symbolic(given):
            return given
        text = self._symbols.text(given)
        if text not in self._known:
            found = evaluate(text, self._hints)
            if isinstance(found, int) and not isinstance(found, bool):
                is_plain = not _compiled(text).co_names
                self._known[text] = found if is_plain else Size(found, text)
            elif isinstance(found, float):
                is_plain = not _compiled(text).co_names
                self._known[text] = found if is_plain else Ratio(found, text)
            else:
                self._known[text] = found
        return self._known[text]


def _replaced(argument: Any, written: Callable[[Any], Any], symbolic: set[fx.Node]) -> Any:
    if isinstance(argument, fx.Node):
        return written(value(argument)) if argument in symbolic else argument
    if isinstance(argument, dict):
        return {k: _replaced(v, written, symbolic) for k, v in argument.items()}
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return slice(*[_replaced(v, written, symbolic) for v in parts])
    if isinstance(argument, (tuple, list)):
        return type(argument)([_replaced(v, written, symbolic) for v in argument])
    return written(argument)


def note_form(node: fx.Node, val: Any, written: Callable[[Any], Any]) -> None:
    """Note shape and strides of a node's value, if they depend on sizes."""
    node.meta.pop(FORM, None)
    if not isinstance(val, Tensor):
        return
    shape, strides = tuple(map(written, val.shape)), tuple(map(written, val.stride()))
    if any(isinstance(v, Size) for v in (*shape, *strides)):
        node.meta[FORM] = shape, strides


class Values:
    """The values of graphs at some sizes, which may be symbols: each node runs on fakes.

    sizes: the value of each symbol. of: node -> value.
    """

    def __init__(self, mode: FakeTensorMode, sizes: Mapping[str, Any]) -> None:
        self._mode, self._sizes = mode, sizes
        self.of: dict[fx.Node, Any] = {}

    def placeholder(self, node: fx.Node) -> Tensor:
        """Return the value of what a graph is given: of its form, at these sizes."""
        shape, strides = form(node)
        val = value(node)
        with self._mode, torch.inference_mode(False), torch.no_grad():
            made = torch.empty_strided(
                at(shape, self._sizes), at(strides, self._sizes), dtype=val.dtype, device=val.device
            )
            return made.requires_grad_(val.requires_grad)

    def run(self, node: fx.Node) -> Any:
        """Return what a call makes of values that are known."""
        args = fx.node.map_aggregate((node.args, node.kwargs), self._given)
        with self._mode, torch.inference_mode(False), torch.no_grad():
            return node.target(*args[0], **args[1])  # type: ignore[index,operator,misc]

    def _given(self, argument: Any) -> Any:
        return self.of[argument] if isinstance(argument, fx.Node) else at(argument, self._sizes)
