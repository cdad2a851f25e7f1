"""What programs are made of: the functions of a model, and the model as it was before compile.

An entry is a function that is called from outside; each has programs of its own. The model's
forward is one. A submodule that the user, or code which runs eagerly, calls is another, and so is a
method that reads parameters. A module's parameters as they stand, whole, are one too: a program
that gathers them, and in backward reduces their gradients.

A compiled model is the user's own object with another class (`zerofx.model.module`). To call what
the user wrote, the object has its old class again for that long. So `self` in a forward is the very
model: `super()`, other methods, slots, references back from submodules and attributes that forward
sets are those of the model, and no call of `self(...)` comes back to the programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from zerofx.compat.modules import (
    call_entries,
    call_uncompiled,
    own_parameters,
    put_call_entries,
    put_parameter,
    without_global_hooks,
    without_hooks,
)

# -- The functions of a model that are called from outside -----------------------------------------


OWN, ALL = "its parameters", "all its parameters"  # what stands in the place of a method's name


@dataclass(frozen=True)
class Entry:
    """A function of a model: the method of a module of its.

    path: the module's qualified name, "" for the model itself.
    method: `OWN` means the parameters that the module itself registers, `ALL` those of modules in
        it too.
    """

    path: str = ""
    method: str = "forward"

    def __str__(self) -> str:
        if self.is_parameters:
            return f"{self.path} ({self.method})".strip()
        method = "" if self.method == "forward" else self.method
        return ".".join(filter(None, (self.path, method)))

    @property
    def is_model(self) -> bool:
        """Whether it is the model's forward."""
        return self == MODEL

    @property
    def is_parameters(self) -> bool:
        return self.method in (OWN, ALL)

    def module(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self.path)

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules that may run, by their names in the model."""
        if self.is_parameters:
            return {}
        return dict(self.module(model).named_modules(prefix=self.path))

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of those modules, tied ones once, by their names in the model."""
        named = self.module(model).named_parameters(self.path, recurse=self.method != OWN)
        return dict(named)

    def function(self, model: nn.Module) -> Callable[..., Any]:
        """Return what the user wrote."""
        module = self.module(model)
        if self.is_parameters:
            return lambda: _parameters(module, self.method)
        return getattr(module, self.method)

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it as eager PyTorch does, a forward with its hooks."""
        if self.method == "forward" and self.path:  # past the programs of its calls
            return call_uncompiled(self.module(model), args, kwargs)
        if self.is_model:
            return model(*args, **kwargs)
        return self.function(model)(*args, **kwargs)

    def describe(self, model: nn.Module) -> str:
        """Name it for errors and titles: `GPT`, `GPT.blocks.3`, `GPT.generate`."""
        kind = type(model).__name__
        return (
            f"{kind}{self}"
            if str(self).startswith("(")
            else ".".join(filter(None, (kind, str(self))))
        )


MODEL = Entry()


def _parameters(module: nn.Module, which: str) -> list[Any]:
    """Return the parameters of a module, tied ones once, in the order of `named_parameters`."""
    if which == ALL:
        return list(module.parameters())
    found = {id(p): p for p in own_parameters(module).values() if p is not None}
    return list(found.values())


# -- The model behind a compiled one: capture runs it, a copy is made of it ------------------------


SLOT = "_zerofx"  # the attribute of a compiled model that has all of zerofx's own


@dataclass(frozen=True)
class Place:
    """A parameter of a module under one of its names, and the whole tensor that stands in for it.

    whole: None until there is one.
    """

    module: nn.Module
    key: str
    param: nn.Parameter
    whole: Any = None


def _put(places: list[Place], is_whole: bool) -> None:
    for place in places:
        put_parameter(place.module, place.key, place.whole if is_whole else place.param)


class Original:
    """How a model was called before it was compiled: its class, its own hooks, its own forward.

    Hooks that the model has by then are part of what is captured, as those of its submodules are:
    some make a parameter (weight_norm). The model is left without them. Hooks that it gets later
    run around the program and see values, and so do hooks of all modules, which capture therefore
    does not call for the model itself.

    kind: the user's class.
    is_captured: all of the model is as it was, so that no call of a submodule goes to a program.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kind = type(model)
        self.is_captured = False
        self._standing: list[list[Place]] = []
        self._entries = call_entries(model)
        put_call_entries(model, without_hooks(self._entries))

    @property
    def is_whole_in_part(self) -> bool:
        """Whether whole tensors stand in for some of the parameters."""
        return bool(self._standing)

    def is_whole(self, param: nn.Parameter) -> bool:
        """Tell whether a whole tensor stands in for a parameter somewhere."""
        return any(place.param is param for places in self._standing for place in places)

    @contextlib.contextmanager
    def standing_in(self, places: list[Place]) -> Iterator[None]:
        """Put whole tensors in the places of parameters, except where the model is captured."""
        self._standing.append(places)
        _put(places, is_whole=True)
        try:
            yield
        finally:
            _put(places, is_whole=False)
            self._standing.pop()
            for around in self._standing:
                _put(around, is_whole=True)

    @contextlib.contextmanager
    def captured(self, model: nn.Module) -> Iterator[None]:
        """Make all of the model what it was; no call of a submodule goes to a program."""
        for places in reversed(self._standing):
            _put(places, is_whole=False)
        self.is_captured = True
        try:
            with self.restored(model):
                yield
        finally:
            self.is_captured = False
            for places in self._standing:
                _put(places, is_whole=True)

    @contextlib.contextmanager
    def restored(self, model: nn.Module) -> Iterator[None]:
        """Make the model what it was; afterwards it is compiled again."""
        compiled, later = type(model), call_entries(model)
        set_class(model, self.kind)
        put_call_entries(model, self._entries)
        try:
            with without_global_hooks(model):
                yield
        finally:
            put_call_entries(model, later)
            set_class(model, compiled)


def set_class(model: nn.Module, kind: type) -> None:
    """Change the class of an object, past any `__setattr__` of its own."""
    object.__setattr__(model, "__class__", kind)


@contextlib.contextmanager
def original(model: nn.Module) -> Iterator[None]:
    """Make a model what it was before it was compiled, if it is compiled, for as long as asked."""
    added: Any = model.__dict__.get(SLOT)
    if added is None or added.original.is_captured:
        yield
        return
    with added.original.captured(model):
        yield
