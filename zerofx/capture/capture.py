"""Capture: one call of a model becomes a Program, on fake tensors, in reading order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerofx import compat
from zerofx.capture import trees
from zerofx.capture.harness import Harness, Results
from zerofx.capture.roles import label_nodes, label_placeholders, label_results
from zerofx.capture.swap import Meta, StateSwap, annotated, fake_input
from zerofx.capture.units import find_unit_of_module, find_units
from zerofx.ir.meta import Role
from zerofx.ir.program import FORWARD, JOINT, Calling, ParamInfo, Program, copy_graph


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    differentiate: str = "loss",
    outputs: str = "all",
    units: str | Sequence[str] = "auto",
    param_meta: Mapping[str, Meta] | None = None,
    device: torch.device | str | None = None,
) -> Program:
    """Capture `model(*args, **kwargs)`, with its backward where something requires grad.

    Runs on fake tensors only: nothing is computed, moved or materialised, and the model is left
    exactly as it was, also when this raises.

    param_meta: global (shape, dtype, requires_grad) by name, where the module holds shards.
    device: where tensors on meta are taken to be; the CPU by default.

    Raises:
        CaptureError: the forward cannot become a static graph; the message names the line and
            the way out.
    """
    place = torch.device(device) if device is not None else None
    mode = compat.new_fake_mode()
    names, leaves, in_spec = trees.flatten_call(model.forward, tuple(args), dict(kwargs or {}))
    tensor_leaves = tuple(i for i, v in enumerate(leaves) if isinstance(v, Tensor))
    fakes = tuple(fake_input(mode, leaves[i], place) for i in tensor_leaves)
    constants = [None if isinstance(v, Tensor) else v for v in leaves]

    swap = StateSwap(model, mode, place, param_meta)
    unit_of_param = find_units(model, units)
    with swap.installed(), annotated(model):
        params = describe_params(model, unit_of_param)
        buffers = tuple(name for name, _ in model.named_buffers())
        harness = Harness(
            model, constants, in_spec, tensor_leaves, swap.links(), differentiate, outputs
        )
        gm = compat.trace_joint(harness, fakes)
    results = harness.results

    unit_names = set(unit_of_param.values())
    label_nodes(gm, lambda module: find_unit_of_module(module, unit_names))
    infos = label_results(gm, names, tensor_leaves, results)
    label_placeholders(gm, names, tensor_leaves, results, unit_of_param)
    gm = fx.GraphModule(gm, copy_graph(gm.graph))
    is_training = any(info.role in (Role.GRAD, Role.INPUT_GRAD) for info in infos)
    graph_name = JOINT if is_training else FORWARD
    return Program(
        graphs={graph_name: gm},
        outputs={graph_name: infos},
        calling=make_calling(results, in_spec, tensor_leaves),
        params=params,
        buffers=buffers,
        model_name=type(model).__name__,
        is_training=is_training,
    )


def make_calling(results: Results, in_spec: Any, tensor_leaves: tuple[int, ...]) -> Calling:
    """Say how the user's call maps to the graph and back."""
    assert results.spec is not None, "the harness has not run"
    return Calling(
        in_spec=in_spec,
        out_spec=results.spec,
        tensor_leaves=tensor_leaves,
        constants=results.constants,
        output_names=results.names,
        loss=results.loss,
        differentiable=results.differentiable,
        dropped=results.dropped,
    )


def describe_params(model: nn.Module, units: dict[str, str]) -> dict[str, ParamInfo]:
    """Return canonical name -> ParamInfo; the names of one tensor are one entry, first name first."""
    groups: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(param), []).append(name)
        tensors[id(param)] = param
    return {
        names[0]: ParamInfo(
            name=names[0],
            shape=tuple(tensors[key].shape),
            dtype=tensors[key].dtype,
            requires_grad=tensors[key].requires_grad,
            unit=units[names[0]],
            aliases=tuple(names[1:]),
        )
        for key, names in groups.items()
    }
