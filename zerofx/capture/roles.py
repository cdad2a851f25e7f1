"""Turn a traced graph into zerofx's terms: an Info on every node, roles, named outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.capture.harness import Results
from zerofx.capture.lines import LINE, MODULE
from zerofx.errors import CaptureError
from zerofx.ir.meta import KEY, Info, OutputInfo, Phase, Role, info

_PREFIX = "model."

_ROLES = {
    "param": Role.PARAM,
    "buffer": Role.BUFFER,
    "input": Role.INPUT,
    "tangent": Role.TANGENT,
    "output": Role.OUTPUT,
    "grad": Role.GRAD,
    "input-grad": Role.INPUT_GRAD,
    "buffer-update": Role.BUFFER_UPDATE,
    "input-update": Role.INPUT_UPDATE,
}


def label_nodes(gm: fx.GraphModule, unit_of: Callable[[str], str]) -> None:
    """Set phase, module, line, unit and randomness of every node but the placeholders'."""
    by_seq: dict[int, Info] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        phase = _phase(node)
        custom = node.meta.get("custom") or {}
        module, line = custom.get(MODULE), custom.get(LINE, "")
        seq = node.meta.get("seq_nr")
        if phase is Phase.BACKWARD or module is None or not line:
            module, line = _inherit(node, by_seq.get(seq) if seq is not None else None, module, line)
        made = Info(
            phase=phase,
            module=module or "",
            line=line,
            unit=unit_of(module or ""),
            is_random=is_random(node),
        )
        node.meta[KEY] = made
        if phase is Phase.FORWARD and seq is not None and made.line:
            by_seq.setdefault(seq, made)


def _phase(node: fx.Node) -> Phase:
    tag = node.meta.get("partitioner_tag")
    is_backward = tag == "is_backward" or node.meta.get("autograd_backward", False)
    return Phase.BACKWARD if is_backward else Phase.FORWARD


def _inherit(
    node: fx.Node, forward: Info | None, module: str | None, line: str
) -> tuple[str | None, str]:
    """Take module and line from the forward node of the same autograd node, or from an operand."""
    sources = [forward] if forward is not None else []
    sources += [info(a) for a in node.all_input_nodes if a.op == "call_function"]
    for source in sources:
        if source.line:
            return module if module is not None else source.module, line or source.line
    return module, line


def is_random(node: fx.Node) -> bool:
    """Tell whether a node draws from a generator itself; attention without dropout does not."""
    target = node.target
    if not isinstance(target, compat.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return compat.op_argument(node, "dropout_p") != 0.0


def label_placeholders(
    gm: fx.GraphModule,
    input_names: list[str],
    tensor_leaves: tuple[int, ...],
    results: Results,
    units: dict[str, str],
) -> None:
    """Set the role, name and index of every placeholder; drop those nobody reads."""
    for node in list(gm.graph.nodes):
        if node.op != "placeholder":
            continue
        kind, what = compat.describe_placeholder(node)
        role = _ROLES.get(kind)
        if role is Role.PARAM or role is Role.BUFFER:
            name, index = str(what).removeprefix(_PREFIX), -1
        elif role is Role.INPUT:
            index = tensor_leaves[int(what)]
            name = input_names[index]
        elif role is Role.TANGENT:
            index = results.tensors[int(what)]
            name = results.names[index]
        else:
            raise CaptureError(f"capture: the traced graph has an input zerofx cannot place: {what}")
        phase = Phase.BACKWARD if role is Role.TANGENT else Phase.FORWARD
        node.meta[KEY] = Info(
            phase=phase, role=role, name=name, index=index, unit=units.get(name, "")
        )
        if not node.users and role is not Role.TANGENT:
            gm.graph.erase_node(node)


def label_results(
    gm: fx.GraphModule, input_names: list[str], tensor_leaves: tuple[int, ...], results: Results
) -> tuple[OutputInfo, ...]:
    """Say what each element of the output tuple stands for; drop gradients that are None."""
    output = gm.graph.output_node()
    kept: list[Any] = []
    infos: list[OutputInfo] = []
    described = compat.describe_results(output)
    for node, (kind, what) in zip(output.args[0], described, strict=True):  # type: ignore[arg-type]
        if node is None:
            continue
        role = _ROLES.get(kind)
        if kind == "param-update":
            name, line = str(what).removeprefix(_PREFIX), info(node).line
            raise CaptureError(
                f"capture: forward changes the parameter {name} in place"
                f"{f' at {line}' if line else ''}; make it a buffer, or update it after "
                "optimizer.step()"
            )
        if role is None:
            raise CaptureError(f"capture: the traced graph returns something unknown: {what}")
        if role is Role.OUTPUT:
            index = results.tensors[what]
            infos.append(OutputInfo(role, results.names[index], index))
        elif role in (Role.INPUT_GRAD, Role.INPUT_UPDATE):
            index = tensor_leaves[what]
            infos.append(OutputInfo(role, input_names[index], index))
        else:
            infos.append(OutputInfo(role, str(what).removeprefix(_PREFIX)))
        kept.append(node)
    output.args = (tuple(kept),)
    output.meta.pop("desc", None)
    return tuple(infos)
