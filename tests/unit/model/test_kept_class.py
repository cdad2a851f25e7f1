"""A compiled model is the user's own object, of the user's class, whatever a library asks of it."""

from __future__ import annotations

import abc
import copy
import dataclasses
import gc
import inspect
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import zerofx
from zerofx.errors import ArgumentError, ShardError

ATEN = zerofx.Plan(kernels="aten")
X = torch.linspace(-1, 1, 8).view(2, 4)


class Base(nn.Module):
    made: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, tag: str) -> None:
        cls.made.append(tag)

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        """Scale the sum of what `encode` returns."""
        return self.encode(x).sum() * gain

    def encode(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Model(Base, tag="model"):
    """Calls super(), a method of its own, and itself from a method."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4)
        self.act: Any = torch.tanh
        self.modes: list[bool] = []

    def encode(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        """Scale twice."""
        return super().forward(x, gain=gain) * 2

    def training_step(self, x: Tensor) -> Tensor:
        return self(x, gain=0.5)

    def train(self, mode: bool = True) -> Model:
        self.modes.append(mode)
        return super().train(mode)


def pair(make: Callable[[], Any] = Model) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    return plain, zerofx.compile(make(), ATEN)


def check(model: Any, plain: Any, call: Callable[[Any], Tensor] = lambda m: m(X)) -> None:
    """Compare values and gradients."""
    got, want = call(model), call(plain)
    assert torch.equal(got, want)
    got.sum().backward()
    want.sum().backward()
    pairs = list(zip(model.named_parameters(), plain.named_parameters(), strict=True))
    for (name, mine), (other, theirs) in pairs:
        assert name == other and (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name
    model.zero_grad()
    plain.zero_grad()


# -- the object and its class ---------------------------------------------------------------------
def test_it_is_the_object_that_was_given() -> None:
    plain, given = Model(), Model()
    model = zerofx.compile(given, ATEN)
    assert model is given
    assert isinstance(model, Model) and isinstance(model, zerofx.CompiledModule)
    kind: Any = type(model)
    assert (kind.__name__, kind.__module__, kind.__doc__) == ("Model", __name__, Model.__doc__)
    for ask in (
        lambda m: inspect.signature(m.forward),
        lambda m: inspect.signature(type(m)),
        lambda m: inspect.signature(type(m).__init__),
        lambda m: inspect.getsource(type(m)),
        lambda m: inspect.getdoc(m.forward),
        lambda m: m._get_name(),
        lambda m: [c.__name__ for c in type(m).__mro__ if c is not zerofx.CompiledModule][1:],
    ):
        mine = ask(model)
        assert mine == ask(plain) or mine == ["Model", *ask(plain)]
    assert repr(model) == f"CompiledModule(stage=3, world=1, {plain!r})"
    assert model._is_accelerate_prepared and not hasattr(model.forward, "__wrapped__")
    assert Model.made == ["model", "called"], "no other class was registered"


def test_several_models_of_a_class_share_one() -> None:
    (_, one), (_, two) = pair(), pair()
    assert type(one) is type(two) and one.zerofx is not two.zerofx
    kind = weakref.ref(type(pair(Rooted)[1]))
    gc.collect()
    assert kind() is None, "it goes with its last model"


def test_what_the_class_makes_is_plain() -> None:
    _, model = pair()
    other = type(model)(width=3)
    assert type(other) is Model and other.fc.in_features == 3
    check(model, pair()[0])


class Rooted(nn.Linear):
    """Has parameters of its own, and hooks that capture must see (weight_norm)."""

    def __init__(self) -> None:
        super().__init__(4, 3)


# -- calls ----------------------------------------------------------------------------------------
def test_methods_run_the_programs() -> None:
    plain, model = pair()
    check(model, plain)
    check(model, plain, lambda m: m.training_step(X))
    check(model, plain, lambda m: m.forward(X, gain=3.0))
    assert len(model.programs) == 2, "with another gain it is an input"
    model.train()
    assert model.modes == [True], "the model's own train() ran"


class Called(Model, tag="called"):
    """Changes the arguments before nn.Module's call."""

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().__call__(x * 2, gain=3.0)


class Slots(nn.Module):
    """Keeps values past __dict__, and sees every attribute that is set or missing."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        object.__setattr__(self, "factor", 3.0)

    def __getattr__(self, name: str) -> Any:
        return 5.0 if name == "offset" else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value * 2 if name == "doubled" else value)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * self.factor + self.offset).sum()


T = TypeVar("T")


class Abstract(abc.ABC, nn.Module, Generic[T]):
    @abc.abstractmethod
    def scale(self) -> T: ...


@dataclasses.dataclass(eq=False)
class Fields(Abstract[float]):
    """A dataclass, abstract and generic; its metaclass is ABCMeta."""

    width: int = 4

    def __post_init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, self.width)

    def scale(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).sum() * self.scale()


def patched() -> nn.Module:
    """Return a model whose forward is an attribute."""
    model = Rooted()
    model.forward = lambda x: nn.functional.linear(x, model.weight) * 7  # type: ignore[method-assign]
    return model


def normed() -> nn.Module:
    return nn.utils.weight_norm(Rooted())


class Parent(nn.Module):
    """Its child calls a method of it by a reference back."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.child = nn.Linear(4, 4), nn.Identity()
        self.child.back = [self]
        self.child.forward = lambda x: self.child.back[0].scaled(x)  # type: ignore[method-assign]

    def scaled(self, x: Tensor) -> Tensor:
        assert type(self) is Parent, "the class is the user's while forward is captured"
        return x * 3

    def forward(self, x: Tensor) -> Tensor:
        return self.child(self.fc(x)).sum()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("make", [Called, Slots, Fields, patched, normed, Parent])
def test_odd_classes(make: Callable[[], Any]) -> None:
    plain, model = pair(make)
    check(model, plain)
    check(copy.deepcopy(model), plain)
    assert isinstance(model, type(plain)) and len(model.programs) == 1
    if make is Slots:
        model.doubled = 4
        assert model.offset == 5.0 and model.doubled == 8
    if make is Fields:
        assert dataclasses.replace(model, width=2).width == 2 and dataclasses.asdict(model)


def test_a_metaclass_that_refuses_is_named() -> None:
    class Final(type):
        def __new__(mcs, name: str, bases: tuple[type, ...], body: Any) -> Any:
            if any(isinstance(base, Final) for base in bases):
                raise TypeError("this class is final")
            return super().__new__(mcs, name, bases, body)

    class Sealed(Rooted, metaclass=Final): ...

    model = Sealed()
    with pytest.raises(ArgumentError, match=r"Sealed.*this class is final.*self\.inner = model"):
        zerofx.compile(model, ATEN)
    assert type(model.weight) is nn.Parameter and type(model) is Sealed

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    zerofx.compile(Outer(), ATEN)(X).sum().backward()


# -- names ----------------------------------------------------------------------------------------
class Named(Rooted):
    """Has what zerofx adds by the same names: of the class, of its own, a child and a buffer."""

    plan = "theirs"

    def __init__(self) -> None:
        super().__init__()
        self.programs = ["theirs"]
        self.adopt = nn.Identity()
        self.register_buffer("no_sync", torch.ones(3))

    @property
    def loss_scale(self) -> str:
        return "theirs"

    def refresh(self) -> str:
        return "theirs"

    def compile(self, optimizer: str) -> str:  # type: ignore[override]
        return optimizer


def test_names_of_the_model_come_first() -> None:
    plain, model = pair(Named)
    check(model, plain)
    assert model.programs == ["theirs"] and len(model.zerofx.programs) == 1
    assert model.loss_scale == model.refresh() == model.plan == model.compile("theirs") == "theirs"
    assert model.adopt is model._modules["adopt"] and torch.equal(model.no_sync, torch.ones(3))
    assert (model.zerofx.plan, model.zerofx.world.size) == (ATEN, 1)
    assert repr(model.zerofx) == "zerofx(stage=3, world=1, 1 program)"
    assert model.zerofx.original.kind is Named
    with model.zerofx.no_sync():
        model(X).sum().backward()
    model.zerofx.refresh()
    model.programs = ["mine"]
    assert model.programs == ["mine"]
    assert len(model.zerofx.layout.buckets) == 1 and model.zerofx.device.type == "cpu"
    assert pair()[1].sharded_state_dict().keys() == pair()[1].zerofx.sharded_state_dict().keys()


# -- attributes -----------------------------------------------------------------------------------
def test_a_setting_drops_programs_and_a_note_does_not() -> None:
    plain, model = pair()
    check(model, plain)
    model.note = plain.note = object()
    check(model, plain)
    model.note = plain.note = object()
    check(model, plain)
    assert len(model.programs) <= 2, "forward does not read it"
    for act in (nn.ReLU(), nn.Tanh()):
        model.act = plain.act = act
    for act in (torch.sin, lambda x: x * 3):
        del model.act, plain.act
        model.act = plain.act = act
        check(model, plain)
    model.eval()
    check(model, plain.eval())


# -- hooks ----------------------------------------------------------------------------------------
def hooked(register: Callable[[nn.Module, list[str]], None], is_early: bool) -> list[list[str]]:
    """Return what hooks saw in two calls of a plain model, and of one that is compiled."""
    found: list[list[str]] = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model, seen = Model(), []  # type: ignore[var-annotated]
        if is_early:
            register(model, seen)
        if is_compiled:
            zerofx.compile(model, ATEN)
        if not is_early:
            register(model, seen)
        for _ in range(2):
            loss = model(X).item()
            seen.append(f"loss {loss:.6f}")
        found.append(seen)
    return found


def change(model: nn.Module, seen: list[str]) -> None:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] * 2,), kwargs

    def after(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        seen.append(type(module).__name__)
        return out * 3

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)


