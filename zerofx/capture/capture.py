"""Capture: one call of a model becomes a Program, on fake tensors, in reading order."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerofx import compat
from zerofx.capture import trees
from zerofx.capture.attributes import refuse_attribute, refuse_rebinding
from zerofx.capture.effects import HostGenerators, refuse_host_random, refuse_mode
from zerofx.capture.explain import explained
from zerofx.capture.guard import (
    check_arguments,
    check_device,
    check_graph,
    check_modules,
    check_packed,
)
from zerofx.capture.harness import Harness, Results
from zerofx.capture.roles import Names, label_nodes, label_placeholders, label_results
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
    kwargs = dict(kwargs or {})
    check_packed(args, kwargs)
    check_modules(model)
    names, leaves, in_spec = trees.flatten_call(model.forward, tuple(args), kwargs)
    check_arguments(names, leaves)
    tensor_leaves = tuple(i for i, v in enumerate(leaves) if isinstance(v, Tensor))
    unit_of_param = find_units(model, units)

    mode = compat.new_fake_mode()
    place = torch.device(device) if device is not None else None
    check_device(place)
    fakes = tuple(fake_input(mode, leaves[i], place) for i in tensor_leaves)
    constants = [None if isinstance(v, Tensor) else v for v in leaves]
    swap = StateSwap(model, mode, place, param_meta)
    with swap.installed(), annotated(model):
        params = describe_params(model, unit_of_param)
        buffers = canonical_buffers(model)
        harness = Harness(
            model, constants, in_spec, tensor_leaves, swap.links(), differentiate, outputs
        )
        gm = trace(harness, fakes, mode, swap)
    results = harness.results
    warn_of_dropped(model, results)

    unit_names = set(unit_of_param.values())
    label_nodes(gm, lambda module: find_unit_of_module(module, unit_names))
    check_graph(gm)
    known = Names(names, tensor_leaves, results, unit_of_param, buffers)
    infos = label_results(gm, known)
    label_placeholders(gm, known)
    gm = fx.GraphModule(gm, copy_graph(gm.graph))
    is_training = any(info.role in (Role.GRAD, Role.INPUT_GRAD) for info in infos)
    graph_name = JOINT if is_training else FORWARD
    return Program(
        graphs={graph_name: gm},
        outputs={graph_name: infos},
        calling=make_calling(results, in_spec, tensor_leaves),
        params=params,
        buffers=tuple(dict.fromkeys(buffers.values())),
        model_name=type(model).__name__,
        is_training=is_training,
    )


def trace(
    harness: Harness, fakes: tuple[Tensor, ...], mode: compat.FakeTensorMode, swap: StateSwap
) -> fx.GraphModule:
    """Trace the harness and refuse a forward that leaves side effects."""

    def rerun() -> None:
        compat.rerun_on_fakes(harness, fakes, mode)

    generators = HostGenerators()
    try:
        with explained(harness.lines):
            gm = compat.trace_joint(harness, fakes)
    finally:
        moved = generators.restore()
    if moved:
        raise refuse_host_random(moved, generators, rerun)
    if harness.changed_mode:
        raise refuse_mode(harness.changed_mode, rerun)
    if harness.changed_state:
        raise refuse_rebinding(harness.changed_state, swap.is_disturbed, rerun)
    changed = swap.changed_attribute()
    if changed is not None:
        swap.reset_attributes()
        raise refuse_attribute(*changed, rerun)
    return gm


def warn_of_dropped(model: nn.Module, results: Results) -> None:
    if results.dropped:
        warnings.warn(
            f"zerofx: {type(model).__name__} also returns {', '.join(results.dropped)}, which a "
            "program cannot hand out; it will be None (do not ask the model for it to silence "
            "this, for example with use_cache=False)",
            stacklevel=3,
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


def canonical_buffers(model: nn.Module) -> dict[str, str]:
    """Return the first name of every buffer, by each of its names."""
    first: dict[int, str] = {}
    named = model.named_buffers(remove_duplicate=False)
    return {name: first.setdefault(id(buffer), name) for name, buffer in named}


def describe_params(model: nn.Module, units: dict[str, str]) -> dict[str, ParamInfo]:
    """Return ParamInfo by canonical name, the first one registered; the others are aliases."""
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
