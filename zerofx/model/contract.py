"""What the functions of a program take and give, as the runtime needs to know it."""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch import fx

from zerofx.ir.graphs import alias_source
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.spec import Kind, kind_of, spec_of
from zerofx.layout.tiers import Tier
from zerofx.model.digest import collective_digest, graph_hashes
from zerofx.runtime.step import Contract, Reach


def contract(program: Planned, sizes: str = "") -> Contract:
    """Return what the program's functions take and give; `sizes` are those of its inputs."""
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
        constant=frozenset(i for i, s in enumerate(outputs) if s.index in calling.detached),
        reach=_reach(program, tuple(tangents)) if program.is_training else {},
        is_training=program.is_training,
        draws=frozenset(
            name
            for name, gm in program.graphs.items()
            if any(info(n).is_random for n in gm.graph.nodes)
        ),
        label=program.model_name,
        digest=collective_digest(program),
        graph=graph_hashes(sizes, program.captured),
    )


def _reach(program: Planned, outputs: tuple[int, ...]) -> dict[int, Reach]:
    """Return which gradients come from each of these outputs, found by walking from its tangent.

    A gradient that no tangent leads to is zero whatever a loss uses, and counts for all outputs.
    """
    bits = {leaf: 1 << i for i, leaf in enumerate(outputs)}
    everything = (1 << len(outputs)) - 1
    masks: dict[fx.Node, int] = {}  # of each node: the tangents that lead to it
    params: dict[str, int] = {}
    for node in program.graph(BACKWARD).nodes:
        if info(node).role is Role.TANGENT:
            masks[node] = bits[info(node).index]
            continue
        masks[node] = functools.reduce(operator.or_, (masks[a] for a in node.all_input_nodes), 0)
        if kind_of(node) is Kind.PACK:
            _, grads, offsets = node.args
            owners = {p.offset: p.owner for p in program.layout.buckets[info(node).index].params}
            for grad, offset in zip(grads, offsets, strict=True):
                name = owners[offset]
                params[name] = params.get(name, 0) | (masks[grad] or everything)
    pairs = zip(program.outputs[BACKWARD], program.results(BACKWARD), strict=True)
    inputs = {s.index: masks[n] or everything for s, n in pairs if s.role is Role.INPUT_GRAD}
    return {
        leaf: Reach(
            frozenset(name for name, mask in params.items() if mask & bit),
            frozenset(index for index, mask in inputs.items() if mask & bit),
        )
        for leaf, bit in bits.items()
    }


def written_out(program: Planned) -> dict[str, int]:
    """Return the bytes of each value that forward lets wait on NVMe, by name."""
    launches = [(n, spec_of(n)) for n in program.graph(FORWARD).nodes]
    nodes = [n for n, spec in launches if spec and spec.is_copy and spec.lands is Tier.NVME]
    return {f"{n.args[1]} {info(n).index}": nbytes(value(n)) for n in nodes}


def _results(program: Planned, role: Role) -> list[Any]:
    """Return forward's results of one role, in order."""
    pairs = zip(program.outputs[FORWARD], program.results(FORWARD), strict=True)
    return [result for spec, result in pairs if spec.role is role]


def _guarded(program: Planned) -> tuple[tuple[str, str | int], ...]:
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


def _shared(program: Planned) -> tuple[int, ...]:
    """Return the positions of saved values that are outputs too."""
    outputs = set(_results(program, Role.OUTPUT))
    return tuple(i for i, n in enumerate(_results(program, Role.SAVED)) if n in outputs)


def _returned(program: Planned) -> dict[int, int]:
    """Return the positions of outputs that are inputs as they stand, with the inputs' leaves."""
    outputs = enumerate(_results(program, Role.OUTPUT))
    return {i: info(n).index for i, n in outputs if info(n).role is Role.INPUT}


def _detached(program: Planned, input_grads: list[int]) -> frozenset[int]:
    """Return the positions of outputs in the memory of inputs that get no gradient."""
    roots = enumerate(alias_source(n) for n in _results(program, Role.OUTPUT))
    inputs = {i: info(n).index for i, n in roots if info(n).role is Role.INPUT}
    return frozenset(i for i, leaf in inputs.items() if leaf not in input_grads)