def test_hooks_run_once_a_call() -> None:
    plain, compiled = hooked(change, is_early=False)
    assert compiled == plain, "with the values of each call"
    plain, compiled = hooked(change, is_early=True)
    losses = [text for text in plain if text != "Model"]
    assert compiled[-3:] == ["Model", *losses], "captured once"

    handles: list[Any] = []

    def of_all(model: nn.Module, seen: list[str]) -> None:
        def triple(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
            return out * 3 if isinstance(module, Model) else None

        handles.append(register_module_forward_hook(triple))

    try:
        plain, compiled = hooked(of_all, is_early=False)
    finally:
        for handle in handles:
            handle.remove()
    assert float(compiled[0].split()[1]) == pytest.approx(3 * float(plain[0].split()[1])), "two"


def test_an_early_hook_can_be_removed_and_a_late_one_is_copied() -> None:
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    early = model.register_forward_hook(lambda module, args, out: out * 3)
    zerofx.compile(model, ATEN)
    assert torch.equal(model(X), plain(X) * 3)
    early.remove()
    assert torch.equal(model(X), plain(X))
    model.register_forward_hook(lambda module, args, out: out * 5)
    wrapped = model.forward
    model.forward = lambda *args: wrapped(*args) * 7
    assert torch.equal(model(X), plain(X) * 7 * 5)
    assert torch.equal(copy.deepcopy(model)(X), plain(X) * 7 * 5)


# -- containers, copies, state --------------------------------------------------------------------
def sequential() -> nn.Module:
    return nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.ReLU(), c=nn.Linear(4, 2)))


