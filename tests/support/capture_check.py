"""Run captured programs on real tensors and hold them against eager, output by output."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from zerofx.capture import call as trees
from zerofx.ir.meta import OutputInfo, Role, info
from zerofx.ir.program import Planned

Values = dict[OutputInfo, Tensor]


class Body(nn.Module):
    """A linear layer, and the rest of forward as a function of (module, its result, the input)."""

    def __init__(self, body: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(width))
        self.body = body

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.body(self, self.fc(x), x, *rest)


def vectors(seed: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def graph_name(program: Planned) -> str:
    return "joint" if program.is_training else "forward"


def calls(program: Planned) -> list[torch.fx.Node]:
    return [n for n in program.graph(graph_name(program)).nodes if n.op == "call_function"]


def execute(program: Planned, model: nn.Module, args: Any, kwargs: Any) -> Values:
    """Call the captured graph with the model's own values and gradients of ones.

    Casts of an autocast region are part of the graph, so that it runs with autocast off.
    """
    gm = program.graphs[graph_name(program)]
    state = dict(model.named_parameters(remove_duplicate=False))
    state |= dict(model.named_buffers(remove_duplicate=False))
    leaves, _ = trees.flatten((args, kwargs))
    values = []
    for node in program.placeholders(graph_name(program)):
        what = info(node)
        if what.role is Role.TANGENT:
            fake = node.meta["val"]
            values.append(torch.ones(fake.shape, dtype=fake.dtype))
        else:
            own = leaves[what.index] if what.role is Role.INPUT else state[what.name]
            values.append(own.detach().clone())
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        results = gm(*values)
    infos = program.outputs[graph_name(program)]
    assert len(results) == len(infos) == len(set(infos))
    return dict(zip(infos, results, strict=True))


def check(model: nn.Module, *args: Any, tolerance: float = 0.0, **kwargs: Any) -> Planned:
    """Capture, check that the model is untouched, and compare every value with eager."""
    before = snapshot(model)
    program = zerofx.capture(model, args, kwargs)
    assert snapshot(model) == before
    compare(program, model, args, kwargs, tolerance)
    return program


def compare(
    program: Planned, model: nn.Module, args: Any, kwargs: Any, tolerance: float = 0.0
) -> None:
    """Hold a captured program against a call of the model."""
    torch.manual_seed(7)
    found = execute(program, model, args, kwargs)
    eager = copy.deepcopy(model)
    leaves, _ = trees.flatten((args, kwargs))
    own = [_leaf(v) for v in leaves]
    call_args, call_kwargs = trees.unflatten(own, program.calling.in_spec)
    torch.manual_seed(7)
    names, outs, _ = trees.flatten_named(eager(*call_args, **call_kwargs))
    for i, (name, out) in enumerate(zip(names, outs, strict=True)):
        if isinstance(out, Tensor):
            got = found[OutputInfo(Role.OUTPUT, name or "output", i)]
            assert_close(got, out.detach(), f"output {name}", tolerance)
    if program.is_training:
        compare_gradients(program, found, eager, outs, own, tolerance)
    old = dict(model.named_buffers())
    for name, buffer in eager.named_buffers():
        got = found.get(OutputInfo(Role.BUFFER_UPDATE, name), old[name])
        assert_close(got, buffer, f"buffer {name}", tolerance)
    updates = {i.index: v for i, v in found.items() if i.role is Role.INPUT_UPDATE}
    for i, leaf in enumerate(own):
        if isinstance(leaf, Tensor):
            assert_close(updates.get(i, leaves[i]), leaf, f"input {i}", tolerance)


def compare_gradients(
    program: Planned,
    found: Values,
    eager: nn.Module,
    outs: list[Any],
    inputs: list[Any],
    tolerance: float,
) -> None:
    roots = [outs[i] for i in program.calling.differentiable]
    with torch.autocast("cpu", enabled=False):
        torch.autograd.backward(roots, [torch.ones_like(o) for o in roots])
    grads = {i.name: v for i, v in found.items() if i.role is Role.GRAD}
    params = dict(eager.named_parameters())
    assert list(program.params) == list(params)
    for name, param in program.params.items():
        parts = [grads.pop(n) for n in (name, *param.aliases) if n in grads]
        expected = params[name].grad
        assert bool(parts) == (expected is not None), name
        if expected is not None:
            assert_close(sum(parts[1:], parts[0]), expected, f"gradient of {name}", tolerance)
    assert not grads
    input_grads = {i.index: v for i, v in found.items() if i.role is Role.INPUT_GRAD}
    for i, leaf in enumerate(inputs):
        expected = leaf.grad if isinstance(leaf, Tensor) else None
        assert (i in input_grads) == (expected is not None), i
        if expected is not None:
            assert_close(input_grads[i], expected, f"gradient of input {i}", tolerance)


def assert_close(got: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    """Compare bit for bit, or by the relative norm of the difference."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), what
    if tolerance == 0.0 or not expected.is_floating_point() or expected.isinf().any():
        assert torch.equal(got.detach(), expected.detach()), what
        return
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-12)
    # A gradient that is zero but for rounding (an attention key's bias) has no relative error.
    assert error <= tolerance or (got - expected).abs().max() < 1e-8, f"{what}: {error:.1e}"


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def snapshot(model: nn.Module) -> Any:
    """Describe all that capture must leave alone: the model's state by identity, and globals."""
    tensors = [(n, id(t)) for n, t in model.state_dict(keep_vars=True).items()]
    attributes = [
        [(n, id(v), _content(v)) for n, v in module.__dict__.items()] for module in model.modules()
    ]
    modes = torch.get_default_dtype(), torch.is_grad_enabled(), torch.compiler.is_compiling()
    generators = random.getstate(), torch.get_rng_state().tolist()
    return tensors, attributes, modes, generators


def _content(value: Any) -> Any:
    if type(value) is list:
        return [id(v) for v in value]
    if isinstance(value, dict):  # also a module's hooks
        return [(k, id(v)) for k, v in value.items()]
    return None
