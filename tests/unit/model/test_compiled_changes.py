"""What is changed after the first call is seen by the next: hooks, buffers, attributes, copies."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_full_backward_hook,
)
from torch.optim.swa_utils import AveragedModel

import zerofx
from zerofx.errors import CaptureError, ShardError

ATEN = {"kernels": "aten"}
X = torch.linspace(-1, 1, 8).view(2, 4)


class Block(nn.Module):
    """Reads a buffer and two plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any
        self.fc = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(1.0, 9.0).view(2, 4))
        self.factor, self.act = 2.0, torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) * self.factor * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(x).float()).sum()


def pair(kernels: str = "aten", max_programs: int = 16) -> tuple[Model, Any]:
    """Return a plain model and a compiled twin of it that has been called."""
    torch.manual_seed(0)
    plain = Model()
    model = zerofx.compile(copy.deepcopy(plain), {"kernels": kernels, "max_programs": max_programs})
    check_equal(model, plain)
    return plain, model


def check_equal(model: Any, plain: Model) -> None:
    got, want = model(X), plain(X)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    got.backward()
    want.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    model.zero_grad()
    plain.zero_grad()


# -- hooks ----------------------------------------------------------------------------------------
def triple(module: nn.Module, given: Any, out: Tensor) -> Tensor | None:
    return out * 3 if isinstance(module, nn.Linear) else None


def test_a_copy_runs_the_programs_of_its_hooks() -> None:
    plain, model = pair()
    handle = model.block.fc.register_forward_hook(triple)
    plain.block.fc.register_forward_hook(triple)
    check_equal(model, plain)
    twin, mean = copy.deepcopy(model), AveragedModel(model)
    for each in (twin, mean.module):
        check_equal(each, plain)
        assert each.programs == [model.programs[1]], "it was compiled before"
    handle.remove()
    assert not torch.equal(model(X), twin(X)), "the copy has a hook of its own"
    check_equal(twin, plain)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_all_modules_reach_submodules() -> None:
    plain, model = pair()
    with register_module_forward_hook(triple):
        check_equal(model, plain)
        assert torch.equal(model(X), plain(X))
    check_equal(model, plain)
    assert len(model.programs) == 2

    def flip(module: nn.Module, given: Any, made: Any) -> Any:
        found = isinstance(module, nn.Linear)
        return tuple(g if g is None else -g for g in given) if found else None

    with register_module_full_backward_hook(flip):
        model(X).backward()
        plain(X).backward()
        grad = plain.block.fc.weight.grad
        torch.testing.assert_close(model.block.fc.weight.grad, grad)
    plain.zero_grad()
    plain(X).backward()
    torch.testing.assert_close(plain.block.fc.weight.grad, -grad)


def test_hooks_of_all_modules_see_the_users_alone() -> None:
    seen: list[str] = []
    _, model = pair()
    with register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__)):
        model(X)
    assert set(seen) == {"Linear", "Block", "Model"}


# -- buffers --------------------------------------------------------------------------------------
FORMS = {
    "float64": torch.full((2, 4), 2.0, dtype=torch.float64),
    "strided": torch.arange(8.0).view(4, 2).t(),
    "int64": torch.full((2, 4), 3, dtype=torch.int64),
    "int8": torch.full((2, 4), 3, dtype=torch.int8),
    "short": torch.tensor([5.0]),
}


@pytest.mark.parametrize(
    ("kernels", "forms"), [("aten", [*FORMS]), ("inductor", ["float64", "strided"])]
)
def test_buffers_may_take_another_form(kernels: str, forms: list[str]) -> None:
    plain, model = pair(kernels)
    for form in forms:
        plain.block.scale, model.block.scale = FORMS[form].clone(), FORMS[form].clone()
        check_equal(model, plain)
    assert len(model.programs) == 1 + len(forms)


def test_loading_with_assign_takes_buffers_of_another_dtype() -> None:
    plain, model = pair()
    state = {"scale": torch.full((2, 4), 2.0, dtype=torch.float64)}
    model.block.load_state_dict(state, assign=True, strict=False)
    plain.block.load_state_dict(state, assign=True, strict=False)
    assert model.block.scale.dtype == torch.float64
    check_equal(model, plain)


