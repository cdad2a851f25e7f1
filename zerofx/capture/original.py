"""The model behind a compiled one: capture runs it, a copy is made of it.

A compiled model is the user's own object with another class (`zerofx.model.module`). To call what
the user wrote, the object has its old class again for that long. So `self` in a forward is the very
model: `super()`, other methods, slots, references back from submodules and attributes that forward
sets are those of the model, and no call of `self(...)` comes back to the programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from zerofx.compat.modules import (
    call_entries,
    put_call_entries,
    without_global_hooks,
    without_hooks,
)

SLOT = "_zerofx"  # the attribute of a compiled model that has all of zerofx's own


class Original:
    """How a model was called before it was compiled: its class, its own hooks, its own forward.

    Hooks that the model has by then are part of what is captured, as those of its submodules are:
    some make a parameter (weight_norm). The model is left without them. Hooks that it gets later
    run around the program and see values, and so do hooks of all modules, which capture therefore
    does not call for the model itself.

    kind: the user's class.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kind = type(model)
        self._entries = call_entries(model)
        put_call_entries(model, without_hooks(self._entries))

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
    if added is None or type(model) is added.original.kind:
        yield
        return
    with added.original.restored(model):
        yield
