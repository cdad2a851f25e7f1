"""What a call leaves in a model's attributes: caches, flags, hooks, the latest shape.

A program does not repeat it. That is right if the next call finds the same and does the same: then
the attributes get what the call left in them, once, and the program is that of all later calls. So
a forward that changes attributes is traced twice, the second time in the state that it has left. It
has to leave that state alone, and to compute what it did at first. Tensors in caches are compared
by their values, which depend on constants alone.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerofx.capture.effects import Held, put_back
from zerofx.compat.graphs import pytree
from zerofx.compat.tracing import is_traced

ValueOf = Callable[[Tensor], Tensor | None]  # of a traced tensor, None if it varies
_MAX_NESTED = 4


@dataclass(frozen=True)
class Change:
    """A new value of one attribute of a module.

    path: the module's. content: what is in the value, if it is a container that was changed in
    place. is_read: whether forward looks at the value that was there before.
    """

    path: str
    name: str
    value: Any
    content: Any = None
    is_read: bool = True

    def apply(self, model: nn.Module) -> None:
        """Give the attribute its new value."""
        model.get_submodule(self.path).__dict__[self.name] = self.value
        if self.content is not None:
            put_back(self.value, self.content)


class Unreadable:
    """Stands in an attribute for a value that nothing may look at."""

    def _refuse(self, *_: Any) -> Any:
        raise _Varies

    __bool__ = __len__ = __iter__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __floordiv__ = __mod__ = __getitem__ = __setitem__ = __contains__ = __call__ = _refuse
    __hash__ = __int__ = __float__ = __index__ = __str__ = __repr__ = __format__ = _refuse

    def __getattr__(self, name: str) -> Any:
        raise _Varies


class _Varies(Exception):
    """A value differs from call to call."""


def changes_of(path: str, held: Held, value_of: ValueOf) -> list[Change] | None:
    """Return what a forward has left in a module's attributes.

    None if a later call cannot find it: a tensor that varies, or another child.
    """
    names = held.changed()
    found: list[Change] = []
    own = held.module.__dict__
    try:
        for name in names:
            if name not in own:
                return None
            value, (before, _) = own[name], held.attributes.get(name, (held, None))
            if value is not before:
                found.append(Change(path, name, _settled(value, value_of)))
                continue
            settled = _settled(value, value_of)  # a container whose content has changed
            if settled is value:
                return None  # a random generator
            found.append(Change(path, name, value, settled))
    except _Varies:
        return None
    return found


def _settled(value: Any, value_of: ValueOf, depth: int = 0) -> Any:
    """Return a value as the next call finds it: with real tensors in the place of traced ones.

    Raises:
        _Varies: it holds a tensor that is another at each call.
    """
    if isinstance(value, Tensor):
        real = value_of(value) if is_traced(value) else value
        if real is None or value.requires_grad != real.requires_grad:
            raise _Varies
        return real
    if depth > _MAX_NESTED:
        raise _Varies
    if type(value) in (list, tuple, set):
        return type(value)(_settled(v, value_of, depth + 1) for v in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((k, _settled(v, value_of, depth + 1)) for k, v in value.items())
    inside = getattr(value, "__dict__", {}) if not isinstance(value, (type, nn.Module)) else {}
    if any(map(is_traced, pytree.tree_leaves(list(inside.values())))):
        raise _Varies
    return value


def is_alike(one: Change | None, other: Change) -> bool:
    """Tell whether two calls leave the same in an attribute, tensors compared by their values."""
    if one is None or one.content is not None or other.content is not None:
        return False
    leaves, spec = pytree.tree_flatten(one.value)
    others, other_spec = pytree.tree_flatten(other.value)
    return spec == other_spec and all(map(_are_equal, leaves, others))


# -- Do two traces compute the same? ---------------------------------------------------------------
_UNSET = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


class _Traced:
    """A traced graph, its nodes that depend on constants alone, and the values of these."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self.constant: set[fx.Node] = set()
        self.other: list[fx.Node] = []
        self._values: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            if _is_constant(node) and all(n in self.constant for n in node.all_input_nodes):
                self.constant.add(node)
            else:
                self.other.append(node)

    def value(self, node: fx.Node) -> Any:
        """Compute a constant node."""
        pending = [node]
        while pending:
            top = pending[-1]
            missing = [n for n in top.all_input_nodes if n not in self._values]
            if missing:
                pending += missing
                continue
            pending.pop()
            if top.op == "get_attr":
                self._values[top] = operator.attrgetter(str(top.target))(self._gm)
            elif top not in self._values:
                args, kwargs = fx.node.map_arg((top.args, top.kwargs), self._values.__getitem__)
                with torch.no_grad():
                    self._values[top] = top.target(*args, **kwargs)  # type: ignore[operator]
        return self._values[node]


def _is_constant(node: fx.Node) -> bool:
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    tags = getattr(node.target, "tags", (torch.Tag.nondeterministic_seeded,))
    is_random = torch.Tag.nondeterministic_seeded in tags
    is_call = node.op == "call_function" and not node.is_impure() and not is_random
    return is_call and node.target not in _UNSET


def is_same(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Tell whether two traces compute the same of their inputs, call by call."""
    a, b = _Traced(one), _Traced(other)
    pairs: dict[fx.Node, fx.Node] = {}
    if len(a.other) != len(b.other):
        return False
    for left, right in zip(a.other, b.other, strict=True):
        if (left.op, left.target) != (right.op, right.target) and left.op != "placeholder":
            return False
        if not _have_same_arguments(left, right, a, b, pairs):
            return False
        pairs[left] = right
    return True


def _have_same_arguments(
    left: fx.Node, right: fx.Node, a: _Traced, b: _Traced, pairs: dict[fx.Node, fx.Node]
) -> bool:
    ours, spec = pytree.tree_flatten((left.args, left.kwargs))
    theirs, other_spec = pytree.tree_flatten((right.args, right.kwargs))
    if spec != other_spec:
        return False
    for mine, its in zip(ours, theirs, strict=True):
        if not isinstance(mine, fx.Node):
            if type(mine) is not type(its) or mine != its:
                return False
        elif mine in a.constant:
            if its not in b.constant:
                return False
            if pairs.get(mine) is its:
                continue
            is_same_call = mine.op != "get_attr" and mine.target is its.target
            is_alike = is_same_call and _have_same_arguments(mine, its, a, b, pairs)
            if not is_alike and not _are_equal(a.value(mine), b.value(its)):
                return False
            pairs[mine] = its
        elif pairs.get(mine) is not its:
            return False
    return True


def _are_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    forms = [(t.shape, t.stride(), t.dtype, t.device) for t in (one, other)]
    return forms[0] == forms[1] and torch.equal(one.nan_to_num(), other.nan_to_num())
