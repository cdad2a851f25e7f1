"""Digests that ranks compare before they run together, as text that an error can show."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import fx

from zerofx.compat.graphs import OpOverload, argument_names
from zerofx.ir.meta import info
from zerofx.ir.program import Planned, Program
from zerofx.ir.sizes import describe_node
from zerofx.ir.spec import spec_of
from zerofx.ir.text import escaped, short_dtype
from zerofx.ir.verify import constants
from zerofx.layout.buckets import Layout
from zerofx.plan.plan import Plan


def collective_digest(program: Planned) -> str:
    """Describe what ranks must agree on: the sequence of collectives, the plan, the versions.

    Shapes of activations are left out, so ranks with different sequence lengths may run together.
    """
    launches = [
        (name, str(n.target), constants(n) if spec.is_sync or spec.is_value else n.args[1:4])
        for name, gm in program.graphs.items()
        for n in gm.graph.nodes
        if (spec := spec_of(n)) is not None and spec.is_agreed
    ]
    sequence = hashlib.sha256(repr(launches).encode()).hexdigest()[:12]
    return (
        f"collectives={len(launches)}:{sequence};model={program.model_name};"
        f"{describe_layout(program.layout, program.plan)}"
    )


def describe_layout(layout: Layout, plan: Plan) -> str:
    """Describe what shards depend on, as items that an agreement's error can show."""
    digest = layout_digest(layout)
    fields = ";".join(f"plan.{k}={v}" for k, v in sorted(plan.to_dict().items()))
    return (
        f"buckets={len(layout.buckets)};layout={digest};{fields};torch={torch.__version__};"
        f"deterministic={torch.are_deterministic_algorithms_enabled()}"
    )


def layout_digest(layout: Layout) -> str:
    """Return the digest that represents a layout among the items of `describe_layout`."""
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:12]


def describe_parameters(layout: Layout) -> str:
    """Return the parameters of a layout, "name<tab>dtype[shape]" per line.

    Ranks whose layouts differ compare it to name the first parameter that differs.
    """
    return "\n".join(
        f"{escaped(name)}\t{short_dtype(bucket.dtype)}{list(param.whole_shape)}"
        + ("" if bucket.trainable else " frozen")
        for name, [(bucket, param), *_] in layout.owned.items()
    )


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)


def describe_graph(program: Program) -> str:
    """Describe a program's computation, one operator per line, with the user's line after a tab.

    A tensor appears as the number of the line that creates it, a device without its index. Names of
    process groups are left out, because they differ between the replicas of a tensor-parallel
    model. So are values of tensors that the model itself holds, because each rank may hold its own,
    and the numbers in a model that brings its own slices: a part of a vocabulary has other bounds
    on each rank.
    """
    lines: list[str] = []
    is_sliced = any(p.part is not None and p.part.is_given for p in program.params.values())
    for gm in program.graphs.values():
        number: dict[fx.Node, int] = {}

        def text(value: Any, number: dict[fx.Node, int] = number) -> str:
            if isinstance(value, fx.Node):
                return f"%{number[value]}"
            if isinstance(value, (tuple, list)):
                return f"[{', '.join(text(v) for v in value)}]"
            if isinstance(value, torch.device):
                return value.type
            if is_sliced and type(value) in (int, float):
                return type(value).__name__
            return str(value) if isinstance(value, _PLAIN) else type(value).__name__

        for node in gm.graph.nodes:
            where = info(node)
            if node.op == "placeholder":
                role = where.role.value if where.role else "input"
                name, called = f"{role} {where.name}", _form(node)
            elif node.op == "call_function":
                is_op = isinstance(node.target, OpOverload)
                name = str(node.target) if is_op else getattr(node.target, "__name__", "call")
                names = argument_names(node.target) if is_op else ()
                shown = [v for i, v in enumerate(node.args) if names[i : i + 1] != ("group_name",)]
                named = [f"{k}={text(v)}" for k, v in node.kwargs.items() if k != "group_name"]
                called = ", ".join([*map(text, shown), *named])
            else:
                name, called = node.op, text(node.args) if node.op == "output" else ""
            module = f" in {where.module}" if where.module else ""
            lines.append(f"{name}({called}){module}" + (f"\t{where.line}" if where.line else ""))
            number[node] = len(number)
    return "\n".join(lines)


def graph_hashes(sizes: str, captured: str) -> bytes:
    """Return 8 bytes that identify the sizes of a call's inputs, and 8 that identify its graph.

    The user's lines are left out, because a rank's source may have a different comment.
    """
    texts = sizes.encode(), re.sub(r"\t.*", "", captured).encode()
    return b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)


def _form(node: fx.Node) -> str:
    val = node.meta.get("val")
    return describe_node(node) if isinstance(val, torch.Tensor) else type(val).__name__
