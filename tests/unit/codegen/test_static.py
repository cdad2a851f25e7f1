"""What makes a compiled model static: no hooks, an emitted module that stands alone, one region a
structure, bytes as counted on paper."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES

import zerofx
from zerofx.codegen.emit import render
from zerofx.tools.demo.gpt import GPT, GPTConfig

HOOKS = [
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
]  # fmt: skip


def _gpt(layers: int, width: int = 32) -> tuple[GPT, tuple[Any, ...]]:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, width=width, heads=2, seq=8))
        tokens = torch.empty(2, 8, dtype=torch.int64)
    return model, (tokens, tokens)


def _program(layers: int = 3, world: int = 2, **plan: Any) -> zerofx.ir.program.Planned:
    model, args = _gpt(layers)
    return zerofx.rewrite(zerofx.capture(model, args), zerofx.Plan(**plan), world)


# -- no hooks -------------------------------------------------------------------------------------
def run_and_look_for_hooks(stage: int) -> list[str]:
    model = zerofx.compile(CASES["gpt"].make(), {"stage": stage, "kernels": "aten"})
    args, _ = CASES["gpt"].batch(0)
    loss = model(*args)
    found = [f"{n}.{h}" for n, m in model.named_modules() for h in HOOKS if getattr(m, h, None)]
    with torch._C.DisableTorchFunctionSubclass():
        for name, param in model.named_parameters():
            found += [f"{name}.{h}" for h in HOOKS if getattr(param, h, None)]
    node = loss.grad_fn
    assert node is not None and "_Step" in node.name()
    reached = [n.name() for n, _ in node.next_functions if n is not None]
    assert reached == ["_ParametersBackward"], reached  # the way to the parameters alone
    loss.backward()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_hooks_anywhere(pool: Any, stage: int) -> None:
    for found in pool.run(2, run_and_look_for_hooks, stage):
        assert found == []


# -- the emitted module ---------------------------------------------------------------------------
def test_the_schedule_imports_torch_and_the_runtime_only(tmp_path: Path) -> None:
    directory = _program(stage=3).emit(tmp_path / "emitted")
    names = set()
    for node in ast.walk(ast.parse((directory / "schedule.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert names == {"torch", "zerofx.runtime"}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_schedule_runs_standalone(tmp_path: Path, stage: int) -> None:
    directory = _program(stage=stage, kernels="aten").emit(tmp_path / "emitted")
    environment = {**os.environ, "PYTHONPATH": str(Path(zerofx.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(directory / "schedule.py")],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "forward returned []" in done.stdout and "backward reduced" in done.stdout


def run_after_an_edit() -> str:
    """The cached file is what runs: a raise written into it is met at the next call."""
    case = CASES["gpt"]
    model = zerofx.compile(case.make(), {"stage": 3, "kernels": "aten"})
    model(*case.batch(0)[0])
    bound = next(iter(model._programs.bound.values()))
    return str(bound.executable.forward.__code__.co_filename)


def test_what_runs_is_what_was_emitted(pool: Any) -> None:
    paths = pool.run(2, run_after_an_edit)
    assert len(set(paths)) == 1 and paths[0].endswith("schedule.py")


def test_ranks_emit_the_same_text() -> None:
    assert render(_program(stage=3)) == render(_program(stage=3))


# -- one region a structure -----------------------------------------------------------------------
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 16])
def test_regions_do_not_grow_with_depth(bucket_bytes: int) -> None:
    counts = {
        layers: sum(f.startswith("regions/") for f in render(_program(layers, stage=3,
                                                                      bucket_bytes=bucket_bytes)))
        for layers in (4, 12)
    }  # fmt: skip
    assert counts[4] == counts[12] <= 16, counts


# -- bytes ----------------------------------------------------------------------------------------
def count_bytes(stage: int) -> tuple[dict[str, int], int]:
    """Return what one step sends by kind, and the model's bytes (buckets with their padding)."""
    case = CASES["gpt"]
    model = zerofx.compile(case.make(), {"stage": stage, "kernels": "aten", "bucket_bytes": 4096})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = model._engine.world
    for step in range(2):
        before = {kind: t.sent_bytes for kind, t in world.counters.items()}
        model(*case.batch(step)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = {kind: t.sent_bytes - before[kind] for kind, t in world.counters.items()}
    return sent, sum(b.full_bytes for b in model._engine.layout.buckets)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_per_step_are_2_psi_and_3_psi(pool: Any, stage: int) -> None:
    """Ring terms at 2 ranks: each all-gather, each reduce-scatter sends psi * 1/2, twice for stage
    0's all-reduce; stage 3 gathers in forward and in backward."""
    for sent, psi in pool.run(2, count_bytes, stage):
        ring = psi // 2
        gathers = {0: 0, 1: 1, 2: 1, 3: 2}[stage]
        assert sum(sent.values()) <= (2 if stage < 3 else 3) * ring, sent
        if stage == 0:
            assert sent["all_reduce"] == 2 * ring
        else:
            assert sent["reduce_scatter"] == ring
            assert sent["all_gather"] <= gathers * ring
            # what backward does not read (an embedding's rows) is not gathered again
            assert sent["all_gather"] > (gathers - 1) * ring


# -- gradients where they are seen ----------------------------------------------------------------
def run_and_look_where_gradients_lie(stage: int) -> list[set[int]]:
    """Return the addresses of each p.grad over four steps."""
    model = zerofx.compile(CASES["gpt"].make(), {"stage": stage, "kernels": "aten"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, set[int]] = {n: set() for n, _ in model.named_parameters()}
    for step in range(4):
        args, _ = CASES["gpt"].batch(step)
        model(*args).backward()
        for name, param in model.named_parameters():
            grad = param.grad
            assert grad is not None
            local = grad.to_local() if stage else grad
            found[name].add(local.data_ptr())
            del grad, local
        optimizer.step()
        optimizer.zero_grad()
    return list(found.values())


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_lie_in_the_same_memory_every_step(pool: Any, stage: int) -> None:
    for found in pool.run(2, run_and_look_where_gradients_lie, stage):
        assert all(len(addresses) == 1 for addresses in found)
