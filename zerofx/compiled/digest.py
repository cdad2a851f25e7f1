"""What ranks compare before they run together, as text that an error can show."""

from __future__ import annotations

import hashlib

import torch

from zerofx.ir import ops
from zerofx.ir.program import Program
from zerofx.plan import Plan
from zerofx.runtime.layout import Layout


def collective_digest(program: Program) -> str:
    """Describe what ranks must agree on: the sequence of collectives, the plan, the versions.

    Shapes of activations are left out: ranks with other sequence lengths may run together.
    """
    assert program.layout is not None
    launches = [
        (name, str(n.target), n.args[1:4] if n.target in ops.LAUNCHES else len(n.args[0]))
        for name, gm in program.graphs.items()
        for n in gm.graph.nodes
        if n.target in ops.LAUNCHES or n.target is ops.sync_buffers
    ]
    sequence = hashlib.sha256(repr(launches).encode()).hexdigest()[:12]
    return (
        f"collectives={len(launches)}:{sequence};model={program.model_name};"
        f"{describe_layout(program.layout, program.plan)}"
    )


def describe_layout(layout: Layout, plan: Plan) -> str:
    """Describe what shards depend on, as the items that an agreement's error can show."""
    digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:12]
    fields = ";".join(f"plan.{k}={v}" for k, v in sorted(plan.to_dict().items()))
    return (
        f"buckets={len(layout.buckets)};layout={digest};{fields};torch={torch.__version__};"
        f"deterministic={torch.are_deterministic_algorithms_enabled()}"
    )
