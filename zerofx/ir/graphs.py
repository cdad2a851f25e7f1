"""Queries on fx graphs that several passes share."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zerofx.compat.graphs import (
    FakeTensor,
    OpOverload,
    argument_names,
    known_values,
    op_argument,
    op_name,
    schema_of,
)
from zerofx.compat.operators import in_place
from zerofx.ir.meta import Role, info, set_info, value
from zerofx.ir.program import Program, placeholders
from zerofx.ir.sizes import form
from zerofx.ir.spec import Carries, Kind, kind_of, spec_of
from zerofx.kernels.ops import FUSED
from zerofx.layout.buckets import Layout

# -- The fake value of a call, reused from an earlier call of the same form ------------------------
# Layers are alike, so a pass over a deep model makes the same few calls thousands of times,
# and each costs a fifth of a millisecond on fake tensors. A fake value contains only a form, so
# nodes may share one.


# Arguments that identify the buffer of a zerofx op and do not affect the form of its result.
_FORMLESS = frozenset({"bucket", "slot", "zero", "scale", "offsets", "name"})


def fake_value(target: Any, values: Sequence[Any], named: Mapping[str, Any], rule: Any) -> Any:
    """Return the result of `rule` for the values of a call's arguments.

    Calls with equal targets and forms share one value for as long as a node holds it.
    """
    if isinstance(target, OpOverload) and not schema_of(target).returns:
        return None
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is None or not isinstance(target, OpOverload):
        return rule(*values, **named)
    read = [v for i, v in enumerate(values) if i not in _formless(target)]
    key = target, _form(read), _form(list(named.items()))
    known = known_values(mode)
    found = known.get(key)
    if found is None:
        found = rule(*values, **named)
        if isinstance(found, torch.Tensor):
            known[key] = found
    return found


@functools.cache
def _formless(target: OpOverload) -> frozenset[int]:
    if target.namespace != "zerofx":
        return frozenset()
    return frozenset(i for i, name in enumerate(argument_names(target)) if name in _FORMLESS)


def _form(given: Any) -> Any:
    """Return the properties of an argument that determine the form of the result."""
    if isinstance(given, torch.Tensor):
        where = given.storage_offset(), given.dtype, given.device
        return tuple(given.shape), given.stride(), *where, type(given)
    if isinstance(given, (list, tuple)):
        return tuple(map(_form, given))
    return type(given), given


# -- Queries on fx graphs that several passes share ------------------------------------------------


_EXTRA_ALIASES = frozenset(  # their results share storage although their schemas do not say so
    f"aten::{name}"
    for name in (
        "_unsafe_view", "_reshape_alias", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk",
    )
)  # fmt: skip


def is_alias(node: fx.Node) -> bool:
    """Return whether the node's result may share storage with one of its inputs."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_alias(node.args[0])  # type: ignore[arg-type]
    return _may_alias(node.target)


@functools.cache
def _may_alias(target: Any) -> bool:
    schema = schema_of(target)
    if schema is None:
        return False
    if schema.name in _EXTRA_ALIASES:
        return True
    return any(r.alias_info is not None for r in schema.returns)


def alias_source(node: fx.Node) -> fx.Node:
    """Follow views back to the node that owns the storage (the node itself if it is not a view)."""
    while is_alias(node):
        node = next(a for a in node.args if isinstance(a, fx.Node))
    return node


# Views of all elements of a dense tensor, for every value of a size that varies.
_WHOLE_VIEWS = frozenset({
    f"aten::{name}" for name in (
        "view", "_unsafe_view", "unsqueeze", "squeeze", "detach", "alias", "t", "transpose",
        "permute",
    )
})  # fmt: skip


def whole_source(node: fx.Node) -> fx.Node:
    """Follow views of all elements back to the tensor, which may be a part of a larger one."""
    while isinstance(node.target, OpOverload) and schema_of(node.target).name in _WHOLE_VIEWS:
        node = node.all_input_nodes[0]
    return node


def is_broadcast(node: fx.Node) -> bool:
    """Return whether the node is a view in which several elements share one memory location."""
    val = node.meta.get("val")
    if not is_alias(node) or not isinstance(val, torch.Tensor):
        return False
    return any(step == 0 and size > 1 for step, size in zip(val.stride(), val.shape, strict=True))


def root_producer(node: fx.Node) -> fx.Node:
    """Follow getitems back to the call whose tuple they unpack."""
    while node.op == "call_function" and node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_compute(node: fx.Node) -> bool:
    """Return whether the node belongs in a region (anything that is not a zerofx op or glue)."""
    return node.op == "call_function" and spec_of(node) is None and not is_glue(node)


def is_fused(node: fx.Node) -> bool:
    """Return whether the node is a fused pattern: a zerofx kernel, in a region of its own."""
    return node.target in FUSED


def is_glue(node: fx.Node) -> bool:
    """Return whether the node unpacks the tuple of a zerofx op."""
    return node.target is operator.getitem and spec_of(root_producer(node)) is not None


def is_random(node: fx.Node) -> bool:
    """Return whether a node itself draws from a generator; attention without dropout does not."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return op_argument(node, "dropout_p") != 0.0


def regions(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Return the compute nodes of each region, in graph order."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        region = info(node).region
        if region is not None:
            found.setdefault(region, []).append(node)
    return found


def pause_of(graph: fx.Graph) -> fx.Node | None:
    """Return the node that divides a backward in two, None if nothing does."""
    return next((n for n in graph.nodes if kind_of(n) is Kind.PAUSE), None)


def after_pause(node: fx.Node) -> fx.Node:
    """Return the node, or the pause of its graph if that comes later."""
    pause = pause_of(node.graph)
    return node if pause is None or pause < node else pause


def users_after_views(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read `node` directly or through any chain of views."""
    for user in node.users:
        yield user
        if is_alias(user):
            yield from users_after_views(user)


