"""Fused nodes in the emitted files: kernels.py, called from schedule.py, read back, and run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fuse_cases import captured, fused
from models import CASES
from passes_compact import order
from torch import Tensor
from training import loss_of, train_cell

import zerofx
from zerofx.codegen.emit import emit
from zerofx.hardware import hardware_for
from zerofx.ir.graphs import is_fused
from zerofx.ir.meta import info
from zerofx.ir.program import Planned
from zerofx.passes import order as pass_order
from zerofx.passes import pipeline
from zerofx.passes.fuse import Fuse
from zerofx.plan.plan import Plan

PLAN: dict[str, Any] = {"stage": 3, "kernels": "aten"}


def rewritten(case: str, world_size: int = 2) -> Planned:
    setting = pass_order.Setting(Plan(**PLAN), world_size, hardware_for("cpu"))
    return pipeline.run(fused(captured(case))[0], setting)


def train(case: str, fuses: bool) -> tuple[list[Tensor], int]:
    """Return losses and weights of three steps, and how many calls of kernels were scheduled."""
    passes = [*([lambda s: Fuse()] if fuses else []), *pass_order.PREPARE]
    with patch.object(pass_order, "PREPARE", passes):
        model = zerofx.compile(CASES[case].make(), PLAN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            args, kwargs = CASES[case].batch(step)
            loss = loss_of(model(*args, **kwargs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    program = model.programs[0]
    nodes = [n for gm in program.graphs.values() for n in gm.graph.nodes]
    return [*losses, *model.state_dict().values()], sum(map(is_fused, nodes))


@pytest.mark.parametrize("case", ["gpt", "hf-llama"])
def test_the_schedule_calls_our_kernels(interpreted: Callable[..., Any], case: str) -> None:
    """Through Triton, in its interpreter: the losses and weights of the unfused program."""
    plain, none = train(case, False)
    found, count = interpreted(train, case, True)
    assert none == 0 and count >= 10
    for got, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["gpt", "hf-llama"])
def test_without_triton_the_kernels_are_the_ops(case: str) -> None:
    plain, _ = train(case, False)
    for got, expected in zip(train(case, True)[0], plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_fused_node_is_a_region_by_itself() -> None:
    program = rewritten("hf-llama")
    for name in ("forward", "backward"):
        nodes = [n for n in program.graph(name).nodes if info(n).region is not None]
        for node in filter(is_fused, nodes):
            own = [n for n in nodes if info(n).region == info(node).region]
            assert all(n is node or n.args[0] is node for n in own)
        assert any(row.startswith("region") for row in order(program, name))


def test_what_is_emitted(tmp_path: Path) -> None:
    emit(rewritten("gpt"), tmp_path / "program")
    schedule = (tmp_path / "program" / "schedule.py").read_text()
    kernels = (tmp_path / "program" / "kernels.py").read_text()
    assert "kernels = zfx.load_kernels(__file__)" in schedule
    assert "= kernels.linear_cross_entropy_f32_16x32_mean(" in schedule
    assert "= kernels.linear_cross_entropy_f32_16x32_mean_backward(" in schedule
    assert "= kernels.layer_norm_f32_16x16_1em05_residual(" in schedule
    assert kernels.count("def layer_norm_f32_16x16_1em05(") == 1
    assert kernels.count("def linear_cross_entropy_f32_16x32_mean(") == 1
    regions = "".join(p.read_text() for p in (tmp_path / "program" / "regions").glob("*.py"))
    assert "layer_norm" not in regions and "log_softmax" not in regions


@pytest.mark.parametrize("case", ["gpt", "hf-llama"])
def test_an_emitted_program_is_read_back(case: str, tmp_path: Path) -> None:
    program = rewritten(case)
    emit(program, tmp_path / "program")
    loaded = zerofx.load_program(tmp_path / "program")
    for name in ("forward", "backward"):
        ours, theirs = (
            [(str(n.target), [a for a in n.args if not isinstance(a, torch.fx.Node)])
             for n in p.graph(name).nodes if is_fused(n)]
            for p in (program, loaded)
        )  # fmt: skip
        assert ours and ours == theirs
        assert [info(n).unit for n in program.graph(name).nodes if is_fused(n)] == [
            info(n).unit for n in loaded.graph(name).nodes if is_fused(n)
        ]


@pytest.mark.parametrize("kernels", ["aten", "inductor"])
def test_fast_numerics_train_alike(pool: Any, kernels: str) -> None:
    """The plan's own way to it, on two ranks: on CPU the loss head is fused."""
    plan = {"stage": 3, "kernels": kernels, "numerics": "fast"}
    for report in pool.run(2, train_cell, "gpt", plan, {"optimizer": "sgd"}, timeout_s=300):
        assert report.loss <= 1e-5 and report.model <= 1e-5, report


def test_only_fast_numerics_fuse() -> None:
    for numerics, count in (("bitwise", 0), ("fast", 2)):
        program = zerofx.rewrite(captured("gpt"), Plan(numerics=numerics), 2)
        nodes = [n for gm in program.graphs.values() for n in gm.graph.nodes]
        assert sum(map(is_fused, nodes)) == count
