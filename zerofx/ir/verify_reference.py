"""The reference: what a captured program computes, as digests, and the signature of its call."""

from __future__ import annotations

from typing import Any

from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import FORWARD, JOINT, Planned, Program, Reference
from zerofx.ir.verify_values import SHORT, Numbering, digest


def take_reference(program: Planned) -> Reference:
    """Return what a program computes, for later programs to be compared with."""
    numbering = Numbering(program)
    values = (v[:SHORT] for v in numbering.of.values() if isinstance(v, str))
    return Reference(
        outputs={label: made.digest for label, made in numbering.outputs.items()},
        values=frozenset(values),
    )


def take_signature(program: Program, reference: Reference) -> str:
    """Return the digest of a call: its inputs, parameters, buffers, and what is computed of them.

    Programs of one signature and layout can stand for each other, whatever their plans.
    """
    inputs = [
        (info(n).role, info(n).name, info(n).index, _spec(value(n)))
        for n in program.placeholders(JOINT if JOINT in program.graphs else FORWARD)
        if info(n).role in (Role.INPUT, Role.BUFFER)
    ]
    params = [
        (p.name, p.shape, str(p.dtype), str(p.compute_dtype), p.requires_grad)
        for p in program.params.values()
    ]
    return digest(repr((program.is_training, inputs, params, sorted(reference.outputs.items()))))


def _spec(val: Any) -> tuple[Any, ...]:
    return str(val.dtype), tuple(val.shape), tuple(val.stride()), val.device.type
