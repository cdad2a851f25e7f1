"""Plan(update="in-backward"): the ordinary step's bits in less memory; what it cannot raises."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from measure import measure
from models import CASES
from optim_cases import mixed_batch, mixed_groups, mixed_model, ours
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx.errors import GradientError, OptimizerError, PlanError, ShardError
from zerofx.plan import Plan

FINE = {"kernels": "aten", "bucket_bytes": 2000, "persist_below": 200}
EARLY = {**FINE, "update": "in-backward"}
OPTIMIZERS = ["adamw", "amsgrad", "momentum", "lion", "lamb"]
STEPS = 4


def rank_here() -> int:
    return int(os.environ.get("RANK", "0"))


# -- the same bits ------------------------------------------------------------------------------
def trained(name: str, plan: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor], list[Any]]:
    """Return losses, the model's state and the optimizer's after a few steps with a schedule."""
    model = zerofx.compile(mixed_model(), plan)
    optimizer = ours(name, mixed_groups(model))
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS + 1)
    losses = []
    for step in range(STEPS):
        loss = model(*mixed_batch(step, rank_here()))
        loss.backward()
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    states = [
        getattr(v, "to_local", lambda v=v: v)()
        for _, held in sorted(optimizer.state_dict()["state"].items())
        for _, v in sorted(held.items())
        if isinstance(v, Tensor)
    ]
    return losses, model.state_dict(), states


def differing(names: list[str], plan: dict[str, Any]) -> list[str]:
    """Return where training with updates in backward differs in a bit from stepping behind it."""
    found = []
    for name in names:
        step = trained(name, {**FINE, **plan})
        early = trained(name, {**EARLY, **plan})
        same = {
            "losses": all(map(torch.equal, step[0], early[0])),
            "model": all(torch.equal(v, early[1][k]) for k, v in step[1].items()),
            "states": len(step[2]) == len(early[2]) and all(map(torch.equal, step[2], early[2])),
        }
        assert len(step[2]) > 0
        found += [f"{name} {plan}: {what}" for what, is_same in same.items() if not is_same]
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank(stage: int) -> None:
    assert not differing(OPTIMIZERS, {"stage": stage})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks(pool: Pool, stage: int) -> None:
    names = {0: ["adamw", "lamb"], 1: ["momentum"], 2: ["amsgrad"], 3: ["adamw", "lion", "lamb"]}
    for found in pool.run(2, differing, names[stage], {"stage": stage}):
        assert not found


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [*({"stage": s} for s in range(4)),
     {"stage": 3, "precision": "bf16"}, {"stage": 2, "precision": "bf16"},
     {"stage": 3, "kernels": "inductor"}, {"stage": 3, "shard_axis_size": 2},
     {"stage": 3, "activations": "recompute"}],
    ids=str,
)  # fmt: skip
def test_two_ranks_everywhere(pool: Pool, plan: dict[str, Any]) -> None:
    for found in pool.run(2, differing, OPTIMIZERS, plan):
        assert not found


def test_a_shared_weight_is_updated_behind_its_last_use() -> None:
    """Where nothing is sharded, layers compute on the very memory that the update writes."""
    case = CASES["chain"]
    finals = []
    for update in ("step", "in-backward"):
        model = zerofx.compile(case.make(), {**FINE, "stage": 0, "update": update})
        optimizer = zerofx.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            args, kwargs = case.batch(step)
            model(*args, **kwargs).backward()
            optimizer.step()
            optimizer.zero_grad()
        finals.append(model.state_dict())
    assert all(torch.equal(v, finals[1][k]) for k, v in finals[0].items())


# -- memory -------------------------------------------------------------------------------------
LARGE = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 1024}


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_the_peak_is_lower_by_the_gradients(stage: int) -> None:
    """Where it stood at the end of backward: each bucket's is freed before the next is stored."""
    step = measure("gpt", {**LARGE, "stage": stage})
    early = measure("gpt", {**LARGE, "stage": stage, "update": "in-backward"})
    assert step.peak_bytes - early.peak_bytes > 0.99 * step.shard_bytes


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_the_lower_peak_is_predicted(pool: Pool, stage: int) -> None:
    plan = {**LARGE, "stage": stage}
    for step, early in zip(
        pool.run(2, measure, "gpt", plan),
        pool.run(2, measure, "gpt", {**plan, "update": "in-backward"}),
        strict=True,
    ):
        saved = step.peak_bytes - early.peak_bytes
        expected = step.predicted_bytes - early.predicted_bytes
        assert saved > 0.5 * step.shard_bytes
        assert abs(saved - expected) < 0.02 * step.peak_bytes
        assert abs(early.predicted_bytes / early.peak_bytes - 1) < 0.02


def test_gradients_are_freed_between_backward_and_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zerofx.compile(mixed_model(), {**EARLY, "stage": 3})
    optimizer = ours("adamw", mixed_groups(model))
    model(*mixed_batch(0, 0)).backward()
    held = model._engine.store._grads.values()
    assert held and all(g.flat.untyped_storage().nbytes() == 0 for g in held)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


# -- what else a loop does ------------------------------------------------------------------------
def simple(plan: dict[str, Any] = EARLY, **options: Any) -> tuple[Any, Any, list[Tensor]]:
    model = zerofx.compile(mixed_model(), {"stage": 3, **plan})
    return model, ours("adamw", mixed_groups(model), **options), list(mixed_batch(0, 0))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def is_unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_gradients_of_inputs_alone_update_nothing() -> None:
    case = CASES["stage"]
    model = zerofx.compile(case.make(), {**EARLY, "stage": 3})
    optimizer = zerofx.optim.SGD(model.parameters(), lr=0.1)
    args, kwargs = case.batch(0)
    args = tuple(a.requires_grad_() if a.is_floating_point() else a for a in args)
    before = values(model)
    out = model(*args, **kwargs)
    first = out if isinstance(out, Tensor) else next(iter(out))
    torch.autograd.grad(first.sum(), [a for a in args if a.requires_grad])
    assert is_unchanged(model, before)
    model(*args, **kwargs)  # no step is owed
    optimizer.step()


