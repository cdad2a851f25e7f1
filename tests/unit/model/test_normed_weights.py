"""Weights that the hook forms of weight norm and spectral norm compute in each forward."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import remove_weight_norm, spectral_norm, weight_norm

import zerofx
from zerofx.errors import ShardError

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")

ATEN = zerofx.Plan(stage=3, kernels="aten")
X = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1))


def convolutions(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(norm(nn.Conv1d(2, 4, 3)), nn.ReLU(), norm(nn.Conv1d(4, 1, 3)))


def train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(X).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_the_weight_is_refused_outside_of_whole_and_right_inside(norm: Any) -> None:
    plain, model = convolutions(norm), zerofx.compile(convolutions(norm), ATEN)
    train(plain)
    train(model)
    reads: list[Callable[[Any], Any]] = [
        lambda w: w * 2, lambda w: 2 - w, lambda w: w.norm(), lambda w: w[0],
        torch.sum, lambda w: torch.stack([w, w]), lambda w: nn.functional.mse_loss(X, target=w),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(ShardError, match=r"0\.weight is read, .* zerofx\.whole\(model\)"):
            read(model[0].weight)
    plain.eval()
    model.eval()
    with torch.no_grad():
        expected = plain(X)
        torch.testing.assert_close(model(X), expected)
        programs = len(model.zerofx.programs)
        with zerofx.whole(model):
            torch.testing.assert_close(model[0].weight, plain[0].weight)
            torch.testing.assert_close(model(X), expected)
        with zerofx.whole(model[2]):
            torch.testing.assert_close(model[2].weight, plain[2].weight)
            assert not isinstance(model[0].weight, Tensor)
        torch.testing.assert_close(model(X), expected)
    assert len(model.zerofx.programs) == programs, "the attribute's values capture nothing again"
    assert not isinstance(model[0].weight, Tensor)


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_a_copy_of_a_trained_model_trains_by_itself(norm: Any) -> None:
    plain, model = convolutions(norm), zerofx.compile(convolutions(norm), ATEN)
    train(plain)
    train(model)
    twin = copy.deepcopy(model)
    train(twin, 3)
    torch.testing.assert_close(model.eval()(X), plain.eval()(X))
    train(plain.train(), 3)
    torch.testing.assert_close(twin.eval()(X), plain.eval()(X))


def test_a_norm_that_is_removed_later_is_named() -> None:
    model = zerofx.compile(convolutions(weight_norm), ATEN)
    train(model)
    with zerofx.whole(model), torch.no_grad():
        expected = model(X)
        remove_weight_norm(model[0])
        torch.testing.assert_close(model(X), expected)
    with pytest.raises(ShardError, match=r"0\.weight is a parameter that the model did not have"):
        model(X)


def test_the_root_may_be_normed() -> None:
    torch.manual_seed(0)
    model = zerofx.compile(weight_norm(nn.Linear(3, 3)), ATEN)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ShardError, match=r"^weight is read"):
        abs(model.weight)
    with zerofx.whole(model), torch.no_grad():
        assert model.weight.shape == (3, 3)
    with pytest.raises(ShardError, match=r"^weight is read"):
        float(model.weight)


def test_within_whole_a_model_is_neither_copied_nor_pickled() -> None:
    model = zerofx.compile(nn.Sequential(nn.Linear(3, 3)), ATEN)
    with zerofx.whole(model):
        for attempt in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(ShardError, match="Copy the whole model outside of the block"):
                attempt(model)
    assert copy.deepcopy(model[0]).in_features == 3
