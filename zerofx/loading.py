"""From an emitted directory to something that runs: import it, and say what it takes and gives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir import ops
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import BACKWARD, FORWARD, Program
from zerofx.plan import Plan
from zerofx.runtime.engine import Engine
from zerofx.runtime.layout import Layout
from zerofx.runtime.regions import import_file
from zerofx.runtime.step import Contract, Executable


def bind(
    program: Program, directory: Path, engine: Engine, buffers: Callable[[], dict[str, Tensor]]
) -> Executable:
    """Import the schedule that was emitted and bind it to an engine."""
    module = import_file(directory / "schedule.py", f"zerofx_program_{directory.name}")
    backward = module.backward if program.is_training else None
    return Executable(module.forward, backward, contract(program), engine, buffers)


def contract(program: Program) -> Contract:
    """Return what the program's functions take and give."""
    specs = program.outputs[FORWARD]
    outputs = [s for s in specs if s.role is Role.OUTPUT]
    calling = program.calling
    tangents: dict[int, Any] = {}
    input_grads: list[int] = []
    if program.is_training:
        for node in program.placeholders(BACKWARD, Role.TANGENT):
            val = value(node)
            tangents[info(node).index] = (tuple(val.shape), tuple(val.stride()), val.dtype)
        input_grads = [s.index for s in program.outputs[BACKWARD] if s.role is Role.INPUT_GRAD]
    updates: list[tuple[str, str | int]] = [
        ("buffer", s.name) for s in specs if s.role is Role.BUFFER_UPDATE
    ]
    updates += [("input", s.index) for s in specs if s.role is Role.INPUT_UPDATE]
    return Contract(
        outputs=tuple(s.index for s in outputs),
        differentiable=frozenset(calling.differentiable),
        names=dict(enumerate(calling.output_names)),
        tangents=tangents,
        input_grads=tuple(input_grads),
        updates=tuple(updates),
        guarded=_guarded(program),
        is_training=program.is_training,
        is_random=any(info(n).is_random for gm in program.graphs.values() for n in gm.graph.nodes),
        label=program.model_name,
        digest=collective_digest(program),
    )


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


def forward_slots(program: Program) -> set[int]:
    """Return the slots that forward gathers into."""
    gathers = [n for n in program.graph(FORWARD).nodes if n.target is ops.all_gather]
    return {n.args[3] for n in gathers if len(n.args) == 4 and n.args[3] >= 0}


def _guarded(program: Program) -> tuple[int, ...]:
    """Return the positions of saved values that the user holds too: inputs and outputs."""
    results = program.results(FORWARD)
    specs = program.outputs[FORWARD]
    handed_out = {r for s, r in zip(specs, results, strict=True) if s.role is Role.OUTPUT}
    saved = [r for s, r in zip(specs, results, strict=True) if s.role is Role.SAVED]
    return tuple(
        i
        for i, node in enumerate(saved)
        if isinstance(node, fx.Node) and (info(node).role is Role.INPUT or node in handed_out)
    )
