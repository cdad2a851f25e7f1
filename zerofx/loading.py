"""From an emitted directory to something that runs: import it, and say what it takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import BACKWARD, FORWARD, Program
from zerofx.runtime.engine import Engine
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
        is_random=any(
            info(n).is_random for gm in program.graphs.values() for n in gm.graph.nodes
        ),
        label=program.model_name,
    )


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
