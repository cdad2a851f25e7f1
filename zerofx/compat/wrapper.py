"""Wrapper reader: the allocations of a compiled region, read from Inductor's generated wrapper.

Allocations, reuses and frees are statements of its `call`, so walking them gives the memory of a
run without running it. Its inputs come in a list that it empties, and are freed like its own
allocations.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_FUNCTIONS: dict[str, Any] = {"max": max, "min": min, "math": math}
_UNKNOWN = 4  # bytes per element if no dtype is known
_OTHER = {("native_dropout", 1): 1, ("max_pool2d_with_indices", 1): 8}  # (op, result) -> bytes


@dataclass(frozen=True)
class Output:
    """A result of a region: part of input `input`, or of the new allocation `made`."""

    input: int = -1
    made: int = -1


@dataclass(frozen=True)
class Inside:
    """A call whose operator allocates internally: the `number`-th of its kind in the wrapper."""

    kind: str
    number: int


# The second is a prefix of the first, so it comes last.
KINDS = ("convolution_backward", "convolution")


@dataclass(frozen=True)
class Moment:
    """The memory held at one time of a run: its own allocations, and inputs not yet freed.

    inside: the operator that runs at this time, if it allocates internally.
    """

    made: frozenset[int]
    inputs: frozenset[int]
    inside: Inside | None = None


@dataclass(frozen=True)
class RegionTrace:
    """The allocations of one run, and the memory that contains its results.

    size_bytes: allocation -> its size in bytes.
    moments: the memory held after each statement that allocates, and at the end.
    channels_last: the operators that allocate internally and return channels-last memory.
    """

    num_inputs: int
    size_bytes: dict[int, int]
    moments: tuple[Moment, ...]
    outputs: tuple[Output, ...]
    channels_last: frozenset[Inside] = frozenset()

    def made_bytes(self, moment: Moment) -> int:
        """Return the bytes of the run's own allocations at a moment."""
        return sum(self.size_bytes[m] for m in moment.made)


class _Unreadable(Exception):
    """A statement whose allocations are unknown."""


