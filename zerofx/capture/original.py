"""The model behind a compiled one: capture runs it, a copy is made of it.

A compiled model is the user's own object with another class (`zerofx.model.module`). To call what
the user wrote, the object has its old class again for that long. So `self` in a forward is the very
model: `super()`, other methods, slots, references back from submodules and attributes that forward
sets are those of the model, and no call of `self(...)` comes back to the programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from zerofx.compat.modules import (
    call_entries,
    put_call_entries,
    put_parameter,
    without_global_hooks,
    without_hooks,
)

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
