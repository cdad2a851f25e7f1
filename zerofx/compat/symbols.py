"""Symbols for sizes: made before tracing, and read back from what tracing did with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from zerofx.compat.strides import TrueStrides


class _Printer(PythonPrinter):
    """Writes an expression in the Python that emitted source has, without torch's own functions."""

    def _print_ToFloat(self, expr: Any) -> str:
        return f"float({self._print(expr.args[0])})"

    def _print_TruncToInt(self, expr: Any) -> str:
        return f"int({self._print(expr.args[0])})"


class Symbols:
    """The symbols of one trace, each a size that is at least 2.

    hints: name -> the value at which control flow on sizes goes the way that this trace takes.
    The env notes each way that was taken as a guard; `conditions` are these guards.
    """

    def __init__(self, hints: Mapping[str, int]) -> None:
        # Two symbols with one hint stay two symbols: which sizes are equal is for the caller to say
        self.env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
        self.sizes: dict[str, torch.SymInt] = {}
        self._names: dict[Any, Any] = {}
        for name, hint in hints.items():
            source = ConstantSource(name)
            symbol = self.env.create_symbol(hint, source, DimDynamic.DYNAMIC)
            made: Any = self.env.create_symintnode(symbol, hint=hint, source=source)
            self.sizes[name] = made
            self._names[symbol] = sympy.Symbol(name, integer=True, positive=True)

    def mode(self) -> FakeTensorMode:
        """Make the fake mode whose tensors may have these sizes."""
        return TrueStrides(shape_env=self.env, allow_non_fake_inputs=True)

    def text(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
        """Return a value as a Python expression of the names."""
        return self._written(self.env.replace(value.node.expr))

    def conditions(self) -> tuple[str, ...]:
        """Return what must hold of the sizes for the trace to be theirs, as Python expressions.

        Nothing is said of those that the trace made constants.
        """
        known = {s: self.env.replace(s) for s in self._names}
        constants = {s: found for s, found in known.items() if found.is_number}
        guards = [sympy.sympify(guard.expr).xreplace(constants) for guard in self.env.guards]
        return tuple(dict.fromkeys(self._written(g) for g in guards if g != sympy.true))

    def constants(self) -> frozenset[str]:
        """Return the names of the sizes that the trace holds for one value of."""
        return frozenset(
            name.name for s, name in self._names.items() if self.env.replace(s).is_number
        )

    def _written(self, expr: Any) -> str:
        return _Printer().doprint(sympy.sympify(expr).xreplace(self._names))


def is_symbolic(value: Any) -> bool:
    """Tell whether a value is a size, or computed from sizes, that has a symbol."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
