"""What of a model a program depends on, read at every call: flags, buffers, plain attributes."""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.capture.outside import Settings
from zerofx.compat.modules import CONTAINERS, own_buffers
from zerofx.compat.tensors import DisableTorchFunctionSubclass

PLAIN = frozenset({int, bool, str, type(None), bytes, torch.dtype, torch.device})
_NAMED = (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ANY = CONTAINERS[0]  # an attribute that every module has
_training = attrgetter("training")
_requires_grad = attrgetter("requires_grad")


class Reading:
    """Named values of a model at one time, as part of a key.

    A new reading is made only if a value has changed: calls in a row share one, which is
    compared by identity and has been hashed before.
    """

    __slots__ = ("_hash", "named")

    def __init__(self, named: tuple[tuple[str, Any], ...] = ()) -> None:
        self.named = named
        self._hash = hash(named)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reading):
            return NotImplemented
        return self is other or (self._hash == other._hash and self.named == other.named)

    def __hash__(self) -> int:
        return self._hash


class ModelState:
    """The part of a signature that lies in the model; holds its modules and parameters by list."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_modules())
        self.module_names, self._modules = tuple(named), list(named.values())
        params = dict(model.named_parameters())
        self.param_names, self._params = tuple(params), list(params.values())
        self._buffers, self._attributes = Buffers(named), Attributes(named)

    def leave_out_changed(self) -> list[str]:
        """Leave settings out of keys that a forward has changed itself; return their names."""
        return self._attributes.leave_out_changed()

    def leaked(self) -> list[str]:
        """Return which lists and dicts outside the modules hold tensors of a trace."""
        return self._attributes.leaked()

    def read(self) -> tuple[bytes, bytes, Reading, Reading]:
        """Return (training, trainable, buffers, attributes) as of now.

        At about 25 ns a module and a parameter for the flags, 50 ns an attribute, 0.4 us a buffer.
        """
        with DisableTorchFunctionSubclass():
            return (
                bytes(map(_training, self._modules)),
                bytes(map(_requires_grad, self._params)),
                self._buffers.read(),
                self._attributes.read(),
            )


class Buffers:
    """The form of every buffer, and which names are one tensor: regions rely on both."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._holders = [(name, own_buffers(module)) for name, module in modules.items()]
        self._values = [held.values for _, held in self._holders]
        self._ids: list[int] = []
        self._forms: list[Any] = []
        self._reading = Reading()

    def read(self) -> Reading:
        held = [*chain.from_iterable([values() for values in self._values])]
        ids = list(map(id, held))
        forms = [None if b is None else tensor_key(b) for b in held]
        if ids != self._ids or forms != self._forms:
            self._ids, self._forms = ids, forms
            self._reading = Reading(tuple(self._named()))
        return self._reading

    def _named(self) -> list[tuple[str, Any]]:
        names = [_join(name, key) for name, held in self._holders for key in held]
        first: dict[int, str] = {}
        named: list[tuple[str, Any]] = []
        for name, number, form in zip(names, self._ids, self._forms, strict=True):
            owner = first.setdefault(number, name)
            named.append((name, (None, None) if form is None else form))
            if owner != name and form is not None:
                named[-1] = name, ("tied", owner)
        return named


class Attributes:
    """The modules' own attributes: a program has the values of plain ones baked in.

    Plain are numbers, strings, functions, classes and tuples of them. Inside lists, dicts and
    config objects, and outside the modules, `Settings` says what is looked at.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules, self._settings = modules, Settings(modules, is_plain)
        self._owners = [(name, vars(module)) for name, module in modules.items()]
        self._dicts = [own for _, own in self._owners]
        self._getters: list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = []
        self._counts: list[int] = []
        self._values: list[Any] = []
        self._reading = Reading()

    def read(self) -> Reading:
        """Return the attributes as of now; only those that were replaced cost more than a look."""
        if list(map(len, self._dicts)) != self._counts or not self._is_as_before():
            self._look()
        return self._reading

    def _is_as_before(self) -> bool:
        try:
            now = [*chain.from_iterable([get(own) for get, own in self._getters])]
        except KeyError:  # an attribute went and another came
            return False
        now += self._settings.read()
        return len(now) == len(self._values) and all(map(is_, now, self._values))

    def _look(self) -> None:
        named: list[tuple[str, Any]] = []
        self._counts = list(map(len, self._dicts))
        self._getters, self._values = [], []
        for prefix, own in self._owners:
            names = [n for n in own if n not in _OF_EVERY_MODULE]
            if names:
                get = itemgetter(*names, _ANY)  # two names at least, so that it is a tuple
                self._getters.append((get, own))
                self._values += get(own)
                named += [(_join(prefix, n), _attribute_key(own[n])) for n in names]
        self._settings.look(self._modules, _OF_EVERY_MODULE)
        inside = self._settings.read()
        self._values += inside
        keys = map(_attribute_key, inside)
        named += zip(self._settings.labels(), keys, strict=True)
        self._reading = Reading(tuple(named))

    def leaked(self) -> list[str]:
        return self._settings.leaked()

    def leave_out_changed(self) -> list[str]:
        """Look no longer at settings that are not as they were read; return their labels.

        One that was None has been given its default (`config.problem_type` of transformers): it
        is looked at with its new value.
        """
        labels, now = self._settings.labels(), self._settings.read()
        before = self._values[len(self._values) - len(now) :]
        changed = [(n, a) for n, a, b in zip(labels, before, now, strict=True) if a is not b]
        left_out = [name for name, value in changed if value is not None]
        self._settings.leave_out(left_out)
        if changed:
            self._counts = []
        return left_out


def is_plain(value: Any) -> bool:
    """Tell whether a value is a number, a string, or another that a program can have baked in."""
    return type(value) in PLAIN or isinstance(value, (float, complex, enum.Enum))


def tensor_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a program relies on in a tensor that it is given."""
    return (
        "tensor", tensor.shape, tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad
    )  # fmt: skip


def number_key(value: float | complex) -> tuple[type, Any]:
    """Return a key that tells -0.0 from 0.0, and knows a NaN again."""
    kind = type(value)
    if isinstance(value, complex):
        return kind, str(value)
    if value != value:
        return kind, "nan"
    return kind, value if value or math.copysign(1.0, value) > 0 else "-0.0"


def _attribute_key(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    if kind in PLAIN or isinstance(value, _NAMED):
        return kind, value
    if isinstance(value, (float, complex)):
        return number_key(value)
    if isinstance(value, tuple):
        return tuple, tuple([_attribute_key(v) for v in value])
    if isinstance(value, types.MethodType):
        return kind, value.__func__
    return kind, "..."


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
