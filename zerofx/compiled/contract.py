"""What the functions of a program take and give, as the runtime needs to know it."""

from __future__ import annotations

from typing import Any

from torch import fx

from zerofx.compiled.digest import collective_digest
from zerofx.ir import ops
from zerofx.ir.graphs import alias_source
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.program import BACKWARD, FORWARD, Program
from zerofx.runtime.step import Contract


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
        shared=_shared(program),
        returned=_returned(program),
        detached=_detached(program, input_grads),
        is_training=program.is_training,
        draws=frozenset(
            name
            for name, gm in program.graphs.items()
            if any(info(n).is_random for n in gm.graph.nodes)
        ),
        label=program.model_name,
        digest=collective_digest(program),
    )


def forward_slots(program: Program) -> set[int]:
    """Return the slots that forward gathers into."""
    gathers = [n for n in program.graph(FORWARD).nodes if n.target is ops.all_gather]
    return {n.args[3] for n in gathers if len(n.args) == 4 and n.args[3] >= 0}


def written_out(program: Program) -> dict[str, int]:
    """Return the bytes of each value that forward lets wait on NVMe, by name."""
    nodes = [n for n in program.graph(FORWARD).nodes if n.target is ops.write_out]
    return {f"{n.args[1]} {info(n).index}": nbytes(value(n)) for n in nodes}


def _results(program: Program, role: Role) -> list[Any]:
    """Return forward's results of one role, in order."""
    pairs = zip(program.outputs[FORWARD], program.results(FORWARD), strict=True)
    return [result for spec, result in pairs if spec.role is role]


def _guarded(program: Program) -> tuple[tuple[str, str | int], ...]:
    """Return whose memory the saved values lie in, as far as the user can write to it."""
    outputs: dict[fx.Node, int] = {}
    for position, node in enumerate(_results(program, Role.OUTPUT)):
        outputs.setdefault(alias_source(node), position)
    found: dict[tuple[str, str | int], None] = {}
    for node in _results(program, Role.SAVED):
        root = alias_source(node) if isinstance(node, fx.Node) else None
        if root is None:
            continue
        if info(root).role is Role.INPUT:
            found["input", info(root).index] = None
        elif info(root).role is Role.BUFFER:
            found["buffer", info(root).name] = None
        elif root in outputs:
            found["output", outputs[root]] = None
    return tuple(found)


def _shared(program: Program) -> tuple[int, ...]:
    """Return the positions of saved values that are outputs too."""
    outputs = set(_results(program, Role.OUTPUT))
    return tuple(i for i, n in enumerate(_results(program, Role.SAVED)) if n in outputs)


def _returned(program: Program) -> dict[int, int]:
    """Return the positions of outputs that are inputs as they stand, with the inputs' leaves."""
    outputs = enumerate(_results(program, Role.OUTPUT))
    return {i: info(n).index for i, n in outputs if info(n).role is Role.INPUT}


def _detached(program: Program, input_grads: list[int]) -> frozenset[int]:
    """Return the positions of outputs in the memory of inputs that get no gradient."""
    roots = enumerate(alias_source(n) for n in _results(program, Role.OUTPUT))
    inputs = {i: info(n).index for i, n in roots if info(n).role is Role.INPUT}
    return frozenset(i for i, leaf in inputs.items() if leaf not in input_grads)
