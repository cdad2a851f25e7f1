"""fp16: scaled losses, steps that all ranks skip together, and the scale's own rule."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from torch import Tensor, nn
from training import loss_of

import zerofx
from zerofx.errors import PlanError
from zerofx.kernels.launch import plain_forms, use_triton
from zerofx.model.namespace import rule_of
from zerofx.plan.parts import LossScale
from zerofx.runtime.loss_scale import LossScaler


def _scaler(**rule: Any) -> LossScaler:
    return LossScaler(rule_of(LossScale(**rule)), torch.device("cpu"))


def _run(scaler: LossScaler, overflows: list[bool]) -> list[float]:
    scales = []
    for overflow in overflows:
        scaler.note_backward(overflow)
        scaler.note_step()
        scales.append(scaler.scale)
    return scales


# -- the rule -------------------------------------------------------------------------------------
def test_the_scale_rises_and_falls() -> None:
    scaler = _scaler(initial=8.0, growth_interval=2)
    assert _run(scaler, [False, False, False, True, False, False]) == [8, 16, 16, 8, 8, 16]
    assert scaler.num_skipped == 1
    assert _run(_scaler(initial=2.0, minimum=1.0), [True, True, True]) == [1, 1, 1]


def test_hysteresis_waits_for_several_overflows() -> None:
    scaler = _scaler(initial=8.0, hysteresis=3, growth_interval=2)
    assert _run(scaler, [True, True, True, True]) == [8, 8, 4, 2]
    assert _run(scaler, [False, False, True, True, True]) == [2, 4, 4, 4, 2]


def test_a_fixed_scale_stays_and_still_skips() -> None:
    scaler = _scaler(initial=8.0, dynamic=False)
    assert _run(scaler, [False, True, False]) == [8, 8, 8]
    assert scaler.num_skipped == 1


def test_a_step_without_a_backward_moves_nothing() -> None:
    scaler = _scaler(initial=8.0, growth_interval=1)
    scaler.note_step()
    assert scaler.scale == 8.0


# -- training -------------------------------------------------------------------------------------
def run_gpt(stage: int, precision: Any) -> tuple[list[float], float]:
    """Return the losses of ten steps, and the norm of the last gradients."""
    plan = {"stage": stage, "kernels": "aten", "precision": precision}
    model = zerofx.compile(CASES["gpt"].make(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norm = [], 0.0
    for step in range(10):
        args, kwargs = CASES["gpt"].batch(step)
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if precision != "fp32":
        assert model.loss_scale is not None and model.loss_scale.num_skipped == 0
    return losses, norm


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_fp16_follows_fp32(pool: Any, stage: int) -> None:
    exact, norm = pool.run(2, run_gpt, stage, "fp32")[0]
    scaled = {"compute": "fp16", "loss_scale": 1024}
    for precision in (scaled, {**scaled, "reduce": "fp16"}):
        losses, its_norm = pool.run(2, run_gpt, stage, precision)[0]
        assert losses != exact
        assert losses == pytest.approx(exact, rel=5e-3)
        assert its_norm == pytest.approx(norm, rel=5e-2)  # unscaled before anyone sees it


class Net(nn.Module):
    """Two layers over float inputs, so that a test can plant what overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).float().pow(2).mean()