@dataclass
class _Walk:
    """Interprets the wrapper's statements: names refer to allocations, freed with their last name.

    given: the sizes at the end of the inputs.
    sizes: names of these, and of values computed from them.
    """

    given: tuple[int, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[int]] = field(default_factory=dict)  # a tuple's name refers to several
    size: dict[int, int] = field(default_factory=dict)
    itemsize: dict[int, int] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)  # a tuple's name -> the op that created it
    num_inputs: int = 0
    moments: list[Moment] = field(default_factory=list)
    inside: dict[str, Inside] = field(default_factory=dict)  # by the name of a result or of a tuple
    channels_last: set[Inside] = field(default_factory=set)
    now: Inside | None = None  # the operator that this statement runs or unpacks

    def run(self, body: list[ast.stmt]) -> list[Output] | None:
        for statement in body:
            num_made, self.now = len(self.size), None
            results = self._statement(statement)
            if len(self.size) > num_made or results is not None:
                self._note()
            if results is not None:
                return results
        return None

    def _note(self) -> None:
        """Record the current memory: only allocations can raise the peak."""
        made = frozenset(m for group in self.names.values() for m in group)
        self.moments.append(Moment(made, frozenset(self.inputs.values()), self.now))

    def _statement(self, statement: ast.stmt) -> list[Output] | None:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    self.names.pop(target.id, None)
                    self.inputs.pop(target.id, None)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._call(statement.value)
        elif isinstance(statement, ast.With):
            return self.run(statement.body)
        elif isinstance(statement, ast.Return) and statement.value is not None:
            elements = statement.value
            assert isinstance(elements, ast.Tuple)
            return [self._output(e) for e in elements.elts]
        return None

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            if not isinstance(value, ast.Name) or value.id != "args":
                raise _Unreadable(ast.unparse(target))
            named = [t.id for t in target.elts if isinstance(t, ast.Name)]
            if self.given:
                self.sizes = dict(zip(named[-len(self.given) :], self.given, strict=True))
                named = named[: -len(self.given)]
            self.inputs = {name: i for i, name in enumerate(named)}
            self.num_inputs = len(named)
        elif isinstance(target, ast.Name):
            self._bind(target.id, value)

    def _bind(self, name: str, value: ast.expr) -> None:
        source = _viewed(value)
        if self.sizes and (size := self._evaluated(value)) is not None:
            self.sizes[name] = size
        elif source is not None:
            if source in self.inputs:
                self.inputs[name] = self.inputs[source]
            elif source in self.names:
                self.names[name] = self.names[source]
        elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            self._take_apart(name, value.value.id, value.slice)
        elif isinstance(value, ast.Call):
            function = ast.unparse(value.func)
            if "empty_strided" in function:
                shape, strides = map(self._numbers, value.args[:2])
                self._make(name, _span(shape, strides), _itemsize(ast.unparse(value.args[2])))
            elif "partitions" in function:
                raise _Unreadable(function)
            elif function.startswith(("torch.ops.", "aten.", "extern_kernels.")):
                self._make(name, 0, self._like(value))
                self.called[name] = function
                self._note_inside(name, function)

    def _note_inside(self, name: str, function: str) -> None:
        kind = next((k for k in KINDS if k in function), None)
        if kind is not None:
            before = sum(i.kind == kind for i in set(self.inside.values()))
            self.now = self.inside[name] = Inside(kind, before)

    def _make(self, name: str, numel: int, itemsize: int) -> None:
        made = len(self.size)
        self.size[made], self.itemsize[made] = numel * itemsize, itemsize
        self.names[name] = [made]

    def _like(self, call: ast.Call) -> int:
        """Return the itemsize of an op's first known argument, which its results usually share."""
        for node in ast.walk(call):
            if isinstance(node, ast.Name) and node.id in self.names:
                return self.itemsize[self.names[node.id][0]]
        return _UNKNOWN

    def _take_apart(self, name: str, source: str, index: ast.expr) -> None:
        """Give an element of an op's tuple its own allocation, which the tuple holds too."""
        if source not in self.names or not isinstance(index, ast.Constant):
            return
        whole = self.names[source]
        made = len(self.size)
        self.size[made], self.itemsize[made] = 0, self.itemsize[whole[0]]
        for (op, result), itemsize in _OTHER.items():
            if op in self.called.get(source, "") and result == index.value:
                self.itemsize[made] = itemsize
        whole.append(made)
        self.names[name] = [made]
        if source in self.inside:
            self.now = self.inside[name] = self.inside[source]

    def _call(self, call: ast.Call) -> None:
        """Take the size of an op's result from the check that follows it."""
        if not ast.unparse(call.func).endswith("assert_size_stride"):
            return
        checked = call.args[0]
        if not isinstance(checked, ast.Name) or checked.id not in self.names:
            return
        made = self.names[checked.id][0]
        if self.size[made] == 0:
            sizes, steps = map(self._numbers, call.args[1:3])
            self.size[made] = _span(sizes, steps) * self.itemsize[made]
            if checked.id in self.inside and len(sizes) > 2 and steps[1] == 1 < sizes[1]:
                self.channels_last.add(self.inside[checked.id])

    def _numbers(self, of: ast.expr) -> tuple[int, ...]:
        """Return the numbers in a shape or in strides."""
        found = self._evaluated(of)
        if not isinstance(found, tuple):
            raise _Unreadable(ast.unparse(of))
        return found

    def _evaluated(self, of: ast.expr) -> Any:
        """Return the value of an expression of numbers and known sizes, None for any other."""
        names = {n.id for n in ast.walk(of) if isinstance(n, ast.Name)}
        if not names <= {*self.sizes, *_FUNCTIONS}:
            return None
        code = compile(ast.Expression(of), "<size>", "eval")
        return eval(code, {"__builtins__": {}}, {**_FUNCTIONS, **self.sizes})

    def _output(self, element: ast.expr) -> Output:
        name = _viewed(element)
        if name in self.inputs:
            return Output(input=self.inputs[name])
        if name not in self.names:
            raise _Unreadable(ast.unparse(element))
        return Output(made=self.names[name][0])


def _viewed(value: ast.expr) -> str | None:
    """Return the name that an expression is or views, None for any other expression."""
    while isinstance(value, ast.Call) and ast.unparse(value.func).endswith("reinterpret_tensor"):
        value = value.args[0]
    return value.id if isinstance(value, ast.Name) else None


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements spanned by a tensor of this shape and these strides."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype.removeprefix("torch.")).itemsize


def trace(source: str, sizes: tuple[int, ...] = ()) -> RegionTrace | None:
    """Return the allocations of a generated wrapper, or None if its form is unknown.

    sizes: those at the end of its inputs, for one call.
    """
    for node in _functions(ast.parse(source)):
        walk = _Walk(sizes)
        try:
            outputs = walk.run(node.body)
        except (_Unreadable, ValueError):
            return None
        if outputs is not None:
            return RegionTrace(
                walk.num_inputs, walk.size, tuple(walk.moments), tuple(outputs),
                frozenset(walk.channels_last),
            )  # fmt: skip
    return None


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            yield node