def add_placeholder(
    graph: fx.Graph,
    label: str,
    val: torch.Tensor,
    role: Role,
    last: fx.Node | None = None,
    **fields: object,
) -> fx.Node:
    """Append a placeholder called `label` after the existing ones; `fields` are set on its Info.

    last: the last existing placeholder, if it is known; finding it requires a walk over all of
        them.
    """
    if last is None:
        last = next(reversed(placeholders(graph)), None)
    if last is None:
        point = graph.inserting_before(next(iter(graph.nodes)))
    else:
        point = graph.inserting_after(last)
    with point:
        node = graph.placeholder(label)
    node.meta["val"] = val
    set_info(node, role=role, **fields)
    return node


def call(
    graph: fx.Graph,
    target: object,
    args: tuple,
    like: fx.Node | None = None,
    named: Mapping[str, Any] | None = None,
    shares_value: bool = True,
) -> fx.Node:
    """Create a call at the graph's insertion point with its fake value computed.

    shares_value: calls of one form may share one value; False if values identify nodes.
    """
    named = dict(named or {})
    node = graph.call_function(target, args, named)  # type: ignore[arg-type]
    spec = spec_of(node)
    # a view's rule creates nothing, so it needs no fake mode around it
    rule: Any = spec.fake if spec is not None and spec.kind is Kind.VIEW else target
    values, named = value_of(args), {k: value_of(v) for k, v in named.items()}
    if shares_value:
        node.meta["val"] = fake_value(target, values, named, rule)
    else:
        node.meta["val"] = rule(*values, **named)
    if like is not None:
        set_info(node, **{k: getattr(info(like), k) for k in ("phase", "unit", "module", "line")})
    return node


def value_of(argument: Any) -> Any:
    """Return an argument with nodes replaced by their fake values."""
    if isinstance(argument, fx.Node):
        return argument.meta["val"]
    if isinstance(argument, (list, tuple)):
        return type(argument)(map(value_of, argument))
    return argument


def contiguous_stride(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor, as torch computes them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def is_in_place(node: fx.Node, layout: Layout) -> bool:
    """Return whether a gradient buffer is the memory that `p.grad` exposes after the reduction."""
    spec = spec_of(node)
    if spec is None:
        return False
    if spec.kind is not Kind.MAKE or spec.carries is not Carries.GRADIENTS:
        return False
    return layout.reduces_in_place(layout.buckets[info(node).index])


def set_results(graph: fx.Graph, results: Iterable[Any]) -> None:
    """Replace the output tuple."""
    out = graph.output_node()
    out.args = (tuple(results),)


def erase_unused(program: Program) -> int:
    """Erase nodes without users or effects, from back to front; return the number erased."""
    erased = 0
    for gm in program.graphs.values():
        for node in reversed(list(gm.graph.nodes)):
            if node.op in ("placeholder", "output") or node.users or node.is_impure():
                continue
            gm.graph.erase_node(node)
            erased += 1
    return erased


# -- operators that write over an operand ----------------------------------------------------------
# Graphs compute new values only. Where a region runs op by op, a sum of two gradients, a scaled
# value or a ReLU can have the memory of an operand that is read no more, which saves an allocation
# and a pass through the cache. The emitted region and the memory model both ask here.

COMMUTATIVE = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor})
# Results may be, or share, other memory than their schemas say.
_SHARING = frozenset({
    "channel_shuffle", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_cudnn_rnn",
    "_embedding_bag", "_embedding_bag_forward_only", "dequantize",
})  # fmt: skip


def overwrites(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return, for each node of a region that overwrites an argument, that argument's position.

    The argument was computed in the region, by an operator that allocates it, and is a whole tensor
    in the form of the result. Nothing reads its memory afterwards: neither the region, through any
    view, nor the rest of the program.

    nodes: of one region, in order.
    """
    written = [node for node in nodes if in_place(node.target) is not None]
    if not written:
        return {}
    inside = set(nodes)
    roots = {node: alias_source(node) for node in nodes}
    last: dict[fx.Node, fx.Node] = {}
    kept: set[fx.Node] = set()
    for node in nodes:
        if any(user not in inside for user in node.users):
            kept.add(roots[node])
        for read in node.all_input_nodes:
            if read in inside:
                last[roots[read]] = node
    found = {}
    for node in written:
        for position in range(2 if _commutes(node) else 1):
            operand = node.args[position]
            if not isinstance(operand, fx.Node) or operand not in inside:
                continue
            root = roots[operand]
            others = [roots.get(n) for n in node.all_input_nodes if n is not operand]
            if root not in inside or root in kept or last[root] is not node or root in others:
                continue
            if whole_source(operand) is root and _allocates(root) and _are_alike(node, operand):
                found[node] = position
                break
    return found


def _commutes(node: fx.Node) -> bool:
    return node.target in COMMUTATIVE and len(node.args) == 2 and not node.kwargs


def _allocates(root: fx.Node) -> bool:
    target = root_producer(root).target
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return False
    space, name, _ = op_name(target)
    return space == "aten" and name not in _SHARING


def _are_alike(node: fx.Node, operand: fx.Node) -> bool:
    one, other = value(node), value(operand)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.dtype is other.dtype and one.device == other.device and form(node) == form(operand)