def test_a_container_stays_one() -> None:
    plain, model = pair(sequential)
    assert len(model) == 3 and bool(model) and model.b is model[1] is list(model)[1]
    assert [type(m) for m in reversed(list(model))] == [nn.Linear, nn.ReLU, nn.Linear]
    assert type(model[:2]) is nn.Sequential and len(model[:2]) == 2
    check(model, plain)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = sequential(), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)).sum()


def test_it_may_be_the_child_of_another_module() -> None:
    torch.manual_seed(0)
    plain = Outer()
    outer = copy.deepcopy(plain)
    zerofx.compile(outer.inner, ATEN)
    check(outer, plain)
    state = outer.state_dict()
    assert list(state) == list(plain.state_dict()) and type(state["inner.a.weight"]) is Tensor
    other = Outer()
    state = other.state_dict()
    outer.load_state_dict(state)
    other.load_state_dict(outer.state_dict())
    check(outer, other)
    check(copy.deepcopy(outer), other)
    assert outer.float() is outer and isinstance(outer.inner, nn.Sequential)
    assert not outer.eval().inner.training
    with pytest.raises(ShardError, match="cannot be pickled"):
        pickle.dumps(outer)


def test_a_copy_is_independent_and_knows_its_programs() -> None:
    plain, model = pair()
    check(model, plain)
    twin = copy.deepcopy(model)
    assert type(twin) is type(model) and twin.zerofx is not model.zerofx
    check(twin, plain)
    assert twin.programs == model.programs
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    twin.act = torch.sin
    check(model, plain)
    for attempt in (copy.copy, pickle.dumps):
        with pytest.raises(ShardError, match="cannot be pickled"):
            attempt(model)


class Prefixed(Rooted):
    """Has another way to save and to load."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"note": 1, **super().state_dict(*args, **kwargs)}

    def load_state_dict(self, state: Any, *args: Any) -> None:  # type: ignore[override]
        super().load_state_dict({k: v for k, v in state.items() if k != "note"})


def test_overrides_of_the_class_are_kept() -> None:
    plain, model = pair(Prefixed)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict()) == ["note", "weight", "bias"]
    assert torch.equal(state["weight"], plain.weight)
    assert model.load_state_dict(Prefixed().state_dict()) is None


class Configured(Rooted):
    """Makes an optimizer of the parameter that it registers itself."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.1)


def test_methods_that_configure_see_the_parameters_themselves() -> None:
    _, model = pair(Configured)
    made = model.configure_optimizers()
    assert made.param_groups[0]["params"][0] is model.weight and not model.programs


def test_what_is_compiled_is_captured_and_refused() -> None:
    _, model = pair()
    program = zerofx.capture(model, (X,))
    assert program.model_name == "Model" and not model.programs
    with pytest.raises(ShardError, match="Model that is already compiled"):
        zerofx.compile(model, ATEN)
    with pytest.raises(ArgumentError, match=r"Call zerofx\.compile"):
        zerofx.CompiledModule(model, None, None)  # type: ignore[arg-type]
