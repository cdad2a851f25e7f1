"""Correct programs for the tests of verify and load, and small ways to break a copy of one."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from torch import fx

from zerofx import ops
from zerofx.capture import capture
from zerofx.codegen.emit import render, write
from zerofx.errors import ProgramError
from zerofx.hardware import hardware_for
from zerofx.ir.meta import Role, info
from zerofx.ir.program import BACKWARD, FORWARD, Captured, Planned
from zerofx.ir.verify import verify
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import run
from zerofx.passes.placement import compute_dtype
from zerofx.plan.plan import Plan

SMALL = {"bucket_bytes": 4096, "persist_below": 256, "kernels": "aten"}


@cache
def captured(case: str, is_training: bool = True, dtype: torch.dtype | None = None) -> Captured:
    """Return a captured call, computing in a format; tests share it."""
    args, kwargs = CASES[case].batch(0)
    model = CASES[case].make().train(is_training)
    with torch.set_grad_enabled(is_training):
        return capture(model, args, kwargs, compute_dtype=dtype)


@cache
def _rewritten(case: str, world: int, is_training: bool, plan: tuple[Any, ...]) -> Planned:
    setting = Setting(Plan(**{**SMALL, **dict(plan)}), world, hardware_for("cpu"))
    dtype = compute_dtype(setting.plan.precision)
    return run(captured(case, is_training, dtype), setting)


def program(case: str = "gpt", world: int = 2, is_training: bool = True, **plan: Any) -> Planned:
    """Return a copy of a compiled program, to be broken."""
    return _rewritten(case, world, is_training, tuple(sorted(plan.items()))).clone()


@cache
def _files(kernels: str) -> dict[str, str]:
    return render(program(kernels=kernels))


def emitted(directory: Path, kernels: str = "aten") -> Path:
    """Emit the GPT of the tests at stage 3 for 2 ranks, to be edited; return where."""
    return write(_files(kernels), directory / "program")


def find(broken: Planned, target: Any, bucket: int | None = None, graph: str = BACKWARD) -> fx.Node:
    """Return the first call of `target` in a graph, of one bucket if that is given."""
    for node in broken.graph(graph).nodes:
        if node.target is target and (bucket is None or info(node).index == bucket):
            return node
    raise AssertionError(f"no {target} of bucket {bucket} in {graph}")


def region_reading(view: fx.Node) -> list[fx.Node]:
    """Return the nodes of the region that reads a parameter, in order."""
    region = info(next(u for u in view.users if info(u).region is not None)).region
    return [n for n in view.graph.nodes if n.op == "call_function" and info(n).region == region]


def set_argument(node: fx.Node, position: int, new: Any) -> None:
    node.args = (*node.args[:position], new, *node.args[position + 1 :])


def gathered(p: Planned, graph: str = FORWARD) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return (launch, wait, release) of the first bucket gathered into a slot."""
    release = find(p, ops.release, graph=graph)
    wait: Any = release.args[0]
    return wait.args[0], wait, release


def find_placeholder(p: Planned, graph: str, role: Role, index: int | None = None) -> fx.Node:
    return next(n for n in p.placeholders(graph, role) if index in (None, info(n).index))


Maker = Callable[[], Planned]


class Breaks:
    """Functions that return broken programs, each with what its refusal says (a pattern)."""

    def __init__(self) -> None:
        self.found: list[tuple[Maker, str]] = []

    def __call__(self, message: str) -> Callable[[Maker], Maker]:
        """Register the function below."""

        def register(make: Maker) -> Maker:
            self.found.append((make, message))
            return make

        return register

    @property
    def names(self) -> list[str]:
        return [make.__name__ for make, _ in self.found]


def check_refused(p: Planned, message: str) -> None:
    """Demand a refusal with this message, and the lines around the fault, one of them marked."""
    with pytest.raises(ProgramError) as caught:
        verify(p)
    first, *context = str(caught.value).split("\n")
    assert re.search(message, first), first
    assert sum(line.startswith(">") for line in context) == 1
    assert 5 <= len(context) <= 24
