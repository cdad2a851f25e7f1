"""Settling: replace symbols by sizes in traced graphs, and evaluate programs at other sizes.

`settle` replaces symbols by numbers. `take_forms` runs a finished program on symbols again, which
proves that it serves the sizes that it declares: every number that a pass computed is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from zerofx.compat.graphs import FakeTensorMode
from zerofx.compat.tracing import Symbols, expression, is_symbolic, new_fake_mode
from zerofx.errors import ProgramError
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import BACKWARD, FORWARD, JOINT, Program
from zerofx.ir.sizes import FORM, Ratio, Size, Sizes, at, evaluate, form, is_number
from zerofx.ir.spec import Kind, spec_of


def settle(
    graph: fx.Graph,
    symbols: Symbols,
    hints: Mapping[str, int],
    mode: FakeTensorMode | None = None,
) -> None:
    """Replace symbols by sizes, and give every node its value at the hints.

    Nodes that computed sizes are removed. mode: the fake mode of the values; a new one by default.
    """
    written = Written(symbols, hints)
    symbolic = {node for node in graph.nodes if is_symbolic(value(node))}
    for node in graph.nodes:
        if node not in symbolic:
            node.args = _replaced(node.args, written, symbolic)
            node.kwargs = _replaced(node.kwargs, written, symbolic)
            note_form(node, value(node), written)
    for node in reversed(list(graph.nodes)):
        if node in symbolic:
            graph.erase_node(node)
    values = Values(mode or new_fake_mode(), hints)
    for node in graph.nodes:
        if node.op == "output":
            continue
        node.meta.pop("tensor_meta", None)
        node.meta["val"] = values.take(node)


class Written:
    """The conversion of symbolic values to sizes."""

    def __init__(self, symbols: Symbols, hints: Mapping[str, int]) -> None:
        self._symbols, self._hints = symbols, hints
        self._known: dict[str, Any] = {}

    def __call__(self, given: Any) -> Any:
        if not is_symbolic(given):
            return given
        text = self._symbols.text(given)
        if text not in self._known:
            found = evaluate(text, self._hints)
            if not is_number(text):
                found = Ratio(found, text) if isinstance(found, float) else Size(found, text)
            self._known[text] = found
        return self._known[text]


def settled_results(results: Mapping[int, Any], symbols: Symbols, sizes: Sizes) -> dict[int, Any]:
    """Replace symbols by sizes in the results that are not tensors: numbers, shapes."""
    written = Written(symbols, sizes.hints)
    return {leaf: _replaced(result, written, set()) for leaf, result in results.items()}


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
    """Record shape and strides of a node's value, if they depend on sizes."""
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
        self._made: dict[Any, Any] = {}  # calls of one form share a value

    def take(self, node: fx.Node) -> Any:
        """Compute, record and return the value of any node except the output."""
        is_given = node.op in ("placeholder", "get_attr")
        made = self.of[node] = self.given(node) if is_given else self.run(node)
        return made

    def given(self, node: fx.Node) -> Tensor:
        """Return the value of a graph input: a tensor of its form at these sizes."""
        shape, strides = form(node)
        val = value(node)
        with self._mode, torch.inference_mode(False), torch.no_grad():
            made = torch.empty_strided(
                at(shape, self._sizes),
                at(strides, self._sizes),
                dtype=val.dtype,
                device=val.device,
            )
            return made.requires_grad_(val.requires_grad)

    def run(self, node: fx.Node) -> Any:
        """Return the result of a call on known values."""
        args, named = fx.node.map_aggregate((node.args, node.kwargs), self._argument)  # type: ignore[misc]
        spec = spec_of(node)
        rule: Any = spec.fake if spec is not None and spec.kind is Kind.VIEW else node.target
        key = node.target, _form_of(args), _form_of(tuple(named.items()))
        if key not in self._made:
            with self._mode, torch.inference_mode(False), torch.no_grad():
                self._made[key] = rule(*args, **named)
        return self._made[key]

    def _argument(self, argument: Any) -> Any:
        return self.of[argument] if isinstance(argument, fx.Node) else at(argument, self._sizes)


