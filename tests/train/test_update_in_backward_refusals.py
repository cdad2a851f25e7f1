"""What Plan(update="in-backward") cannot do raises, with nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_cases import mixed_batch, mixed_model
from pool import Pool
from torch import nn
from update_cases import EARLY, Pair, is_unchanged, rank_here, simple, values

import zerofx
from zerofx.errors import GradientError, OptimizerError, PlanError, ShardError
from zerofx.plan.plan import Plan


def test_a_second_backward_raises_before_it_changes_anything() -> None:
    model, optimizer, batch = simple()
    model(*batch).backward()
    before = values(model)
    with pytest.raises(GradientError, match=r"second backward ran since optimizer\.step"):
        model(*batch).backward()
    assert is_unchanged(model, before)
    optimizer.step()
    model(*batch).backward()


def test_a_step_that_an_exception_has_left_half_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, batch = simple()
    model(*batch).backward()
    optimizer.step()
    engine = model._engine
    pack, count = engine.pack, iter(range(100))

    def failing(*args: Any) -> None:
        if next(count) == 3:
            raise MemoryError("planted")
        pack(*args)

    before = values(model)
    monkeypatch.setattr(engine, "pack", failing)
    with pytest.raises(MemoryError, match="planted"):
        model(*batch).backward()
    monkeypatch.undo()
    assert not is_unchanged(model, before), "it was to fail behind the first update"
    before = values(model)
    with pytest.raises(GradientError, match="exception ended the last backward after some"):
        model(*batch).backward()
    assert is_unchanged(model, before)
    assert engine.store.updates is not None
    optimizer.step()
    model(*batch).backward()
    optimizer.step()


def test_what_comes_too_late_for_the_updates_raises() -> None:
    model, optimizer, batch = simple()
    model(*batch).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(OptimizerError, match=r"options of a group .* changed between backward"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    param = next(iter(model.parameters()))
    param.grad = torch.zeros_like(param)
    with pytest.raises(GradientError, match=r"grad was set by hand"):
        model(*batch).backward()
    with pytest.raises(OptimizerError, match=r"grad was set by hand"):
        optimizer.step()
    param.grad = None
    optimizer.max_grad_norm = 1.0
    with pytest.raises(ShardError, match="clips by the norm of all"):
        model(*batch).backward()


def test_an_unfrozen_parameter_without_optimizer_raises_before_anything() -> None:
    model = zerofx.compile(Pair(), {**EARLY, "bucket_bytes": 0, "stage": 3})
    model.made.requires_grad_(False)
    optimizer = zerofx.optim.SGD(model.judge.parameters(), lr=0.1)
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    model.made.requires_grad_(True)
    before = values(model)
    for _ in range(2):
        with pytest.raises(GradientError, match=r"made.\w+: .* no optimizer of zerofx.optim"):
            model(torch.ones(2, 4)).backward()
    assert is_unchanged(model, before)


def test_two_forwards_before_their_backwards_raise() -> None:
    model, optimizer, batch = simple()
    first, second = model(*batch), model(*batch)
    first.backward()
    optimizer.step()
    with pytest.raises(GradientError, match="another backward that updates them"):
        second.backward()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_clipping_raises(pool: Pool, stage: int, world: int) -> None:
    if world == 1:
        refused_reads(stage)
    else:
        pool.run(world, refused_reads, stage)


def refused_reads(stage: int) -> None:
    model, optimizer, _ = simple({**EARLY, "stage": stage})
    model(*mixed_batch(0, rank_here())).backward()
    for read in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: [p.grad for p in model.parameters()],
        optimizer.zero_grad,
        model.zero_grad,
    ):
        with pytest.raises(GradientError, match=r"used and freed inside backward .*in-backward"):
            read()
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()


def test_clipping_by_the_optimizer_raises() -> None:
    model = zerofx.compile(mixed_model(), {**EARLY, "stage": 3})
    with pytest.raises(ShardError, match=r"AdamW\(max_grad_norm=1.0\) clips by the norm of all"):
        zerofx.optim.AdamW(model.parameters(), max_grad_norm=1.0)


def test_a_torch_optimizer_raises() -> None:
    model = mixed_model()
    built = torch.optim.AdamW(model.parameters())
    with pytest.raises(ShardError, match=r"torch.optim.AdamW cannot. Use zerofx.optim"):
        zerofx.compile(model, {**EARLY, "stage": 3}, optimizer=built)
    model = zerofx.compile(model, {**EARLY, "stage": 3})
    torch.optim.AdamW(model.parameters())
    before = values(model)
    with pytest.raises(GradientError, match=r"no optimizer of zerofx.optim has it"):
        model(*mixed_batch(0, 0)).backward()
    assert is_unchanged(model, before)


def test_a_dropped_optimizer_raises() -> None:
    model, optimizer, batch = simple()
    model(*batch).backward()
    optimizer.step()
    del optimizer
    with pytest.raises(GradientError, match=r"no optimizer of zerofx.optim has it"):
        model(*batch).backward()


def test_no_sync_raises() -> None:
    model, _, _ = simple()
    with pytest.raises(GradientError, match=r"no_sync\(\) postpones"), model.no_sync():
        pass


def test_a_grad_scaler_raises() -> None:
    model, optimizer, batch = simple()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(*batch)).backward()
    with pytest.raises((OptimizerError, GradientError), match="in-backward"):
        scaler.step(optimizer)


def test_loss_scaling_contradicts() -> None:
    with pytest.raises(PlanError, match=r"in-backward' contradicts precision.loss_scale"):
        Plan(update="in-backward", precision="fp16")
