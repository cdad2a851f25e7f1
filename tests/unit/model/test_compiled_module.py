"""What a compiled model does as an nn.Module: attributes that are read and set through it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.errors import ShardError


class Scaled(nn.Module):
    """A model whose forward reads a plain attribute and a property."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = 2.0
        self._shift = 0.0

    @property
    def shift(self) -> float:
        return self._shift

    @shift.setter
    def shift(self, value: float) -> None:
        self._shift = value

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * self.scale + self.shift).sum()


def compiled() -> tuple[Scaled, zerofx.CompiledModule, Tensor]:
    torch.manual_seed(0)
    plain = Scaled()
    torch.manual_seed(0)
    return plain, zerofx.compile(Scaled(), {"kernels": "aten"}), torch.ones(2, 4)


def test_setting_an_attribute_of_the_model_is_honoured() -> None:
    plain, model, x = compiled()
    assert torch.equal(model(x), plain(x))
    for name, value in (("scale", 3.0), ("shift", 1.5)):
        setattr(plain, name, value)
        setattr(model, name, value)
        assert getattr(model, name) == value
        assert torch.equal(model(x), plain(x))
        model(x).backward()
        plain(x).backward()
        assert torch.equal(model.fc.weight.grad, plain.fc.weight.grad)
        model.zero_grad()
        plain.zero_grad()


def test_an_attribute_of_ones_own_stays_on_the_wrapper() -> None:
    _, model, x = compiled()
    model(x)
    model.tag = "mine"
    assert model.tag == "mine" and len(model.programs) == 1


def test_a_sequential_can_be_indexed() -> None:
    model = zerofx.compile(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), {"kernels": "aten"})
    assert tuple(model[0].weight.shape) == (4, 3) and len(model) == 2 and bool(model)
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU]


def test_no_program_before_the_first_call_is_said() -> None:
    _, model, _ = compiled()
    assert model.programs == []
    with pytest.raises(IndexError, match="compiled at the first call"):
        model.programs[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_left_behind_is_refused(stage: int) -> None:
    plain = Scaled()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = zerofx.compile(plain, {"kernels": "aten", "stage": stage})
    model(torch.ones(2, 4)).backward()
    with pytest.raises(ShardError, match=r"SGD was built before .* optimizer=optimizer"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_an_optimizer_that_was_handed_over_is_not() -> None:
    plain = Scaled()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = zerofx.compile(plain, {"kernels": "aten"}, optimizer=optimizer)
    before = model.fc.weight.detach().clone()
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    assert not torch.equal(model.fc.weight, before)


class Rooted(nn.Module):
    """Has a parameter of its own at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def test_load_state_dict_assigns_to_the_root_too() -> None:
    model = zerofx.compile(Rooted(), {"kernels": "aten"})
    x = torch.ones(4)
    assert model(x).item() == 4.0
    model.load_state_dict({"weight": torch.full((4,), 3.0)}, assign=True)
    assert model(x).item() == 12.0
    model.weight = nn.Parameter(torch.full((4,), 5.0))
    assert model(x).item() == 20.0
