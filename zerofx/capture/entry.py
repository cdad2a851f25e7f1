"""Entries: the functions of a model that are called from outside, each with programs of its own.

The model's forward is one. A submodule that the user, or code which runs eagerly, calls is another,
and so is a method that reads parameters. A module's parameters as they stand, whole, are one too:
a program that gathers them, and in backward reduces their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from zerofx.compat.modules import call_uncompiled, own_parameters

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
        if self.method == "forward":
            return call_uncompiled(self.module(model), args, kwargs)
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