def test_a_closure_runs_the_loop() -> None:
    model, optimizer, batch = simple()
    before = values(model)

    def closure() -> Tensor:
        loss = model(*batch)
        loss.backward()
        return loss

    assert torch.is_tensor(optimizer.step(closure))
    assert not is_unchanged(model, before)
    optimizer.step(closure)


def test_an_optimizer_built_before_is_handed_over() -> None:
    model = mixed_model()
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=0.01)
    compiled = zerofx.compile(model, {**EARLY, "stage": 3}, optimizer=optimizer)
    before = values(compiled)
    compiled(*mixed_batch(0, 0)).backward()
    assert not is_unchanged(compiled, before)
    optimizer.step()


def test_the_newest_optimizer_takes_over() -> None:
    model, _first, batch = simple()
    second = zerofx.optim.SGD(model.parameters(), lr=0.0)
    before = values(model)
    model(*batch).backward()
    assert is_unchanged(model, before)
    second.step()


def test_two_optimizers_share_a_model() -> None:
    model = zerofx.compile(mixed_model(), {**EARLY, "stage": 3})
    params = list(model.parameters())
    first = zerofx.optim.AdamW(params[::2], lr=0.01)
    second = zerofx.optim.SGD(params[1::2], lr=0.01)
    for step in range(2):
        before = values(model)
        model(*mixed_batch(step, 0)).backward()
        assert not is_unchanged(model, before)
        first.step()
        first.zero_grad()
        second.step()
        second.zero_grad()


def test_a_deep_copy_has_an_optimizer_of_its_own() -> None:
    model, optimizer, batch = simple()
    twin = copy.deepcopy(model)
    before = values(twin)
    model(*batch).backward()
    optimizer.step()
    assert is_unchanged(twin, before)
    with pytest.raises(GradientError, match=r"no optimizer of zerofx.optim has it"):
        twin(*batch).backward()
    assert is_unchanged(twin, before)


def test_parameters_of_other_models_are_stepped_as_ever() -> None:
    model = zerofx.compile(mixed_model(), {**EARLY, "stage": 3})
    plain = nn.Linear(3, 2)
    optimizer = zerofx.optim.SGD([*model.parameters(), *plain.parameters()], lr=0.1)
    weight = plain.weight.detach().clone()
    model(*mixed_batch(0, 0)).backward()
    plain(torch.ones(3)).sum().backward()
    optimizer.step()
    assert torch.equal(plain.weight, weight - 0.1)


@pytest.mark.parametrize("how", ["save", "state_dict"])
def test_saved_and_loaded(tmp_path: Any, how: str) -> None:
    model, optimizer, batch = simple()

    def step(model: nn.Module, optimizer: Any) -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model, optimizer)
    zerofx.save(tmp_path / "at", model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict()), values(model)
    for _ in range(3):
        step(model, optimizer)
    expected = values(model)
    again, other, _ = simple()
    again(*batch).backward()  # the step behind this one never comes
    if how == "save":
        zerofx.load(tmp_path / "at", again, other)
    else:
        other.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
    for _ in range(3):
        step(again, other)
    assert is_unchanged(again, expected)


def test_the_emitted_directory_loads(tmp_path: Any) -> None:
    model, optimizer, batch = simple()
    model(*batch).backward()
    optimizer.step()
    directory = model.programs[0].emit(tmp_path / "program")
    text = (tmp_path / "program" / "schedule.py").read_text()
    assert text.count("rt.update(") == text.count("rt.store_grad(") > 1
    program = zerofx.load_program(tmp_path / "program")
    assert program.plan.update == "in-backward", directory
    model.adopt(tmp_path / "program")
    before = values(model)
    model(*batch).backward()
    assert not is_unchanged(model, before)
    assert "update b0'" in str(program.schedule())


# -- what raises, with nothing changed ----------------------------------------------------------
def test_a_second_backward_raises_before_it_changes_anything() -> None:
    model, optimizer, batch = simple()
    model(*batch).backward()
    before = values(model)
    with pytest.raises(GradientError, match=r"second backward since optimizer.step"):
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
        if next(count) == 4:
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


class Pair(nn.Module):
    """Two parts, of which a loss trains one or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.made(x).tanh()).square().mean()


def alternate(plan: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = zerofx.compile(Pair(), {**FINE, "bucket_bytes": 0, "stage": 3, **plan})
    parts = [model.made, model.judge]
    optimizers = [zerofx.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    for step in range(6):
        for number, part in enumerate(parts):
            part.requires_grad_(number == step % 2)
        optimizers[step % 2].zero_grad()
        model(torch.full((2, 4), 0.1 * step)).backward()
        optimizers[step % 2].step()
    return values(model)


def test_two_parts_in_turn() -> None:
    step, early = alternate({}), alternate({"update": "in-backward"})
    assert all(torch.equal(v, early[k]) for k, v in step.items())


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
    with pytest.raises(ShardError, match=r"torch.optim.AdamW cannot; use zerofx.optim"):
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
    with pytest.raises(GradientError, match=r"no_sync\(\) puts off"), model.no_sync():
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