def test_a_buffer_set_to_none_fails_as_the_model_does() -> None:
    plain, model = pair()
    plain.block.scale = model.block.scale = None
    for each in (plain, model):
        with pytest.raises(TypeError, match="NoneType"):
            each(X)


def test_conversion_takes_the_buffers_along_and_leaves_shards() -> None:
    model = Model()
    model.block.scale = model.block.scale.double()
    model.block.fc.register_buffer("same", model.block.scale)
    compiled: Any = zerofx.compile(model, ATEN)
    compiled(X)
    compiled.float()
    assert compiled.block.scale.dtype == torch.float32
    assert compiled.block.fc.same is compiled.block.scale
    compiled(X)
    assert len(compiled.programs) == 2
    before = compiled.block.scale
    assert compiled.to("cpu").block.scale is before, "nothing to do"
    with pytest.raises(ShardError, match="another layout"):
        compiled.half()
    assert compiled.block.scale is before, "all or nothing"


def test_buffers_do_not_move() -> None:
    model = nn.Module()
    model.register_buffer("scale", torch.ones(1))
    model.forward = lambda x: x * model.scale  # type: ignore[method-assign]
    compiled = zerofx.compile(model, ATEN)
    with pytest.raises(ShardError, match="the model: buffer scale is on cpu"):
        compiled.to("meta")


# -- attributes -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.block, "factor", 3.0),
        lambda m: setattr(m.block, "factor", -0.0),
        lambda m: setattr(m.block, "act", torch.tanh),
        lambda m: setattr(m.block, "forward", lambda x: x * 2),
    ],
)
def test_an_attribute_of_a_submodule(change: Callable[[Any], None]) -> None:
    plain, model = pair()
    change(plain)
    change(model)
    got, want = model(X), plain(X)
    assert torch.equal(got, want) and torch.equal(torch.signbit(got), torch.signbit(want))


def test_an_attribute_that_is_set_back_compiles_nothing() -> None:
    plain, model = pair()
    for factor in (3.0, 2.0, 3.0):
        plain.block.factor = model.block.factor = factor
        check_equal(model, plain)
    assert len(model.programs) == 2


def test_an_attribute_that_never_rests_is_named(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = pair(max_programs=2)
    with caplog.at_level(logging.WARNING, "zerofx"):
        for step in range(4):
            plain.block.factor = model.block.factor = float(step + 3)
            check_equal(model, plain)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "zerofx"]
    assert "attribute block.factor: 4.0, was 3.0" in said
    assert len(model.programs) == 2


# -- arguments ------------------------------------------------------------------------------------
class Options:
    k = 1.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, options: Any) -> Tensor:
        k = options if isinstance(options, float) else options.k
        return torch.copysign(self.weight, torch.tensor(k)).mul(x).sum()


def test_an_argument_that_changes_inside_is_not_baked_in() -> None:
    model = zerofx.compile(Scaled(), ATEN)
    refusing = zerofx.compile(Scaled(), {**ATEN, "islands": "refuse"})
    options = Options()
    assert model(torch.ones(4), options).item() == 4.0
    for k in (-5.0, 5.0):
        options.k = k
        assert model(torch.ones(4), options).item() == (4.0 if k > 0 else -4.0)
        with pytest.raises(CaptureError, match=r"args\[1\] is a Options, whose attributes"):
            refusing(torch.ones(4), options)


def test_minus_zero_is_another_argument_than_zero() -> None:
    model, x = zerofx.compile(Scaled(), ATEN), torch.ones(4)
    assert [model(x, k).item() for k in (0.0, -0.0, 0.0)] == [4.0, -4.0, 4.0]


def test_a_copy_leaves_gradients_behind_as_a_plain_one_does() -> None:
    plain, model = pair()
    plain(X).backward()
    model(X).backward()
    for each in (copy.deepcopy(plain), copy.deepcopy(model)):
        assert all(p.grad is None for p in each.parameters())
