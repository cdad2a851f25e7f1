"""What a first call leaves in a model's attributes, and branches for compilers that raise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_check import Body, snapshot, vectors
from torch import Tensor, nn

import zerofx
from zerofx.errors import CaptureError

PLAN = zerofx.Plan(kernels="aten")


def trained(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Train with SGD; return the losses and the parameters."""
    losses = []
    for x in batches:
        loss = model(x).pow(2).sum()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        model.zero_grad()
        losses.append(loss.detach())
    return losses + [value.clone() for value in model.state_dict().values()]


def check_training(make: Callable[[], nn.Module], *batches: Tensor) -> Any:
    """Compare two steps or more with plain PyTorch; return the compiled model and the plain one."""
    plain = make()
    model = make()
    model.load_state_dict(plain.state_dict())
    zerofx.compile(model, PLAN)
    for found, wanted in zip(trained(model, [*batches]), trained(plain, [*batches]), strict=True):
        torch.testing.assert_close(found, wanted)
    return model, plain


def remember_width(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.width = h.shape[1]
    return h * m.width


def cached(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """Keep a table for the longest input so far, as rotary embeddings do."""
    if getattr(m, "table", None) is None or m.length < h.shape[0]:
        m.length = h.shape[0]
        m.table = torch.arange(m.length).float().cos()[:, None]
        m.by_length = {m.length: m.table}
    return h * m.table[: h.shape[0]] + next(iter(m.by_length.values()))[: h.shape[0]]


class Later(Body):
    """A body that may have a module to hook into."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__(body)
        self.act = nn.ReLU()


def double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


def install_hooks(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if not getattr(m, "has_hooks", False):
        m.has_hooks = True
        m.act.register_forward_hook(double)
    return m.act(h)


def raise_if_compiled(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        raise NotImplementedError("not under a compiler")
    return h * 3


@pytest.mark.parametrize("body", [remember_width, cached, install_hooks, raise_if_compiled])
def test_first_call_leaves_what_later_calls_find(body: Callable[..., Any]) -> None:
    model, plain = check_training(functools.partial(Later, body), vectors(), vectors(1))
    assert len(model.programs) == 1
    for name in vars(plain).keys() - vars(nn.Module()).keys():
        assert str(getattr(model, name)) == str(getattr(plain, name))
    assert len(model.act._forward_hooks) == len(plain.act._forward_hooks)


def test_a_table_follows_the_longest_input() -> None:
    make = functools.partial(Body, cached)
    model, _ = check_training(make, vectors()[:2], vectors(), vectors()[:2], vectors())
    assert model.length == 3 and len(model.programs) <= 3


def test_an_attribute_that_forward_only_sets_follows_each_call() -> None:
    """Calls of two lengths in turn have one program each, and the attribute is each call's own."""

    def body(m: Any, h: Tensor, x: Tensor) -> Tensor:
        m.length = x.shape[0]
        return h * m.length

    model = zerofx.compile(Later(body), PLAN)
    for _ in range(3):
        for x in (vectors(), vectors()[:2]):
            model(x)
            assert model.length == x.shape[0]
    assert len(model.programs) == 2
    made = {id(program) for program in model.programs}
    model(vectors())
    assert {id(program) for program in model.programs} == made


def test_capture_alone_leaves_the_model_as_it_was() -> None:
    for body in (remember_width, cached, install_hooks):
        model = Later(body)
        before = snapshot(model)
        zerofx.capture(model, (vectors(),))
        assert snapshot(model) == before


def first_alone(m: Any, h: Tensor, x: Tensor) -> Tensor:
    scale = getattr(m, "scale", 2.0)
    m.scale = 1.0
    return h * scale


def grow(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.seen = [*getattr(m, "seen", ()), 1]
    return h


@pytest.mark.parametrize(("body", "name"), [(first_alone, "scale"), (grow, "seen")])
def test_a_first_call_that_differs_from_the_next_is_refused(body: Any, name: str) -> None:
    """The fix that the message names works: a call before compile, or the values returned."""
    model = Later(body)
    with pytest.raises(CaptureError, match=f"changes the attribute {name} at test_capture_first"):
        zerofx.capture(model, (vectors(),))
    assert not hasattr(model, name)
    if body is first_alone:
        model(vectors())
        zerofx.capture(model, (vectors(),))


def test_an_error_of_the_model_is_raised_also_without_the_compiler_flags() -> None:
    said = []

    def body(m: Any, h: Tensor, x: Tensor) -> Tensor:
        said.append(torch.compiler.is_compiling())
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        zerofx.capture(Later(body), (vectors(),))
    assert said == [True, False]


def test_lazy_modules_after_one_batch() -> None:
    """What the refusal of parameters without a shape names."""
    lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(CaptureError, match="Run one batch through the lazy module first"):
        zerofx.compile(lazy, PLAN)

    def make() -> nn.Module:
        made = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
        made(vectors())
        return made

    check_training(make, vectors(), vectors(1))
