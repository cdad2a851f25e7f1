"""Roles: labels for a traced graph: an Info on every node, roles, named outputs."""

from __future__ import annotations

import dis
import heapq
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from zerofx.capture.call import Call
from zerofx.capture.harness import Results
from zerofx.capture.lines import LINE, MODULE
from zerofx.compat.graphs import pytree
from zerofx.compat.tracing import describe_placeholder, describe_results
from zerofx.errors import CaptureError
from zerofx.ir.graphs import is_random
from zerofx.ir.meta import KEY, Info, OutputInfo, Phase, Role, info, value

_PREFIX = "model."

_ROLES = {
    "param": Role.PARAM,
    "buffer": Role.BUFFER,
    "input": Role.INPUT,
    "tangent": Role.TANGENT,
    "output": Role.OUTPUT,
    "grad": Role.GRAD,
    "input-grad": Role.INPUT_GRAD,
    "buffer-update": Role.BUFFER_UPDATE,
    "input-update": Role.INPUT_UPDATE,
}


def label_nodes(gm: fx.GraphModule, unit_of: Callable[[str], str]) -> None:
    """Set phase, module, line, unit and randomness of every node except the placeholders."""
    by_seq: dict[int | None, Info] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        phase = _phase(node)
        custom = node.meta.get("custom") or {}
        module, line = custom.get(MODULE), custom.get(LINE, "")
        seq = node.meta.get("seq_nr")
        if phase is Phase.BACKWARD or module is None or not line:
            module, line = _inherit(node, by_seq.get(seq), module, line)
        made = Info(
            phase=phase,
            module=module or "",
            line=line,
            unit=unit_of(module or ""),
            is_random=is_random(node),
        )
        node.meta[KEY] = made
        if phase is Phase.FORWARD and seq is not None and made.line:
            by_seq.setdefault(seq, made)


def _phase(node: fx.Node) -> Phase:
    tag = node.meta.get("partitioner_tag")
    is_backward = tag == "is_backward" or node.meta.get("autograd_backward", False)
    return Phase.BACKWARD if is_backward else Phase.FORWARD


def _inherit(
    node: fx.Node, forward: Info | None, module: str | None, line: str
) -> tuple[str | None, str]:
    """Take module and line from the forward node of the same autograd node, or from an operand."""
    sources = [forward] if forward is not None else []
    sources += [info(a) for a in node.all_input_nodes if a.op == "call_function"]
    for source in sources:
        if source.line:
            return module if module is not None else source.module, line or source.line
    return module, line


@dataclass(frozen=True)
class Names:
    """The user's names for the positions and names of the traced call.

    units: parameter -> unit. buffers: each name of a buffer -> its first one.
    numbers: the leaves that are varying numbers, which the graph takes after the tensors.
    """

    call: Call
    results: Results
    units: dict[str, str]
    buffers: dict[str, str]
    numbers: tuple[int, ...] = ()

    def place(self, role: Role, what: Any) -> tuple[str, int]:
        """Return (name, index) for the tracer's identifier `what`."""
        if role in (Role.INPUT, Role.INPUT_GRAD, Role.INPUT_UPDATE):
            index = (*self.call.tensors, *self.numbers)[what]
            return self.call.names[index], index
        if role in (Role.OUTPUT, Role.TANGENT):
            index = self.results.tensors[what]
            return self.results.names[index], index
        name = str(what).removeprefix(_PREFIX)
        return self.buffers.get(name, name), -1


