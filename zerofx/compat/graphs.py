"""Graph types: operators, fake tensors, trees, modes, lazy modules.

To read emitted source back, every op must be seen as it is dispatched on fake tensors. The mode
that shows them has no public name yet. Neither do the class of operator namespaces and the parts of
an operator's name. A GraphModule generates and compiles its Python at every assignment of its
graph, which takes a second for a deep model, although only a graph that is run needs it. torch's
lazy variant is private too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
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
    "copied_node",
    "known_values",
    "op_argument",
    "op_name",
    "pytree",
    "schema_of",
    "with_effects",
]


def copied_node(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    read: Callable[[torch.fx.Node], torch.fx.Node],
) -> torch.fx.Node:
    """Append a copy of a node to a graph of no module, with what it reads replaced by `read`.

    `Graph.node_copy` gives the same and takes several times as long: it looks for symbols in all
    arguments, and each attribute that is set afterwards moves the node in the graph's tables.
    """
    assert graph.owning_module is None, "hooks of the module would have to run"
    names = graph._graph_namespace
    name = names.create_name(node.name, None)
    args = torch.fx.node.map_arg(node.args, read)
    kwargs = torch.fx.node.map_arg(node.kwargs, read)
    made = torch.fx.Node(graph, name, node.op, node.target, args, kwargs, node.type)
    names.associate_name_with_obj(name, made)
    graph._insert(made)
    graph._find_nodes_lookup_table.insert(made)
    graph._len += 1
    made.meta.update(node.meta)
    return made


def reserve_names(graph: torch.fx.Graph) -> None:
    """Let later nodes of a graph have none of the names that its nodes were given by assignment.

    A graph counts only the names that it has made itself.
    """
    names = graph._graph_namespace
    for node in graph.nodes:
        if node.name not in names._used_names:
            names.create_name(node.name, None)


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
