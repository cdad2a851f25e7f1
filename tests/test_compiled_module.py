"""What a compiled model does as an nn.Module: attributes that are read and set through it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zerofx


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
