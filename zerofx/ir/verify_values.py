"""Value numbering: every value of a program gets a digest of its whole expression.

Two programs compute the same if and only if their outputs have the same digests. Ops that zerofx
adds are erased, each as its spec declares: launch, wait and sync are identities, a view of a bucket
at the layout's offset is the parameter, and the packed, reduced and stored values are the
gradients. A saved value is the forward value it came from. A recomputed node has the digest of the
original one, and a view or copy that keeps shape and strides has the digest of its source. So has a
sum or product whose two operands change places.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerofx.compat.graphs import FakeTensor, OpOverload, schema_of
from zerofx.ir.graphs import COMMUTATIVE
from zerofx.ir.meta import (
    UPDATES,
    Info,
    OutputInfo,
    Phase,
    Role,
    filled,
    info,
    place_of,
    tensors_of,
    value,
)
from zerofx.ir.program import BACKWARD, FORWARD, JOINT, Planned
from zerofx.ir.spec import spec_of

_aten = torch.ops.aten
# Views and copies: if shape and strides are unchanged, the result is the argument.
SAME_VALUES = frozenset({
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.view.default,
    _aten.expand.default, _aten.slice.Tensor, _aten.permute.default,
})  # fmt: skip
OWN_INVERSE = frozenset({_aten.t.default, _aten.transpose.int})

SHORT = 6  # characters of a digest kept to tell values apart within one program


@dataclass(frozen=True)
class _Erased:
    """A call on whole values that replaces a node computing a rank's part of it."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Packed:
    """A gradient buffer: the digests packed into it, by offset."""

    bucket: int
    contents: dict[int, tuple[str, fx.Node]] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """One result of a program: its digest, and the node that computes it."""

    digest: str
    graph: str
    node: fx.Node


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def label_of(role: Role, name: str, index: int = -1) -> str:
    """Return the unique name of a program's output: `output 1 (loss)`, `grad wte.weight`."""
    return f"{role.value} {index} ({name})" if index >= 0 else f"{role.value} {name}"


