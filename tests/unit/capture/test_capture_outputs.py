"""What of a call's result is differentiated, and how results of any structure come back."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_check import check
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zerofx
from zerofx.capture import call as trees
from zerofx.errors import CaptureError
from zerofx.ir.meta import OutputInfo, Role
from zerofx.ir.program import Program


class Returning(nn.Module):
    """A linear layer whose result `body` turns into what forward returns."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, self.fc(x), x)


@dataclasses.dataclass
class Result:
    loss: Tensor
    logits: Tensor
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor
    scale: float

    def __post_init__(self) -> None:
        raise AssertionError("a tree is rebuilt without the constructor")


class Fields(dict):
    """A dict subclass that no library registers."""


class Output(collections.OrderedDict):
    """What diffusers returns: a mapping whose library registered it without names of its parts."""


class Both:
    """Registered without names too, and no mapping."""

    def __init__(self, one: Tensor, two: Tensor) -> None:
        self.one, self.two = one, two


pytree.register_pytree_node(
    Output, lambda o: (list(o.values()), list(o)), lambda v, c: Output(zip(c, v, strict=True))
)
pytree.register_pytree_node(Both, lambda b: ([b.one, b.two], None), lambda v, c: Both(*v))
Point = collections.namedtuple("Point", "x y")


def x() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def outputs(program: Program, role: Role = Role.OUTPUT) -> list[OutputInfo]:
    return [i for i in next(iter(program.outputs.values())) if i.role is role]


# -- which output is differentiated ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "loss", "differentiable"),
    [
        (lambda m, h, x: h.mean(), 0, (0,)),
        (lambda m, h, x: (h, h.mean()), 1, (1,)),
        (lambda m, h, x: {"h": h, "loss": h.mean(), "other": h.sum()}, 1, (1,)),
        (lambda m, h, x: {"loss": h.mean().reshape(1), "h": h}, 0, (0,)),
        (lambda m, h, x: {"loss": h.mean(-1), "h": h}, None, (0, 1)),
        (lambda m, h, x: (h.mean(), (h > 0).float().mean()), 0, (0,)),  # a metric has no gradient
        (lambda m, h, x: (h.mean(), h.sum()), None, (0, 1)),
        (lambda m, h, x: {"sample": h, "commit_loss": h.mean()}, None, (0, 1)),  # part of a loss
        (lambda m, h, x: {"total": h.mean(), "sample": h.detach()}, 0, (0,)),
        (lambda m, h, x: h, None, (0,)),
        (lambda m, h, x: [h.argmax(-1), h, h.detach()], None, (1,)),
    ],
)
def test_choice_of_the_loss(
    body: Callable[..., Any], loss: int | None, differentiable: tuple[int, ...]
) -> None:
    program = check(Returning(body), x())
    assert program.calling.loss == loss
    assert program.calling.differentiable == differentiable
    tangents = program.placeholders("joint", Role.TANGENT)
    assert [n.meta["zfx"].index for n in tangents] == list(differentiable)


def test_all_outputs_differentiated_on_demand() -> None:
    model = Returning(lambda m, h, x: {"loss": h.mean(), "h": h})
    program = zerofx.capture(model, (x(),), differentiate="all")
    assert program.calling.loss is None and program.calling.differentiable == (0, 1)


def test_only_the_loss_is_returned_on_demand() -> None:
    model = Returning(lambda m, h, x: Result(h.mean(), h))
    program = zerofx.capture(model, (x(),), outputs="loss")
    assert [i.name for i in outputs(program)] == ["loss"]
    result = trees.unflatten(["the loss", None, None], program.calling.out_spec)
    assert result == Result("the loss", None, None)


def test_with_only_the_loss_asked_for_it_may_have_any_name() -> None:
    model = Returning(lambda m, h, x: {"total": h.mean(), "h": h})
    program = zerofx.capture(model, (x(),), outputs="loss")
    assert program.calling.loss == 0 and [i.name for i in outputs(program)] == ["total"]


def test_inputs_that_require_grad_get_gradients() -> None:
    model = Returning(lambda m, h, x: {"loss": (h * x).sum(), "h": h})
    program = check(model, x().requires_grad_())
    assert [(i.name, i.index) for i in outputs(program, Role.INPUT_GRAD)] == [("x", 0)]
    frozen = check(Returning(lambda m, h, x: h).requires_grad_(False), x().requires_grad_())
    assert frozen.is_training and not outputs(frozen, Role.GRAD)


