"""The key of a call: equal exactly where one program serves both, and named where it differs."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zerofx.capture import ModelState, Signature, describe_difference, signature_key
from zerofx.errors import CaptureError


@dataclasses.dataclass
class Batch:
    x: Tensor
    scale: float = 1.0


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))


def key(model: nn.Module, *args: Any, **kwargs: Any) -> Signature:
    return signature_key(ModelState(model), args, kwargs)


CALLS: list[Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = [
    lambda: ((torch.zeros(2, 4),), {}),
    lambda: ((torch.zeros(2, 4), None), {"y": torch.ones(2), "flag": True, "name": "a"}),
    lambda: (({"a": torch.zeros(2), "b": [1, (2.5, torch.zeros(3))]},), {}),
    lambda: ((Batch(torch.zeros(2), 2.0),), {"dtype": torch.float32, "n": float("nan")}),
]


@pytest.mark.parametrize("call", CALLS)
def test_equal_calls_have_equal_keys(model: nn.Module, call: Callable[[], Any]) -> None:
    (args, kwargs), (again, more) = call(), call()
    first, second = key(model, *args, **kwargs), key(model, *again, **more)
    assert first == second and hash(first) == hash(second)
    assert describe_difference(first, second, ModelState(model)) == "nothing"


X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("new", "old", "difference"),
    [
        ((torch.zeros(3, 4),), (X,), "args[0].shape[0]: 3, was 2"),
        ((torch.zeros(2),), (X,), "args[0].ndim: 1, was 2"),
        ((X.long(),), (X,), "args[0].dtype: torch.int64, was torch.float32"),
        ((torch.zeros(4, 2).t(),), (X,), "args[0].stride(): (1, 2), was (4, 1)"),
        ((X.to("meta"),), (X,), "args[0].device: meta, was cpu"),
        ((X.clone().requires_grad_(),), (X,), "args[0].requires_grad: True, was False"),
        ((X, 1), (X, 2), "args[1]: 1, was 2"),
        ((X, 1), (X, True), "args[1]: int, was bool"),
        ((X, None), (X,), "positional arguments: 2, was 1"),
        (([X, X],), ([X],), "len(args[0]): 2, was 1"),
        (({"a": X[:1]},), ({"a": X},), "args[0]['a'].shape[0]: 1, was 2"),
        (({"b": X},), ({"a": X},), "args[0]: key 'b', was 'a'"),
        ((Batch(X[:, :1]),), (Batch(X),), "args[0].x.shape[1]: 1, was 4; args[0].x.stride()"),
        ((Batch(X, 2.0),), (Batch(X),), "args[0].scale: 2.0, was 1.0"),
        ((X, -0.0), (X, 0.0), "args[1]: '-0.0', was 0.0"),
        ((X, complex(0.0, -0.0)), (X, 0j), "args[1]: '-0j', was '0j'"),
        ((X, partial(F.gelu, approximate="tanh")), (X, partial(F.gelu)), "args[1]"),
    ],
)
def test_difference_is_named(
    model: nn.Module, new: tuple[Any, ...], old: tuple[Any, ...], difference: str
) -> None:
    first, second = key(model, *new), key(model, *old)
    assert first != second
    found = describe_difference(first, second, ModelState(model))
    assert found.startswith(difference.split(";")[0])


def test_keyword_arguments(model: nn.Module) -> None:
    state = ModelState(model)
    old, new = key(model, X, mask=X), key(model, X, mask=X[:1], labels=X)
    assert describe_difference(new, old, state) == (
        "mask.shape[0]: 1, was 2; labels: given, unlike before"
    )
    one, other = key(model, a=1, b=2), key(model, b=2, a=1)
    assert describe_difference(one, other, state) == "the order of keyword arguments"


def test_modes_of_torch_and_of_the_model(model: nn.Module) -> None:
    state, old = ModelState(model), key(model, X)
    with torch.no_grad():
        assert describe_difference(key(model, X), old, state) == "grad mode: False, was True"
    with torch.inference_mode():
        assert "inference mode: True" in describe_difference(key(model, X), old, state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "CPU autocast: ('cpu', torch.bfloat16" in describe_difference(
            key(model, X), old, state
        )
    model[1].eval()
    assert describe_difference(key(model, X), old, state) == "training of 1: False, was True"
    model.eval()
    model[2].weight.requires_grad_(False)
    assert describe_difference(key(model, X), old, state) == (
        "training of the model and 3 more: False, was True; "
        "requires_grad of 2.weight: False, was True"
    )


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"array": np.zeros(3)}, "array is a ndarray"),
        ({"batch": {"ids": [X, {1}]}}, r"batch\.ids\[1\] is a set"),
    ],
)
def test_argument_that_cannot_be_a_key(model: nn.Module, kwargs: dict[str, Any], name: str) -> None:
    with pytest.raises(CaptureError, match=f"argument {name}, which is neither a tensor nor"):
        key(model, **kwargs)


class Config:
    k = 1.0

    def scale(self, x: Tensor) -> Tensor:
        return x * self.k


class Slotted:
    __slots__ = ("k",)


@pytest.mark.parametrize(
    "make", [Config, Slotted, lambda: Config().scale], ids=["object", "slots", "bound method"]
)
def test_argument_that_would_be_baked_in(model: nn.Module, make: Callable[[], Any]) -> None:
    given = make()
    setattr(getattr(given, "__self__", given), "k", 5.0)  # noqa: B010  (a variable)
    with pytest.raises(CaptureError, match=r"argument options is a \w+, whose attributes .* baked"):
        key(model, X, options=given)


def test_constants_that_hash_by_identity_but_have_no_state(model: nn.Module) -> None:
    for constant in (F.gelu, torch.tanh, object(), range(2), partial(F.gelu), torch.float32):
        assert key(model, constant) == key(model, constant)
    frozen = types.MappingProxyType({})
    with pytest.raises(CaptureError, match="neither a tensor nor"):
        key(model, [{1}, frozen])


def difference(model: nn.Module, change: Callable[[nn.Module], Any]) -> str:
    """Return what a change makes different; the key is not the same, and is that of a copy."""
    state = ModelState(model)
    old = signature_key(state, (X,), {})
    assert signature_key(state, (X,), {}) == old
    change(model)
    new = signature_key(state, (X,), {})
    assert new != old and hash(new) != hash(old)
    assert signature_key(ModelState(copy.deepcopy(model)), (X,), {}) == new
    return describe_difference(new, old, state)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any
        self.twin: Any
        self.register_buffer("scale", torch.ones(2, 2))
        self.register_buffer("twin", self.scale)
        self.drop = nn.Dropout(0.5)
        self.eps, self.sizes, self.act, self.cache = 0.0, (1, 2.0), F.relu, None

    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(self.drop, "late", 1) + getattr(self, "eps2", self.eps)


def assign(path: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (assign("twin", torch.ones(2, 2)), "buffer twin: tensor, was one with scale"),
        (lambda m: (m.double(), setattr(m, "twin", m.scale)), "buffer scale.dtype: torch.float64"),
        (assign("scale", None), "buffer scale: None, was tensor; buffer twin: tensor, was one"),
        (lambda m: m.scale.unsqueeze_(0), "buffer scale.ndim: 3, was 2"),
        (lambda m: m.scale.t_(), "buffer scale.stride(): (1, 2), was (2, 1)"),
        (lambda m: delattr(m, "twin"), "buffer twin: gone"),
        (lambda m: m.register_buffer("late", torch.ones(1)), "buffer late: new"),
        (assign("drop.p", 0.25), "attribute drop.p: 0.25, was 0.5"),
        (assign("drop.inplace", 0), "attribute drop.inplace: int, was bool"),
        (assign("eps", -0.0), "attribute eps: '-0.0', was 0.0"),
        (assign("sizes", (1, 3.0)), "attribute sizes[1]: 3.0, was 2.0"),
        (assign("act", F.gelu), "attribute act: "),
        (assign("cache", []), "attribute cache: list, was NoneType"),
        (assign("drop.late", 1), "attribute drop.late: new"),
        (lambda m: (delattr(m, "eps"), setattr(m, "eps2", 0.0)), "attribute eps2: new; "),
    ],
)
def test_changes_in_the_model(change: Callable[[nn.Module], Any], expected: str) -> None:
    assert expected in difference(Owner(), change)


def test_an_attribute_that_is_new_is_a_change() -> None:
    """Code that no name leads to may read it: a function of another module, `getattr`."""
    model = Owner()
    state = ModelState(model)
    old = signature_key(state, (X,), {})
    model.step = 1
    assert "attribute step: new" in describe_difference(signature_key(state, (X,), {}), old, state)


def test_a_value_set_again_is_no_change() -> None:
    model = Owner()
    state = ModelState(model)
    old = signature_key(state, (X,), {})
    model.drop.p, model.sizes, model.scale = float("0.5"), (1, float("2")), torch.zeros(2, 2)
    model.twin = model.scale
    assert signature_key(state, (X,), {}) == old
