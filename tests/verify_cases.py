"""Correct programs for the tests of verify and load, and small ways to break a copy of one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from models import CASES
from torch import fx

from zerofx.capture import capture
from zerofx.codegen.emit import render, write
from zerofx.ir.meta import info
from zerofx.ir.program import BACKWARD, Program
from zerofx.machine import machine_for
from zerofx.passes.pipeline import Setting, run
from zerofx.plan import Plan

SMALL = {"bucket_bytes": 4096, "persist_below": 256, "kernels": "aten"}


@cache
def captured(case: str, is_training: bool = True) -> Program:
    """Return a captured call; tests share it."""
    args, kwargs = CASES[case].batch(0)
    model = CASES[case].make().train(is_training)
    with torch.set_grad_enabled(is_training):
        return capture(model, args, kwargs)


@cache
def _rewritten(case: str, world: int, is_training: bool, plan: tuple[Any, ...]) -> Program:
    setting = Setting(Plan(**{**SMALL, **dict(plan)}), world, machine_for("cpu"))
    return run(captured(case, is_training), setting)


def program(case: str = "gpt", world: int = 2, is_training: bool = True, **plan: Any) -> Program:
    """Return a copy of a compiled program, to be broken."""
    return _rewritten(case, world, is_training, tuple(sorted(plan.items()))).clone()


@cache
def _files(kernels: str) -> dict[str, str]:
    return render(program(kernels=kernels))


def emitted(directory: Path, kernels: str = "aten") -> Path:
    """Emit the GPT of the tests at stage 3 for 2 ranks, to be edited; return where."""
    return write(_files(kernels), directory / "program")


def find(broken: Program, target: Any, bucket: int | None = None, graph: str = BACKWARD) -> fx.Node:
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
