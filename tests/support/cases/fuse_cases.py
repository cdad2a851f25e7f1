"""Captured models and their fused forms: what the tests of fuse share."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from capture_check import Values, execute
from models import CASES
from torch import nn

import zerofx
from zerofx.ir.meta import Role
from zerofx.ir.program import Captured, Planned, Program
from zerofx.passes.fuse import Fuse

# What each model of the tests holds; `outputs="loss"`, so that nobody reads the logits.
FOUND = {
    "gpt": "1 linear-cross-entropy, 5 layer-norm",
    "gpt-dropout": "1 linear-cross-entropy, 5 layer-norm",
    "lstm": "1 linear-cross-entropy",
    "adapters": "1 linear-cross-entropy, 5 layer-norm",
    "convnet": "1 linear-cross-entropy",
    "hf-gpt2": "1 linear-cross-entropy, 5 layer-norm",
    "hf-llama": "1 linear-cross-entropy, 5 rms-norm, 2 gated-activation, 8 rotary-embedding",
    "hf-bert": "1 linear-cross-entropy, 6 layer-norm",
    "hf-vit": "1 linear-cross-entropy, 5 layer-norm",
    "hf-resnet": "1 linear-cross-entropy",
}


@cache
def captured(case: str, dtype: torch.dtype = torch.float32) -> Captured:
    args, kwargs = CASES[case].batch(0)
    return zerofx.capture(CASES[case].make().to(dtype), args, kwargs, outputs="loss")


def fused(program: Program, patterns: str = "all") -> tuple[Planned, str]:
    after = program.planned().clone()
    report = Fuse(patterns).run(after)
    for gm in after.graphs.values():
        gm.graph.lint()
        gm.recompile()
    return after, report.summary


def names(program: Planned, graph: str = "joint") -> list[str]:
    """Return the ops of a graph, transpositions left out."""
    found = []
    for node in program.graph(graph).nodes:
        if node.op == "call_function" and node.target is not torch.ops.aten.t.default:
            schema = getattr(node.target, "_schema", None)
            found.append(schema.name.split("::")[1] if schema else node.target.__name__)
    return found


def error(found: Values, expected: Values) -> float:
    """Return the relative error over all gradients, and check the other values one by one."""
    assert list(found) == list(expected)
    grads = [k for k in expected if k.role in (Role.GRAD, Role.INPUT_GRAD)]
    for key in set(expected) - set(grads):
        torch.testing.assert_close(
            found[key].double(), expected[key].double(), rtol=1e-2, atol=1e-5
        )
    off = sum((found[k].double() - expected[k].double()).square().sum() for k in grads)
    return float((off / sum(expected[k].double().square().sum() for k in grads)).sqrt())


def both(program: Planned, after: Planned, model: nn.Module, *given: Any) -> float:
    values = []
    for one in (after, program):
        torch.manual_seed(3)
        values.append(execute(one, model, *given))
    return error(*values)
