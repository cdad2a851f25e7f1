"""Plan(update="in-backward") in a training loop: closures, several optimizers, copies, saves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import CASES
from optim_cases import mixed_batch, mixed_model
from torch import Tensor, nn
from update_cases import EARLY, is_unchanged, simple, values

import zerofx
from zerofx.errors import GradientError


def test_gradients_of_inputs_alone_update_nothing() -> None:
    case = CASES["stage"]
    model = zerofx.compile(case.make(), {**EARLY, "stage": 3})
    optimizer = zerofx.optim.SGD(model.parameters(), lr=0.1)
    args, kwargs = case.batch(0)
    args = tuple(a.requires_grad_() if a.is_floating_point() else a for a in args)
    before = values(model)
    out = model(*args, **kwargs)
    first = out if isinstance(out, Tensor) else next(iter(out))
    asked = [a for a in args if a.requires_grad]
    torch.autograd.grad(first.sum(), asked, allow_unused=True)
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
