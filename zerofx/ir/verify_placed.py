"""Placement typing: every value of a placed program lies as what reads it needs.

The walk follows how each value lies from parameters, inputs and conversions, and accepts a call
only as one of the ways that the rule table has (`ir.placing`). What a node notes of the whole call
that it stands for is checked against what the rule makes of that; the digests of the proof are of
whole calls. So a program that passes computes on all ranks together what was captured: a sum that
was left out, doubled or made over other dimensions leaves a value lying as no reader may take it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import Fact
from zerofx.ir.meta import Placed, Role, info, value
from zerofx.ir.placing import AXIS, Call, Operand, Way, filled, is_item, item, ways
from zerofx.ir.program import BACKWARD, FORWARD, JOINT, Planned
from zerofx.ir.spec import Kind, spec_of
from zerofx.ir.verify_fault import fault, name_of
from zerofx.ir.verify_values import SAME_VALUES
from zerofx.layout.placements import Placement, R, local_shape


def check_placed(program: Planned) -> None:
    """Check how the values of a program lie, where the pass `place` has cut any.

    Raises:
        ProgramError: names the value, how it lies, and what was needed.
    """
    if Fact.PLACED not in program.facts or program.plan.parallel.tensor == 1:
        return
    saved: list[Any] = []
    for name in (JOINT, FORWARD, BACKWARD):
        if name in program.graphs:
            saved = _Typing(program, name, saved).run()


class _Typing:
    """Walks one graph. lies: node -> placement, or one for each tensor of a tuple; None: no value.

    shapes: node -> whole shape, or one for each. saved: how what forward saved lies, with shapes.
    """

    def __init__(self, program: Planned, name: str, saved: list[Any]) -> None:
        self.program, self.name, self.saved = program, name, saved
        self.ranks = program.plan.parallel.tensor
        self.lies: dict[fx.Node, Any] = {}
        self.shapes: dict[fx.Node, Any] = {}
        self.at = {(b.index, p.offset): p for b in program.layout.buckets for p in b.params}

    def run(self) -> list[Any]:
        kept: list[Any] = []
        for node in self.program.graph(self.name).nodes:
            if node.op == "output":
                kept = self._results(node)
            elif node.op == "placeholder":
                self._note(node, *self._given(node))
            elif node.op == "get_attr":
                self._note(node, R, _shape(node))
            elif is_item(node):
                source, index = node.args
                shape = self.shapes[source]  # type: ignore[index]
                lies = self.lies[source]  # type: ignore[index]
                self._note(node, item(lies, index), shape[index] if shape else _shape(node))  # type: ignore[arg-type,index]
            elif (spec := spec_of(node)) is not None and info(node).placed is None:
                self._op(node, spec)
            elif spec is not None and spec.lies is not None:
                self._conversion(node, spec)
            else:
                self._call(node)
        return kept

    def _note(self, node: fx.Node, lies: Any, shape: Any) -> None:
        self.lies[node], self.shapes[node] = lies, shape

    def _fail(self, node: fx.Node, message: str) -> None:
        raise fault(self.program, self.name, node, message)

    def _given(self, node: fx.Node) -> tuple[Any, Any]:
        where = info(node)
        if where.role is Role.PARAM:
            part = self.program.params[where.name].part
            return (part.cut, part.shape) if part else (R, _shape(node))
        if where.role is Role.SAVED and 0 <= where.index < len(self.saved):
            return self.saved[where.index]
        return R, _shape(node)

    def _op(self, node: fx.Node, spec: Any) -> None:
        """Note what an op of zerofx gives that changes no value."""
        if spec.kind is Kind.VIEW:
            full: Any
            offset: Any
            full, offset, _ = node.args
            piece = self.at.get((info(full).index, offset))
            part = piece.part if piece is not None else None
            self._note(node, part.cut if part else R, part.shape if part else _shape(node))
            return
        if spec.kind is Kind.PACK:
            self._packed(node)
        tensors = node.all_input_nodes
        follows = spec.is_value or spec.kind is Kind.WAIT
        source = tensors[0] if tensors and follows else None
        if source is not None:
            self._note(node, self.lies[source], self.shapes[source])
        else:
            self._note(node, R, _shape(node))

    def _packed(self, node: fx.Node) -> None:
        grads: Any
        offsets: Any
        _, grads, offsets = node.args
        for grad, offset in zip(grads, offsets, strict=True):
            piece = self.at[info(node).index, offset]
            due = piece.part.cut if piece.part else R
            if self.lies[grad] != due:
                self._fail(
                    node,
                    f"the gradient of {piece.name} lies as {self.lies[grad]} ({name_of(grad)}), "
                    f"its parameter as {due}",
                )

    def _conversion(self, node: fx.Node, spec: Any) -> None:
        source = node.all_input_nodes[0]
        if node.args[1] != AXIS:
            self._fail(
                node, f"{node.name} is over the axis {node.args[1]!r}; values are over {AXIS}"
            )
        found = spec.lies(self.lies[source], self.shapes[source], node.args[2:], self.ranks)
        if not isinstance(found, Placement):
            self._fail(
                node,
                f"{node.name} is given {name_of(source)}, which lies as {self.lies[source]} over "
                f"{self.ranks} ranks; {found}",
            )
        self._note(node, found, self.shapes[source])

    def _call(self, node: fx.Node) -> None:
        placed, tensors = info(node).placed, _tensors(node)
        if placed is None or placed.target is None:
            self._plain(node, tensors)
            return
        if info(node).is_random and any(self.lies[t] != R for t in tensors):
            self._fail(node, f"{node.name} draws for a part, and all ranks draw the same numbers")
        call = self._whole(node, placed, tensors)
        now = tuple(o.now for o in call.operands)
        for way in ways(call):
            if (
                way.needs == now
                and way.gives == placed.gives
                and _is_local(way, call, node, tensors)
            ):
                break
        else:
            told = ", ".join(f"{name_of(t)} {self.lies[t]}" for t in tensors)
            self._fail(
                node,
                f"{node.name} ({placed.target}) cannot give {placed.gives} of {told or 'nothing'}: "
                "no rule has this way",
            )
        self._note(node, placed.gives, placed.shape)
        self._check_shape(node, placed)

    def _plain(self, node: fx.Node, tensors: list[fx.Node]) -> None:
        """Take a call that a later pass made: of whole values, or a copy of one as it lies."""
        if all(self.lies[t] == R for t in tensors):
            val = value(node)
            is_one = isinstance(val, torch.Tensor)
            self._note(node, R if is_one else (R,) * len(val), _shape(node))
        elif node.target in SAME_VALUES and len(tensors) == 1 and _is_copy(node, tensors[0]):
            self._note(node, self.lies[tensors[0]], self.shapes[tensors[0]])
        else:
            told = ", ".join(f"{name_of(t)} {self.lies[t]}" for t in tensors)
            self._fail(node, f"{node.name} reads {told}, and no pass says how")

    def _whole(self, node: fx.Node, placed: Placed, tensors: list[fx.Node]) -> Call:
        operands = tuple(Operand(tuple(self.shapes[t]), self.lies[t]) for t in tensors)
        if placed.shape and isinstance(placed.shape[0], (tuple, type(None))):
            result: Any = [SimpleNamespace(shape=shape) for shape in placed.shape]
        else:
            result = SimpleNamespace(shape=placed.shape)
        hints = (placed.gives,) if _is_cut(placed.gives) else ()
        return Call(placed.target, placed.args, placed.kwargs, operands, result, self.ranks, hints)

    def _check_shape(self, node: fx.Node, placed: Placed) -> None:
        val = value(node)
        if isinstance(val, torch.Tensor):
            whole = [(val, placed.shape, placed.gives)]
        else:
            whole = [
                (v, s, item(placed.gives, i))
                for i, (v, s) in enumerate(zip(val, placed.shape, strict=True))
            ]
        for made, shape, gives in whole:
            if isinstance(made, torch.Tensor) and list(made.shape) != local_shape(
                shape, gives, self.ranks
            ):
                self._fail(
                    node,
                    f"{node.name} has shape {list(made.shape)}; the part of {list(shape)} that "
                    f"lies as {gives} has {local_shape(shape, gives, self.ranks)}",
                )

    def _results(self, node: fx.Node) -> list[Any]:
        kept: list[Any] = []
        specs = self.program.outputs[self.name]
        for spec, result in zip(specs, self.program.results(self.name), strict=True):
            if spec.role is Role.SAVED:
                known = isinstance(result, fx.Node)
                kept.append((self.lies[result], self.shapes[result]) if known else (R, ()))
                continue
            if not isinstance(result, fx.Node) or spec.role is Role.SHARD_GRAD:
                continue
            due: Any = R
            if spec.role is Role.GRAD and (part := self.program.params[spec.name].part):
                due = part.cut
            if self.lies[result] != due:
                self._fail(
                    node,
                    f"{spec.role.value} {spec.name} lies as {self.lies[result]}; it must lie as "
                    f"{due}",
                )
        return kept


def _tensors(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found


def _is_cut(gives: Any) -> bool:
    return isinstance(gives, Placement) and hasattr(gives, "dim")


def _is_local(way: Way, call: Call, node: fx.Node, tensors: list[fx.Node]) -> bool:
    """Say whether a node is the call that a way has one rank make."""
    spec = spec_of(node)
    name = spec.name if spec is not None else ""
    if name != way.op or (not name and node.target is not call.target):
        return False
    args = way.args if way.args is not None else call.args
    local = _plain_list(filled(args, tensors)), _plain_list(filled(call.kwargs, tensors))
    return local == (_plain_list(node.args), _plain_list(node.kwargs))


def _plain_list(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_plain_list(a) for a in argument]
    if isinstance(argument, dict):
        return {k: _plain_list(v) for k, v in argument.items()}
    return argument


def _is_copy(node: fx.Node, source: fx.Node) -> bool:
    return list(value(node).shape) == list(value(source).shape)


def _shape(node: fx.Node) -> Any:
    val = value(node)
    if isinstance(val, torch.Tensor):
        return tuple(val.shape)
    if isinstance(val, (list, tuple)):
        return tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in val)
    return ()