def label_placeholders(gm: fx.GraphModule, names: Names) -> None:
    """Set the role, name and index of every placeholder; drop those that nothing reads.

    The names of one buffer become one placeholder. (Those of a parameter remain separate, with a
    gradient each, until `merge-tied`.)
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    buffers: dict[str, fx.Node] = {}
    for node in placeholders:
        kind, what = describe_placeholder(node)
        role = _ROLES.get(kind)
        if role is None:
            raise CaptureError(f"capture: the traced graph has an input of no known role: {what}.")
        name, index = names.place(role, what)
        if role is Role.BUFFER and buffers.setdefault(name, node) is not node:
            node.replace_all_uses_with(buffers[name])
        node.meta[KEY] = Info(
            phase=Phase.BACKWARD if role is Role.TANGENT else Phase.FORWARD,
            role=role,
            name=name,
            index=index,
            unit=names.units.get(name, "") if role is Role.PARAM else "",
        )
    for node in placeholders:
        if not node.users and info(node).role is not Role.TANGENT:
            gm.graph.erase_node(node)


def label_results(gm: fx.GraphModule, names: Names) -> tuple[OutputInfo, ...]:
    """Describe each element of the output tuple; drop gradients that are None."""
    output = gm.graph.output_node()
    kept: list[fx.Node] = []
    infos: list[OutputInfo] = []
    described = describe_results(output)
    for node, (kind, what) in zip(output.args[0], described, strict=True):  # type: ignore[arg-type]
        if node is None:
            continue
        role = _ROLES.get(kind)
        if kind == "param-update":
            line = info(node).line
            raise CaptureError(
                f"capture: forward changes the parameter {str(what).removeprefix(_PREFIX)} in "
                f"place{f' at {line}' if line else ''}. Make it a buffer, or update it after "
                "optimizer.step()."
            )
        if role is None:
            raise CaptureError(f"capture: the traced graph returns what has no known role: {what}.")
        infos.append(OutputInfo(role, *names.place(role, what)))
        if role is Role.GRAD and value(node).layout is not torch.strided:
            raise CaptureError(
                f"capture: the gradient of {infos[-1].name} is sparse and has no fixed size (from "
                f"{info(node).line}). Use the embedding with sparse=False."
            )
        kept.append(node)
    output.args = (tuple(kept),)
    output.meta.pop("desc", None)
    return tuple(infos)


# -- One order for all ranks ----------------------------------------------------------------------
# A loop over a set of texts runs in an order that differs between processes: torchrun's ranks hash
# texts differently. What it computes is the same, and so are the places in the code, one after the
# other. Several models of transformers make one table of positions for each kind of layer so.

_MAKES_SET = dis.opmap["BUILD_SET"]


def loops_over_sets(methods: Mapping[type, str]) -> bool:
    """Return whether a method of a class, or one that it calls, makes a set to loop over.

    methods: class -> the name of its method.
    """
    return any(_makes_set_in(each, method, set()) for each, method in methods.items())


def _makes_set_in(kind: type, method: str, seen: set[str]) -> bool:
    seen.add(method)
    for base in kind.__mro__:  # a compiled model's own class has another forward
        function = inspect.unwrap(vars(base).get(method))  # type: ignore[arg-type]
        if base is nn.Module or not isinstance(function, FunctionType):
            continue
        called = set(function.__code__.co_names) - seen
        if _makes_set(function.__code__) or any(_makes_set_in(kind, n, seen) for n in called):
            return True
    return False


def _makes_set(code: CodeType) -> bool:
    if not {"set", "frozenset"}.isdisjoint(code.co_names) or _MAKES_SET in code.co_code[::2]:
        return True
    return any(_makes_set(c) for c in code.co_consts if isinstance(c, CodeType))


def put_in_one_order(graph: fx.Graph) -> None:
    """Order operators of the same place in the code by what they read, not by when they ran.

    The places keep their order, and the names theirs. Of equal operators one stays: nothing else
    would tell them apart. Operators that draw random numbers or have effects are not moved. If one
    of these, or another operator, then came before what it reads, the graph stays as it is.
    """
    order = _Order(list(graph.nodes))
    if not order.is_found() or (order.after == order.before and not order.equal):
        return
    for node, first in order.equal.items():
        node.replace_all_uses_with(first)
    for last, node in pairwise(order.after):
        if last.next is not node:
            last.append(node)
    for node in reversed(order.equal):
        graph.erase_node(node)
    for node, name in zip(order.after, order.names, strict=True):
        node.name = name


class _Order:
    """The search for that order.

    after: the nodes in it; names: theirs. equal: node -> an equal one that stays.
    """

    def __init__(self, before: list[fx.Node]) -> None:
        self.before, self.after = before, list[fx.Node]()
        self.names: list[str] = []
        self.equal: dict[fx.Node, fx.Node] = {}
        self._number = {node: i for i, node in enumerate(before)}
        self._left = {node: len(node.all_input_nodes) for node in before}
        self._class = _classes(before)
        self._place: dict[fx.Node, int] = {}
        self._known: dict[Hashable, fx.Node] = {}
        self._ready: dict[Hashable, list[tuple[Any, int, fx.Node]]] = {}
        self._gone: Counter[Hashable] = Counter()  # places that equal nodes leave empty

    def is_found(self) -> bool:
        """Find the order; return whether there is one."""
        for node in [n for n in self.before if not self._left[n]]:
            self._offer(node)
        for at in self.before:
            kind = self._class[at]
            if not self._ready.get(kind):
                if not self._gone[kind]:
                    return False
                self._gone[kind] -= 1
                continue
            read, _, node = heapq.heappop(self._ready[kind])
            self._known[kind, read] = node
            self.names.append(at.name)
            self.after.append(node)
            self._put(node, len(self.after))
            while self._ready[kind] and self._ready[kind][0][0] == read:
                self._merge(heapq.heappop(self._ready[kind])[2], node)
        return True

    def _put(self, node: fx.Node, place: int) -> None:
        self._place[node] = place
        for user in node.users:
            self._left[user] -= 1
            if not self._left[user]:
                self._offer(user)

    def _offer(self, node: fx.Node) -> None:
        leaves, form = pytree.tree_flatten((node.args, node.kwargs))
        read = tuple(_operand(leaf, self._place) for leaf in leaves), str(form)
        kind = self._class[node]
        if (kind, read) in self._known:
            self._merge(node, self._known[kind, read])
        else:
            heapq.heappush(self._ready.setdefault(kind, []), (read, self._number[node], node))

    def _merge(self, node: fx.Node, first: fx.Node) -> None:
        self.equal[node] = first
        self._gone[self._class[node]] += 1
        self._put(node, self._place[first])


def _classes(nodes: Sequence[fx.Node]) -> dict[fx.Node, Hashable]:
    """Return the classes of operators that may change places: others are a class by themselves.

    They are at the same place in the code, and all that they were computed from has the same form.
    """
    numbers: dict[Hashable, int] = {}
    form: dict[fx.Node, int] = {}
    found: dict[fx.Node, Hashable] = {}
    for node in nodes:
        where, val = info(node), value(node)
        shape = (tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else ()
        leaves, tree = pytree.tree_flatten((node.args, node.kwargs))
        read = tuple(("node", form[a]) if isinstance(a, fx.Node) else str(a) for a in leaves)
        called = (where.module, where.line, node.target) if node.op == "call_function" else ()
        made = node.op, where.phase, where.role, called, shape, read, str(tree)
        form[node] = numbers.setdefault(made, len(numbers))
        is_fixed = not called or where.is_random or node.is_impure()
        found[node] = node if is_fixed else form[node]
    return found


def _operand(given: Any, place: Mapping[fx.Node, int]) -> tuple[int, float, str]:
    if isinstance(given, fx.Node):
        return 0, place[given], ""
    if isinstance(given, (bool, int, float)):
        return 1, given, type(given).__name__
    return 2, 0, str(given)
