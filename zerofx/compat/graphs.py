"""Graph types: operators, fake tensors, trees, modes, lazy modules.

To read emitted source back, every op must be seen as it is dispatched on fake tensors. The mode
that shows them has no public name yet. Neither do the class of operator namespaces and the parts of
an operator's name. A GraphModule generates and compiles its Python at every assignment of its
graph, which takes a second for a deep model, although only a graph that is run needs it. torch's
lazy variant is private too.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._higher_order_ops.effects import with_effects
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "LazyGraphModule",
    "OpNamespace",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "argument_names",
    "known_values",
    "op_argument",
    "op_name",
    "pytree",
    "schema_of",
    "with_effects",
]


def op_argument(node: torch.fx.Node, name: str) -> Any:
    """Return the value that an ATen node passes for a schema argument, or None if there is none."""
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(name)
            return argument.default_value if given is None else given
    return None


OpNamespace: type = type(torch.ops.aten)


def schema_of(target: Any) -> Any:
    """Return the schema of an operator (its arguments, results and writes), or None."""
    return getattr(target, "_schema", None)


def op_name(op: OpOverload) -> tuple[str, str, str]:
    """Return (namespace, name, overload) of an operator: ("aten", "mm", "default")."""
    space, name = op._schema.name.split("::")
    return space, name, op._overloadname


@functools.cache
def argument_names(op: Any) -> tuple[str, ...]:
    """Return the names of an operator's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


def known_values(mode: FakeTensorMode) -> MutableMapping[Any, torch.Tensor]:
    """Return a table of fake values that is stored on their mode and drops unused values.

    The table must not hold the values itself: they hold their mode, through C++ references that the
    garbage collector does not see.
    """
    found = vars(mode).setdefault("zerofx_known_values", WeakValueDictionary())
    assert isinstance(found, WeakValueDictionary)
    return found
