"""More input signatures than Plan.max_programs: the least recently used program is given up."""

from __future__ import annotations

import copy
import gc
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx.model import programs
from zerofx.runtime.tiers.host_tier import HostTier
from zerofx.runtime.tiers.nvme_values import NvmeValues


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x).tanh()).square().mean()


def batch(step: int, rank: int, num_shapes: int) -> Tensor:
    """Return a batch whose number of rows is another one on each rank."""
    rows = 1 + (step + rank * num_shapes // 2) % num_shapes
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(97 * step + rank))


def largest_difference(num_shapes: int, plan: dict[str, Any]) -> tuple[float, int, int]:
    """Train on every rank and, beside it, in one process; also return how many programs stay."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    plain, model = Scorer(), zerofx.compile(Scorer(), {"kernels": "aten", "dynamic": "off", **plan})
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(num_shapes + 3):
        for each in range(world):
            (plain(batch(step, each, num_shapes)) / world).backward()
        model(batch(step, rank, num_shapes)).backward()
        if step % 5 == 0:
            with torch.no_grad():  # a program of another kind, between
                model(batch(step, rank, num_shapes))
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    found = model.state_dict()
    differ = max(float((found[k] - v).abs().max()) for k, v in plain.state_dict().items())
    return differ, len(model.programs), len(model._programs.known)


def check(answers: list[tuple[float, int, int]], limit: int) -> None:
    for differ, num_programs, num_known in answers:
        assert differ < 1e-6 and num_programs == limit and num_known <= 2 * limit


def test_more_shapes_than_programs_train_as_plain() -> None:
    check([largest_difference(6, {"max_programs": 2})], 2)


def test_ranks_give_up_programs_each_for_itself(pool: Pool) -> None:
    check(pool.run(2, largest_difference, 4, {"max_programs": 2}), 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_forty_shapes_train_as_plain(pool: Pool, world: int, stage: int) -> None:
    check(pool.run(world, largest_difference, 40, {"stage": stage}), 16)


def test_one_warning_says_what_varies(caplog: pytest.LogCaptureFixture) -> None:
    model = zerofx.compile(Scorer(), zerofx.Plan(kernels="aten", dynamic="off", max_programs=1))
    with caplog.at_level(logging.WARNING, "zerofx"), torch.no_grad():
        for rows in (1, 2, 3, 1):
            model(torch.randn(rows, 3))
    (said,) = [r.getMessage() for r in caplog.records if r.name == "zerofx"]
    assert "Scorer needs more programs than Plan.max_programs = 1 allows" in said
    assert "args[0].shape[0]: 2, was 1" in said and "pad inputs to a few shapes" in said


def pending_backward() -> tuple[bool, list[int]]:
    """Give up a program between its forward and its backward; return the slots' bytes meanwhile."""
    plan = zerofx.Plan(stage=2, kernels="aten", dynamic="off", max_programs=1)
    plain, model = Scorer(), zerofx.compile(Scorer(), plan)
    slots, num_bytes = model._engine.slots, []
    first, second = torch.ones(2, 3), torch.ones(4, 3) / 2
    pending = model(first)
    num_bytes.append(slots.nbytes)
    with torch.no_grad():
        same = torch.equal(model(second), plain(second))
    num_bytes.append(slots.nbytes)
    (pending + model(second)).backward()
    (plain(first) + plain(second)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    del pending
    with torch.no_grad():
        model(first)
    num_bytes.append(slots.nbytes)
    return same and model.programs[0].pool.sizes == slots.sizes, num_bytes


def test_backward_after_its_program_was_given_up(pool: Pool) -> None:
    for same, (training, evaluating, after) in pool.run(2, pending_backward):
        assert same
        assert evaluating < training  # the backward to come takes some slots again
        assert after < training


def test_what_comes_back_is_bound_again_without_a_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = zerofx.compile(Scorer(), zerofx.Plan(kernels="aten", dynamic="off", max_programs=2))
    inputs = [torch.randn(rows, 3) for rows in (1, 2, 3)]
    expected = [Scorer()(x) for x in inputs]
    model(inputs[0])
    model.adopt(model.programs[0].emit(tmp_path / "edited"))
    for x in inputs:
        model(x)
    assert [p.calling.in_spec.num_leaves for p in model.programs] == [1, 1]
    monkeypatch.setattr(programs, "capture", None)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        assert torch.equal(torch.stack([each(x) for x in inputs]), torch.stack(expected))
    model(inputs[0])
    assert model.programs[-1].directory == tmp_path / "edited"  # an adopted one stays adopted
    assert len(copied._programs.known) <= 4


def test_files_of_values_go_with_the_last_program_that_needs_them(tmp_path: Path) -> None:
    host = HostTier(torch.device("cpu"))
    values = NvmeValues(tmp_path, 0, host)
    small, large = {"a": 4096, "b": 4096}, {"a": 4096, "c": 8192}
    values.reserve(small, "small")
    values.reserve(large, "large")
    before = values.nbytes
    held = host.borrow_flat(1024, torch.float32).fill_(1)
    stored = values.write_out(held, "a").wait()
    values.forget(small)
    assert values.nbytes == before  # a value waits there, and `large` may need its place
    values.forget(large)
    assert 0 < values.nbytes < before
    assert torch.equal(values.read_back(stored).wait(), held)
    values.reserve(large, "large")
    del stored
    gc.collect()
    values.forget(large)
    assert values.nbytes == 0 and not list(tmp_path.rglob("*activations*"))