class Numbering:
    """The digests of one program's values.

    of: node -> digest; a list of digests for `sync_buffers`, a `Packed` for gradient buffers.
    outputs: label -> Output, over all graphs, saved values left out.
    graphs: those to number at once; others are given node by node.
    """

    def __init__(
        self, program: Planned, graphs: Sequence[str] = (JOINT, FORWARD, BACKWARD)
    ) -> None:
        self.program = program
        self.of: dict[fx.Node, Any] = {}
        self.outputs: dict[str, Output] = {}
        self._draws: dict[Phase, int] = {}
        self._inverse: dict[str, tuple[str, Any]] = {}  # transposition -> (dims, its argument)
        self._saved: list[Any] = []
        for name in graphs:
            if name in program.graphs:
                for node in program.graph(name).nodes:
                    self.take(name, node)

    def take(self, name: str, node: fx.Node) -> None:
        """Number the next node of a graph."""
        self._name = name
        if node.op == "placeholder":
            self.of[node] = self._leaf(info(node))
        elif node.op == "get_attr":
            self.of[node] = _constant(self.program.graphs[name], node)
        elif node.op == "call_function":
            op = spec_of(node)
            self.of[node] = op.erase(self, node) if op else self._expression(node)
        elif node.op == "output":
            self._results(name)

    def _results(self, name: str) -> None:
        specs = self.program.outputs[name]
        updated = {place_of(spec) for spec in specs if spec.role in UPDATES}
        for spec, result in zip(specs, self.program.results(name), strict=True):
            if isinstance(result, fx.Node):
                self._result(name, spec, result, updated)

    def _leaf(self, where: Info) -> Any:
        if where.role is Role.SAVED:
            is_known = 0 <= where.index < len(self._saved)
            return self._saved[where.index] if is_known else digest(f"saved {where.index}")
        if where.role is Role.SHARD:
            return ("bucket", where.index)
        if where.digest:
            return where.digest
        assert where.role is not None, f"placeholder {where.name} has no role"
        return leaf_digest(where.role, where.name, where.index)

    def _expression(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            source = self.of[args(node)[0]]
            if isinstance(source, list):
                return source[args(node)[1]]
            return digest(f"item {source} {args(node)[1]}")
        placed = info(node).placed
        if placed is not None and placed.target is not None:
            captured = placed.captured
            if captured.is_same and captured.target in SAME_VALUES:
                return self.of[args(node)[0]]
            return self.whole_call(node)
        if node.target in SAME_VALUES and _form(value(node)) == _form(value(args(node)[0])):
            return self.of[args(node)[0]]
        return self._called(node, node)

    def whole_call(self, node: fx.Node) -> Any:
        """Return the digest of the call on whole values that a node is, or is a part of."""
        placed = info(node).placed
        if placed is None:
            return self._called(node, node)
        placed, tensors = placed.captured, tensors_of(node)
        whole = _Erased(placed.target, filled(placed.args, tensors), filled(placed.kwargs, tensors))
        return self._called(node, whole)

    def _called(self, node: fx.Node, whole: Any) -> Any:
        where = info(node)
        text = f"{_callee(whole.target)}({self._arguments(whole)})"
        if whole.target in OWN_INVERSE:
            return self._transposed(whole, text)
        if where.is_random:
            # two draws differ although their expressions are equal: the draw's index distinguishes
            draw = self._draws[where.phase] = where.draw or self._draws.get(where.phase, 0) + 1
            text += f" {where.phase.value} draw {draw}"
        return digest(text)

    def _transposed(self, node: fx.Node, text: str) -> Any:
        dims, source = repr(args(node)[1:]), self.of[args(node)[0]]
        if (before := self._inverse.get(source)) is not None and before[0] == dims:
            return before[1]
        made = digest(text)
        self._inverse[made] = dims, source
        return made

    def _arguments(self, node: fx.Node) -> str:
        named = dict(node.kwargs)
        formal = _formal(node.target)
        if formal is None:
            rest = [f"{k}={self._text(v)}" for k, v in sorted(named.items())]
            return ",".join([*(self._text(a) for a in args(node)), *rest])
        texts = [self._text(a) for a in args(node)]
        for argument, default in formal[len(texts) :]:
            texts.append(self._text(named[argument]) if argument in named else default)
        for position in unread(node):
            texts[position] = "unread"
        return _listed(node.target, texts)

    def _text(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return str(self.of[argument])
        if isinstance(argument, (list, tuple)):
            return f"[{','.join(self._text(a) for a in argument)}]"
        return _plain(argument)

    def _result(
        self, graph: str, spec: OutputInfo, result: fx.Node, updated: Container[tuple[Any, Any]]
    ) -> None:
        made = self.of[result]
        if spec.role is Role.SAVED:
            source = result
            if result.target is _aten.clone.default and not result.kwargs:
                source = args(result)[0]
            # a copy of an input that forward overwrites only preserves the old value;
            # a copy of anything else belongs to the model
            is_kept = source.op == "placeholder" and place_of(info(source)) in updated
            self._saved.append(self.of[source] if is_kept else made)
        elif spec.role is not Role.SHARD_GRAD:
            label = label_of(spec.role, spec.name, spec.index)
            self.outputs[label] = Output(str(made), graph, result)

    def give(self, node: fx.Node, packed: Any) -> None:
        """Record the values that a node stores as the gradients of the packed parameters."""
        layout = self.program.layout
        if not isinstance(packed, Packed):
            return
        bucket = layout.buckets[packed.bucket]
        for offset, (made, where) in packed.contents.items():
            label = label_of(Role.GRAD, bucket.at[offset].name)
            self.outputs[label] = Output(made, self._name, where)


def sum_digest(summands: Sequence[str]) -> str:
    """Return the digest of the sum of values, added from the left."""
    total, *others = summands
    formal = _formal(_aten.add.Tensor)
    assert formal is not None
    rest = [default for _, default in formal[2:]]
    for other in others:
        given = _listed(_aten.add.Tensor, [total, other, *rest])
        total = digest(f"{_callee(_aten.add.Tensor)}({given})")
    return total


def _listed(target: Any, arguments: list[str]) -> str:
    """Return arguments as text, in an order of their own if theirs does not matter."""
    if target in COMMUTATIVE and arguments[2:] in ([], ["1"]):  # alpha, of the second
        arguments = [*sorted(arguments[:2]), *arguments[2:]]
    return ",".join(arguments)


def leaf_digest(role: Role, name: str, index: int = -1) -> str:
    """Return the digest of a graph input."""
    return digest(f"{role.value} {index if index >= 0 else name}")


@functools.cache
def _callee(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


@functools.cache
def _formal(target: Any) -> list[tuple[str, str]] | None:
    """Return (name, default as text) of an op's arguments, or None if it has no schema."""
    schema = schema_of(target)
    if schema is None:
        return None
    return [(a.name, _plain(a.default_value)) for a in schema.arguments]


def _plain(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{','.join(_plain(a) for a in argument)}]"
    return repr(argument)


def _constant(gm: fx.GraphModule, node: fx.Node) -> str:
    """Return the digest of a constant of the graph: its form and bytes."""
    held: Any = functools.reduce(getattr, str(node.target).split("."), gm)
    if held.is_meta or isinstance(held, FakeTensor):
        return digest(f"constant {node.target} {held.dtype} {list(held.shape)}")
    flat = held.detach().cpu().contiguous().view(-1).view(torch.uint8)
    content = hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()
    return digest(f"constant {held.dtype} {list(held.shape)} {content}")


def _form(val: Any) -> tuple[Any, ...]:
    return tuple(val.shape), tuple(val.stride())


def unread(node: fx.Node) -> frozenset[int]:
    """Return the positions of arguments whose values the op does not read.

    A backward op takes them only to learn whether a gradient is wanted, and its shape.
    """
    if node.target is _aten.native_layer_norm_backward.default:
        return frozenset({6})  # bias
    if node.target is _aten.convolution_backward.default:
        wants_input, wants_weight, _ = args(node)[10]
        return frozenset({1} if not wants_weight else ()) | ({2} if not wants_input else set())
    return frozenset()


def args(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's arguments, typed by its op's schema rather than as a union of all types."""
    return node.args