def _net(stage: int, **precision: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    fields = {"compute": "fp16", "loss_scale": {"initial": 1024.0}, **precision}
    model = zerofx.compile(Net(), {"stage": stage, "kernels": "aten", "precision": fields})
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _bits(model: Any, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Return every parameter's and state's bytes on this rank."""
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    tensors = [*model._engine.store.shards, *state]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return [t.detach().reshape(-1).clone().view(torch.uint8).numpy().tobytes() for t in local]


def check_unscaled() -> None:
    """The kernel's pass and torch's give the same bits, and find the same infs."""
    assert use_triton(torch.device("cpu"))
    for dtype, planted in product(
        (torch.float32, torch.float16), (1.0, float("inf"), float("nan"))
    ):
        reduced = torch.linspace(-3, 3, 5000).to(dtype)
        reduced[4321] = planted
        ours, theirs = _scaler(initial=8.0), _scaler(initial=8.0)
        for scaler in (ours, theirs):
            scaler.begin({})
        got = ours.unscale(reduced.clone(), torch.empty(5000))
        with plain_forms():
            expected = theirs.unscale(reduced.clone(), torch.empty(5000))
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
        flags = [bool(scaler.take_flag()) for scaler in (ours, theirs)]
        assert flags == [planted != 1.0] * 2


def test_one_pass_casts_divides_and_looks(interpreted: Any) -> None:
    interpreted(check_unscaled)


def run_planted(stage: int, reduce: str, planted: float) -> None:
    model, optimizer = _net(stage, reduce=reduce)
    rank = model._engine.world.rank

    def backward(bad: bool) -> None:
        x = torch.full((2, 4), 0.5)
        if bad and rank == 1:
            x[0, 0] = planted
        model(x).backward()

    backward(False)
    optimizer.step()
    optimizer.zero_grad()
    before = _bits(model, optimizer)
    for bad in (True, False):  # the overflow comes first, then a good micro-batch of the same step
        backward(bad)
        assert all(p.grad is None for p in model.parameters())
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0.0
    optimizer.step()
    optimizer.zero_grad()
    assert _bits(model, optimizer) == before
    assert (model.loss_scale.scale, model.loss_scale.num_skipped) == (512.0, 1)
    backward(False)
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    assert _bits(model, optimizer) != before
    assert model.loss_scale.num_skipped == 1


PLANTED = [(0, "fp32", "inf"), (3, "fp16", "inf"), (1, "fp16", "nan")]
MORE = [c for c in product([0, 1, 3], ["fp32", "fp16"], ["inf", "nan"]) if c not in PLANTED]


@pytest.mark.parametrize(
    ("stage", "reduce", "planted"),
    [*PLANTED, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE)],
)
def test_one_ranks_overflow_skips_the_step_on_all(
    pool: Any, stage: int, reduce: str, planted: str
) -> None:
    pool.run(2, run_planted, stage, reduce, float(planted))


def run_summed(stage: int, is_synced: bool) -> list[Tensor]:
    model, _ = _net(stage)
    x = torch.full((2, 4), 0.5) + model._engine.world.rank
    if is_synced:
        model(x).backward()
    else:
        with model.no_sync():
            model(x).backward()
    model(x * 2).backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
            for p in model.parameters()]  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_sums_what_is_unscaled(pool: Any, stage: int) -> None:
    for rank in range(2):
        synced = pool.run(2, run_summed, stage, True)[rank]
        local = pool.run(2, run_summed, stage, False)[rank]
        for a, b in zip(synced, local, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-6)


def run_resumed(folder: str) -> None:
    model, optimizer = _net(3)
    x = torch.full((2, 4), 0.5)
    model(x * float("inf")).backward()
    optimizer.step()
    zerofx.save(folder, model, optimizer)
    other, its_optimizer = _net(3)
    zerofx.load(folder, other, its_optimizer)
    assert other.loss_scale.state_dict() == model.loss_scale.state_dict()
    assert (other.loss_scale.scale, other.loss_scale.num_skipped) == (512.0, 1)


def test_the_scale_is_saved_and_restored(pool: Any, tmp_path: Path) -> None:
    pool.run(2, run_resumed, str(tmp_path / "snapshot"))


def run_external(overflows: bool) -> tuple[float, list[Tensor]]:
    model, optimizer = _net(3, loss_scale="external")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.full((2, 4), 0.5)
    if overflows and model._engine.world.rank == 1:
        x[0, 0] = float("inf")
    before = list(model.state_dict().values())
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
    after = list(model.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == overflows
    return scaler.get_scale(), after


def test_torchs_grad_scaler_works_too(pool: Any) -> None:
    assert [scale for scale, _ in pool.run(2, run_external, True)] == [512.0, 512.0]
    assert [scale for scale, _ in pool.run(2, run_external, False)] == [1024.0, 1024.0]


def test_gradients_of_inputs_are_unscaled() -> None:
    model, _ = _net(3)
    x = torch.full((2, 4), 0.5, requires_grad=True)
    model(x).backward()
    exact = Net()
    exact.load_state_dict(model.state_dict())
    y = torch.full((2, 4), 0.5, requires_grad=True)
    exact(y).backward()
    assert x.grad is not None and y.grad is not None
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-2, atol=1e-5)


# -- plans ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute": "fp16"}, "loss_scale = None contradicts compute in 'fp16'.*'external'"),
        ({"compute": "bf16", "loss_scale": "dynamic"}, "only fp16 underflows"),
        ({"compute": "fp16", "loss_scale": 0}, "loss_scale = 0"),
        ({"compute": "fp16", "loss_scale": "dynamik"}, "are 'dynamic', a factor, 'external'"),
        ({"compute": "fp16", "loss_scale": {"grow": 2}}, "grow"),
        (
            {"compute": "fp16", "loss_scale": {"initial": 1.0, "minimum": 2.0}},
            "initial = 1.0 is below minimum = 2.0",
        ),
    ],
)
def test_bad_scales_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        zerofx.Plan(precision=fields)


def test_scales_survive_text() -> None:
    for scale in ("dynamic", 128.0, "external", {"initial": 4.0, "hysteresis": 2}):
        plan = zerofx.Plan(precision={"compute": "fp16", "loss_scale": scale})
        assert zerofx.Plan.from_yaml(plan.to_yaml()) == plan
        assert zerofx.Plan.from_json(plan.to_json()) == plan