def _form_of(given: Any) -> Any:
    """Return the properties of an argument that determine the form of the result."""
    if isinstance(given, Tensor):
        sizes = given.shape, given.stride(), (given.storage_offset(),)
        return *map(_form_of, sizes), given.dtype, given.device, type(given)
    if isinstance(given, (list, tuple)):
        return tuple(map(_form_of, given))
    return expression(given) if is_symbolic(given) else (type(given), given)


# -- A program at other sizes, and at all of them --------------------------------------------------


P = TypeVar("P", bound=Program)


def values_at(program: Program, mode: FakeTensorMode, sizes: Mapping[str, Any]) -> Values:
    """Return the values of all nodes of a program at some sizes, which may be symbols."""
    values = Values(mode, sizes)
    saved: list[Any] = []
    for name in (JOINT, FORWARD, BACKWARD):
        if name not in program.graphs:
            continue
        for node in program.graph(name).nodes:
            if node.op == "output":
                continue
            if info(node).role is Role.SAVED and name == BACKWARD:
                values.of[node] = saved[info(node).index]
            else:
                values.take(node)
        results = zip(program.outputs[name], program.results(name), strict=True)
        saved = [values.of[r] for spec, r in results if spec.role is Role.SAVED]
    return values


def with_sizes(program: P, sizes: Mapping[str, int]) -> P:
    """Return a copy of a program with its values at other sizes.

    Raises:
        ProgramError: the program has no such size, or does not serve these values.
    """
    if unknown := sizes.keys() - program.sizes.hints.keys():
        raise ProgramError(
            f"{program.model_name} has no size {', '.join(sorted(unknown))}. Those that vary are "
            f"{', '.join(f'{s.name} ({s.dims[0]})' for s in program.sizes.symbols) or 'none'}."
        )
    sizes = {**program.sizes.hints, **sizes}
    if not program.sizes.allow(sizes):
        raise ProgramError(
            f"{program.model_name} does not serve the sizes {dict(sizes)}. It serves those of at "
            "least 2 for which "
            f"{' and '.join(program.sizes.conditions) or 'nothing else is asked'}."
        )
    copied = program.clone()
    symbols = tuple(replace(s, hint=sizes[s.name]) for s in program.sizes.symbols)
    copied.sizes = replace(program.sizes, symbols=symbols)
    values = values_at(copied, new_fake_mode(), sizes)
    for gm in copied.graphs.values():
        for node in gm.graph.nodes:
            if node.op == "output":
                continue
            node.args, node.kwargs = fx.node.map_aggregate(
                (node.args, node.kwargs), lambda a: _moved(a, sizes)
            )  # type: ignore[assignment,misc]
            node.meta["val"] = values.of[node]
    return copied


def _moved(argument: Any, sizes: Mapping[str, int]) -> Any:
    is_size = isinstance(argument, (Size, Ratio))
    return type(argument)(at(argument, sizes), argument.text) if is_size else argument


def take_forms(program: Program) -> Sizes:
    """Record the form of every node's value; return the sizes that the program serves.

    These are at most those for which it was captured: its own operators may have further
    conditions.

    Raises:
        ProgramError: a value has a form at other sizes that differs from the captured one, or the
            program serves only one value of a size; the message names the node or the size.
    """
    symbols = Symbols(program.sizes.hints)
    written = Written(symbols, program.sizes.hints)
    values = values_at(program, symbols.mode(), symbols.sizes)
    for node, val in values.of.items():
        if isinstance(val, Tensor) and tuple(map(written, val.shape)) != tuple(value(node).shape):
            raise ProgramError(
                f"{program.model_name}: {node.name} has the shape {list(value(node).shape)}, which "
                f"its operators do not give it ({list(val.shape)})."
            )
        note_form(node, val, written)
    if constants := symbols.constants():
        names = [str(d) for s in program.sizes.symbols if s.name in constants for d in s.dims]
        raise ProgramError(
            f"{program.model_name}: a pass has fixed the value of {', '.join(names)}, which varies."
        )
    both = dict.fromkeys((*program.sizes.conditions, *symbols.conditions()))
    return replace(program.sizes, conditions=tuple(both))
