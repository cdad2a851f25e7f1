"""Tensors that forward holds itself (`torch.tensor([...])` in it), as source."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.codegen.text import identifier, literal
from zerofx.compat.graphs import FakeTensor
from zerofx.errors import CaptureError
from zerofx.ir.meta import info, value
from zerofx.ir.program import Planned

LEGIBLE = 64  # elements up to which a constant is written as numbers, not as base64
_WRITTEN = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int64,
            torch.int32, torch.int16, torch.int8, torch.uint8)  # fmt: skip


def constant_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a graph that stand for constants and are read."""
    return [n for n in graph.nodes if n.op == "get_attr" and n.users]


def constant_name(node: fx.Node) -> str:
    """Return what constants.py calls it."""
    return identifier(str(node.target))


def constants_source(program: Planned) -> str:
    """Return the text of constants.py, empty where the program holds no constants."""
    found: dict[str, str] = {}
    for gm in program.graphs.values():
        for node in constant_nodes(gm.graph):
            held: Any = gm
            for part in str(node.target).split("."):
                held = getattr(held, part)
            if held.is_meta or isinstance(held, FakeTensor):
                raise CaptureError(
                    f"{program.model_name}.forward reads a tensor of shape {list(held.shape)} "
                    f"({info(node).line}) that has no values (it is on meta) and is no buffer; "
                    "register it with register_buffer, or make it inside forward"
                )
            found[constant_name(node)] = _written(held, value(node).device.type)
    if not found:
        return ""
    rows = [f"{name} = {text}" for name, text in sorted(found.items())]
    head = '"""Tensors that forward holds itself; no parameters, no buffers."""'
    return "\n".join([head, "", "from zerofx import runtime as zfx", "", *rows, ""])


def _written(held: Tensor, device: str) -> str:
    dtype = str(held.dtype).removeprefix("torch.")
    form = f"{dtype!r}, {tuple(held.shape)}, {tuple(held.stride())}, {device!r}"
    if held.numel() <= LEGIBLE and held.dtype in _WRITTEN:
        return f"zfx.constant({literal(held.tolist(), {})}, {form})"
    flat = held.detach().cpu().contiguous().view(-1)
    data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
    return f"zfx.constant({data!r}, {form})"
