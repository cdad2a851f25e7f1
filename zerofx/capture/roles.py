"""Roles: labels for a traced graph: an Info on every node, roles, named outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.capture.call import Call
from zerofx.capture.harness import Results
from zerofx.capture.lines import LINE, MODULE
from zerofx.compat.tracing import describe_placeholder, describe_results
from zerofx.errors import CaptureError
from zerofx.ir.graphs import is_random
from zerofx.ir.meta import KEY, Info, OutputInfo, Phase, Role, info, value

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
    """Set phase, module, line, unit and randomness of every node except the placeholders."""
    by_seq: dict[int | None, Info] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        phase = _phase(node)
        custom = node.meta.get("custom") or {}
        module, line = custom.get(MODULE), custom.get(LINE, "")
        seq = node.meta.get("seq_nr")
        if phase is Phase.BACKWARD or module is None or not line:
            module, line = _inherit(node, by_seq.get(seq), module, line)
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


@dataclass(frozen=True)
class Names:
    """The user's names for the positions and names of the traced call.

    units: parameter -> unit. buffers: each name of a buffer -> its first one.
    numbers: the leaves that are varying numbers, which the graph takes after the tensors.
    """

    call: Call
    results: Results
    units: dict[str, str]
    buffers: dict[str, str]
    numbers: tuple[int, ...] = ()

    def place(self, role: Role, what: Any) -> tuple[str, int]:
        """Return (name, index) for the tracer's identifier `what`."""
        if role in (Role.INPUT, Role.INPUT_GRAD, Role.INPUT_UPDATE):
            index = (*self.call.tensors, *self.numbers)[what]
            return self.call.names[index], index
        if role in (Role.OUTPUT, Role.TANGENT):
            index = self.results.tensors[what]
            return self.results.names[index], index
        name = str(what).removeprefix(_PREFIX)
        return self.buffers.get(name, name), -1


def label_placeholders(gm: fx.GraphModule, names: Names) -> None:
    """Set the role, name and index of every placeholder; drop those that nothing reads.

    The names of one buffer become one placeholder. (Those of a parameter remain separate, with a
    gradient each, until `merge-tied`.)
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    buffers: dict[str, fx.Node] = {}
    for node in placeholders:
        kind, what = describe_placeholder(node)
        role = _ROLES.get(kind)
        if role is None:
            raise CaptureError(f"capture: the traced graph has an input of no known role: {what}.")
        name, index = names.place(role, what)
        if role is Role.BUFFER and buffers.setdefault(name, node) is not node:
            node.replace_all_uses_with(buffers[name])
        node.meta[KEY] = Info(
            phase=Phase.BACKWARD if role is Role.TANGENT else Phase.FORWARD,
            role=role,
            name=name,
            index=index,
            unit=names.units.get(name, "") if role is Role.PARAM else "",
        )
    for node in placeholders:
        if not node.users and info(node).role is not Role.TANGENT:
            gm.graph.erase_node(node)


def label_results(gm: fx.GraphModule, names: Names) -> tuple[OutputInfo, ...]:
    """Describe each element of the output tuple; drop gradients that are None."""
    output = gm.graph.output_node()
    kept: list[fx.Node] = []
    infos: list[OutputInfo] = []
    described = describe_results(output)
    for node, (kind, what) in zip(output.args[0], described, strict=True):  # type: ignore[arg-type]
        if node is None:
            continue
        role = _ROLES.get(kind)
        if kind == "param-update":
            line = info(node).line
            raise CaptureError(
                f"capture: forward changes the parameter {str(what).removeprefix(_PREFIX)} in "
                f"place{f' at {line}' if line else ''}. Make it a buffer, or update it after "
                "optimizer.step()."
            )
        if role is None:
            raise CaptureError(f"capture: the traced graph returns what has no known role: {what}.")
        infos.append(OutputInfo(role, *names.place(role, what)))
        if role is Role.GRAD and value(node).layout is not torch.strided:
            raise CaptureError(
                f"capture: the gradient of {infos[-1].name} is sparse and has no fixed size (from "
                f"{info(node).line}). Use the embedding with sparse=False."
            )
        kept.append(node)
    output.args = (tuple(kept),)
    output.meta.pop("desc", None)
    return tuple(infos)
