"""What a region that Inductor compiled allocates, read from the wrapper that it generated.

Allocations, reuses and frees are statements of its `call`, so walking them gives the bytes
of a run without one. Its inputs are held by the caller until the region returns.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

_UNKNOWN = 4  # bytes an element where nothing says which dtype
_OTHER = {("native_dropout", 1): 1, ("max_pool2d_with_indices", 1): 8}  # (op, result) -> bytes


@dataclass(frozen=True)
class Output:
    """A result of a region: it lies in input `input`, or in the new allocation `made`."""

    input: int = -1
    made: int = -1


@dataclass(frozen=True)
class RegionTrace:
    """The allocations of one run: the most bytes at once, and what the results lie in.

    made_bytes: allocation -> its bytes, of those that results lie in.
    """

    num_inputs: int
    peak_bytes: int
    made_bytes: dict[int, int]
    outputs: tuple[Output, ...]


class _Unreadable(Exception):
    """A statement whose allocations are not known."""


@dataclass
class _Walk:
    """Interprets the wrapper's statements: names hold allocations, which die with the last name."""

    inputs: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[int]] = field(default_factory=dict)  # a tuple's name holds several
    size: dict[int, int] = field(default_factory=dict)
    itemsize: dict[int, int] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)  # a tuple's name -> the op that made it
    peak: int = 0

    def run(self, body: list[ast.stmt]) -> list[Output] | None:
        for statement in body:
            results = self._statement(statement)
            held = {a for group in self.names.values() for a in group}
            self.peak = max(self.peak, sum(self.size.get(a, 0) for a in held))
            if results is not None:
                return results
        return None

    def _statement(self, statement: ast.stmt) -> list[Output] | None:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    self.names.pop(target.id, None)
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
            self.inputs = {name: i for i, name in enumerate(named)}
        elif isinstance(target, ast.Name):
            self._bind(target.id, value)

    def _bind(self, name: str, value: ast.expr) -> None:
        source = _viewed(value)
        if source is not None:
            if source in self.inputs:
                self.inputs[name] = self.inputs[source]
            elif source in self.names:
                self.names[name] = self.names[source]
        elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            self._take_apart(name, value.value.id, value.slice)
        elif isinstance(value, ast.Call):
            function = ast.unparse(value.func)
            if "empty_strided" in function:
                shape, strides, dtype = (ast.unparse(a) for a in value.args[:3])
                self._make(name, _span(shape, strides), _itemsize(dtype))
            elif "partitions" in function:
                raise _Unreadable(function)
            elif function.startswith(("torch.ops.", "aten.", "extern_kernels.")):
                self._make(name, 0, self._like(value))
                self.called[name] = function

    def _make(self, name: str, numel: int, itemsize: int) -> None:
        made = len(self.size)
        self.size[made], self.itemsize[made] = numel * itemsize, itemsize
        self.names[name] = [made]

    def _like(self, call: ast.Call) -> int:
        """Return the itemsize of an op's first known argument, which its results mostly share."""
        for node in ast.walk(call):
            if isinstance(node, ast.Name) and node.id in self.names:
                return self.itemsize[self.names[node.id][0]]
        return _UNKNOWN

    def _take_apart(self, name: str, source: str, index: ast.expr) -> None:
        """Give an element of an op's tuple an allocation of its own, held by the tuple too."""
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

    def _call(self, call: ast.Call) -> None:
        """Learn the size of an op's result from the check that follows it."""
        if not ast.unparse(call.func).endswith("assert_size_stride"):
            return
        checked = call.args[0]
        if not isinstance(checked, ast.Name) or checked.id not in self.names:
            return
        made = self.names[checked.id][0]
        if self.size[made] == 0:
            shape, strides = (ast.unparse(a) for a in call.args[1:3])
            self.size[made] = _span(shape, strides) * self.itemsize[made]

    def _output(self, element: ast.expr) -> Output:
        name = _viewed(element)
        if name in self.inputs:
            return Output(input=self.inputs[name])
        if name not in self.names:
            raise _Unreadable(ast.unparse(element))
        return Output(made=self.names[name][0])


def _viewed(value: ast.expr) -> str | None:
    """Return the name that an expression is or is a view of, None for anything else."""
    while isinstance(value, ast.Call) and ast.unparse(value.func).endswith("reinterpret_tensor"):
        value = value.args[0]
    return value.id if isinstance(value, ast.Name) else None


def _span(shape: str, strides: str) -> int:
    """Return the elements that a tensor of literal shape and strides spans."""
    sizes, steps = ast.literal_eval(shape), ast.literal_eval(strides)
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype.removeprefix("torch.")).itemsize


def trace(source: str) -> RegionTrace | None:
    """Return what a generated wrapper allocates, None where it is not of the known form."""
    for node in _functions(ast.parse(source)):
        walk = _Walk()
        try:
            outputs = walk.run(node.body)
        except (_Unreadable, ValueError):
            return None
        if outputs is not None:
            made = {o.made: walk.size[o.made] for o in outputs if o.made >= 0}
            num_inputs = len(set(walk.inputs.values()))
            return RegionTrace(num_inputs, walk.peak, made, tuple(outputs))
    return None


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            yield node
