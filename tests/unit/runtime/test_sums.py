"""Sums of two formats: the bits of a whole addition, without a copy of all elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zerofx.runtime.loss_scale import LossScaler, ScaleRule
from zerofx.runtime.sums import add_, add_unscaled_
from zerofx.tools.demo.measure import PeakMemory

NUMEL = 1_000_003  # parts of unequal sizes
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("total", FORMATS, ids=str)
@pytest.mark.parametrize("value", FORMATS, ids=str)
def test_bits_are_those_of_a_whole_addition(total: torch.dtype, value: torch.dtype) -> None:
    torch.manual_seed(0)
    before, added = torch.randn(NUMEL).to(total), torch.randn(NUMEL).to(value)
    found, expected = before.clone(), before.clone()
    add_(found, added, 0.75)
    assert torch.equal(found, expected.add_(added, alpha=0.75))


@pytest.mark.parametrize("value", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("number", [1.0, float("inf")])
def test_the_scale_is_taken_out_and_an_overflow_noted(value: torch.dtype, number: float) -> None:
    scaler = scaler_of(8.0)
    total, added = torch.ones(NUMEL), torch.full((NUMEL,), 4.0, dtype=value)
    added[-1] *= number
    add_unscaled_(total, added, scaler)
    assert torch.equal(total[:-1], torch.full((NUMEL - 1,), 1.5))
    assert bool(scaler.take_flag()) == (number != 1.0)


def scaler_of(scale: float) -> LossScaler:
    rule = ScaleRule(scale, 0, 2.0, 0.5, 1.0, 1)
    scaler = LossScaler(rule, torch.device("cpu"))
    scaler.begin({})
    return scaler


@pytest.mark.parametrize("is_scaled", [False, True])
def test_no_copy_of_all_elements_is_made(is_scaled: bool) -> None:
    with PeakMemory(torch.device("cpu")) as memory:
        total, value = torch.zeros(NUMEL), torch.ones(NUMEL, dtype=torch.float16)
        scaler = scaler_of(8.0)
        add: Callable[[Tensor, Tensor], None] = add_
        if is_scaled:
            add = lambda total, value: add_unscaled_(total, value, scaler)  # noqa: E731
        for _ in range(2):
            add(total, value)
        with memory.step():
            add(total, value)
    assert memory.steps[0].high_bytes - total.nbytes - value.nbytes < 2**20