# -- structure ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "names"),
    [
        (lambda m, h, x: h, ("output",)),
        (lambda m, h, x: (h.mean(), [h, {"k": h + 1}]), ("[0]", "[1][0]", "[1][1].k")),
        (lambda m, h, x: Result(h.mean(), h, (h, 3)), ("loss", "logits", "more[0]", "more[1]")),
        (lambda m, h, x: Point(h.mean(), None), ("x", "y")),
        (lambda m, h, x: Fields(loss=h.mean(), n=3), ("loss", "n")),
        (lambda m, h, x: collections.OrderedDict(b=h, a="text"), ("b", "a")),
    ],
)
def test_result_is_rebuilt(body: Callable[..., Any], names: tuple[str, ...]) -> None:
    model = Returning(body)
    program = check(model, x())
    calling = program.calling
    assert calling.output_names == names
    expected = model(x())
    found = {i.index: i.name for i in outputs(program)} | calling.constants
    result = trees.unflatten([found[i] for i in range(len(names))], calling.out_spec)
    assert type(result) is (str if isinstance(expected, Tensor) else type(expected))
    for leaf, name in zip(trees.flatten(result)[0], names, strict=True):
        assert leaf == name or leaf in (3, None, "text")


def test_classes_registered_without_names_come_back() -> None:
    make = lambda model, y, x: {"a": [Output(sample=y.sum(), shape=Both(y, x))]}  # noqa: E731
    model = zerofx.compile(Returning(make), zerofx.Plan(kernels="aten"))
    found = model(x())["a"][0]
    assert type(found) is Output and type(found["shape"]) is Both
    names = ("a[0].sample", "a[0].shape[0]", "a[0].shape[1]")
    assert model.programs[0].calling.output_names == names
    assert not model.zerofx.islands


def test_record_as_argument() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, batch: Batch, extra: Any = None) -> Tensor:
            return (self.fc(batch.x) * batch.scale).sum() + extra["more"][0]

    batch = Batch.__new__(Batch)
    object.__setattr__(batch, "x", x())
    object.__setattr__(batch, "scale", 2.0)
    program = check(Model(), batch, extra=Fields(more=[torch.tensor(1.0), "note"]))
    names = [n.meta["zfx"].name for n in program.placeholders("joint", Role.INPUT)]
    assert names == ["batch.x", "extra.more[0]"]
    assert program.calling.tensor_leaves == (0, 2)


def test_transformers_result_comes_back_as_its_class() -> None:
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.CausalLMOutput
    model = Returning(lambda m, h, x: output(loss=h.mean(), logits=h, hidden_states=(h, h + 1)))
    program = check(model, x())
    assert program.calling.output_names[0] == "loss"
    assert isinstance(trees.unflatten([1, 2, 3, 4], program.calling.out_spec), output)


# -- outputs that share memory --------------------------------------------------------------------
@pytest.mark.parametrize(
    "body",
    [
        lambda m, h, x: (h.sum(), x, x[0], m.fc.weight, m.fc.weight.t()),
        lambda m, h, x: [h, h, h[:, :2], h.detach()],
        lambda m, h, x: h.chunk(2, 1),
        lambda m, h, x: (x, x.view(-1), h, m.fc.bias),
        lambda m, h, x: (h.sum(), h, h),
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_outputs_that_alias(body: Callable[..., Any], requires_grad: bool) -> None:
    program = check(Returning(body), x().requires_grad_(requires_grad))
    params = {n.name for n in program.placeholders("joint", Role.PARAM)}
    returned = {n.name for n in program.results("joint")}
    assert not params & returned  # a gathered parameter is released; a result must outlive it


def test_output_that_is_a_buffer_is_a_copy() -> None:
    model = nn.BatchNorm1d(4)
    wrapped = Returning(lambda m, h, x: (m.norm(h).square().mean(), m.norm.running_mean))
    wrapped.norm = model
    check(wrapped, x())


# -- outputs that cannot be returned --------------------------------------------------------------
class Cache:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


def test_unknown_output_is_dropped_with_one_warning() -> None:
    model = Returning(lambda m, h, x: {"loss": h.mean(), "cache": Cache(h), "n": 3})
    with pytest.warns(UserWarning, match=r"Returning also returns cache \(Cache\)") as caught:
        program = zerofx.capture(model, (x(),))
    assert len(caught) == 1
    assert program.calling.dropped == ("cache (Cache)",)
    assert program.calling.constants == {1: None, 2: 3}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda m, h, x: {"loss": h.mean(), "s": h.to_sparse()}, "output s is a sparse_coo tensor"),
        (lambda m, h, x: (v for v in h), "output output is a generator"),
        (lambda m, h, x: (h.sum(), h.sum), r"output \[1\] is a builtin_function_or_method"),
        (lambda m, h, x: [torch.distributions.Normal(h, 1.0), h], r"output \[0\] is a Normal"),
        (lambda m, h, x: 3, "returns no tensor but int"),
        (lambda m, h, x: Cache(h), "returns no tensor but Cache"),
    ],
)
def test_output_that_is_refused(body: Callable[..., Any], message: str) -> None:
    model = Returning(body)
    with pytest.raises(CaptureError, match=message):
        zerofx.capture(model, (x(),))
    model.body = lambda m, h, x: h.sum()
    check(model, x())
