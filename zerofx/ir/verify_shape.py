"""The outer shape of a program: regions in one piece, what crosses to backward, buffers synced."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import Fact
from zerofx.ir.graphs import is_compute, root_producer
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.spec import Kind, kind_of
from zerofx.ir.verify_fault import fault, name_of


def check_regions(program: Planned, graph: str) -> None:
    """Check that each region is one unbroken run of compute, a getitem beside its producer."""
    seen: set[int] = set()
    current: int | None = None
    for node in program.graph(graph).nodes:
        if node.op != "call_function":
            continue
        if not is_compute(node):
            current = None
            continue
        region = info(node).region
        if region is None:
            raise fault(program, graph, node, f"{node.name} is compute outside any region")
        if region != current and region in seen:
            raise fault(
                program,
                graph,
                node,
                f"region {region} is interrupted before {node.name}: communication may stand "
                "between regions only",
            )
        if node.target is operator.getitem and info(root_producer(node)).region != region:
            raise fault(program, graph, node, f"{node.name} is cut off from what it takes apart")
        seen.add(region)
        current = region


def check_saved(program: Planned) -> None:
    """Check that backward takes what forward saves: as many values, of the same form."""
    output = program.graph(FORWARD).output_node()
    results = zip(program.outputs[FORWARD], program.results(FORWARD), strict=True)
    given = [result for spec, result in results if spec.role is Role.SAVED]
    taken = sorted(program.placeholders(BACKWARD, Role.SAVED), key=lambda n: info(n).index)
    positions = [info(n).index for n in taken]
    if positions != list(range(len(given))):
        raise fault(
            program,
            FORWARD,
            output,
            f"forward saves {len(given)} values, backward takes {len(taken)} (at {positions})",
        )
    for result, node in zip(given, taken, strict=True):
        if not isinstance(result, fx.Node) or not _is_alike(value(result), value(node)):
            made = value(result) if isinstance(result, fx.Node) else result
            raise fault(
                program,
                BACKWARD,
                node,
                f"{name_of(node)} is saved as {_form(made)} and taken as {_form(value(node))}",
            )


def _is_alike(made: Any, taken: Any) -> bool:
    if not isinstance(made, torch.Tensor) or not isinstance(taken, torch.Tensor):
        return _form(made) == _form(taken)
    is_same_shape = made.shape == taken.shape and made.stride() == taken.stride()
    return is_same_shape and made.dtype is taken.dtype


def _form(val: Any) -> str:
    if not isinstance(val, torch.Tensor):
        return repr(val)
    return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)} strides {list(val.stride())}"


def check_synced(program: Planned) -> None:
    """Check that updated buffers follow rank 0 as the plan says, once all passes have run."""
    plan = program.plan
    if Fact.SLOTS_ASSIGNED not in program.facts or FORWARD not in program.graphs:
        return
    results = zip(program.outputs[FORWARD], program.results(FORWARD), strict=True)
    for spec, result in results:
        if spec.role is not Role.BUFFER_UPDATE or not isinstance(result, fx.Node):
            continue
        is_synced = kind_of(root_producer(result)) is Kind.SYNC
        must = plan.buffers == "rank0" and program.world_size > 1
        if must and not is_synced:
            message = f"{spec.name} does not follow rank 0: its new value passes no sync_buffers"
            raise fault(program, FORWARD, result, message)
        if is_synced and plan.buffers != "rank0":
            message = f"{spec.name} follows rank 0, but the plan says buffers={plan.buffers!r}"
            raise fault(program, FORWARD, result, message)
