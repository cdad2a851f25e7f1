"""The originals of programs: the functions of a model, and the model before compile.

An entry is a function that is called from outside; each entry has programs of its own. The model's
forward is one. A submodule called by the user, or by code that runs eagerly, is another, and so is
a method that reads parameters. The whole parameters of a module are an entry too: its program
gathers them and, in backward, reduces their gradients.

A compiled model is the user's own object with another class (`zerofx.model.module`). While zerofx
calls the user's code, the object has its original class again. `self` in a forward is therefore the
model itself: `super()`, other methods, slots, references from submodules and attributes that
forward sets belong to the model, and no call of `self(...)` reaches the programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from zerofx.compat.autograd import NORM_HOOKS, normed
from zerofx.compat.modules import (
    call_entries,
    call_uncompiled,
    forward_pre_hooks,
    own_parameters,
    put_call_entries,
    put_parameter,
    without_global_hooks,
    without_hooks,
)
from zerofx.errors import ShardError

# -- The functions of a model that are called from outside -----------------------------------------


OWN, ALL = "its parameters", "all its parameters"  # used in place of a method's name


@dataclass(frozen=True)
class Entry:
    """A function of a model: a method of one of its modules.

    path: the module's qualified name, "" for the model itself.
    method: `OWN` means the parameters that the module itself registers, `ALL` also those of its
        submodules.
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
        """Whether the entry is the model's forward."""
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
        """Return the user's function."""
        module = self.module(model)
        if self.is_parameters:
            return lambda: _parameters(module, self.method)
        return getattr(module, self.method)

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as eager PyTorch does: a forward runs with its hooks."""
        if self.method == "forward" and self.path:  # bypasses the programs of the submodule
            return call_uncompiled(self.module(model), args, kwargs)
        if self.is_model:
            return model(*args, **kwargs)
        return self.function(model)(*args, **kwargs)

    def describe(self, model: nn.Module) -> str:
        """Name the entry for errors and titles: `GPT`, `GPT.blocks.3`, `GPT.generate`."""
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


# -- The original of a compiled model: capture runs it, and copies are made from it ----------------


SLOT = "_zerofx"  # the attribute of a compiled model that holds all zerofx state


@dataclass(frozen=True)
class Place:
    """A parameter of a module under one of its names, and the whole tensor that replaces it.

    whole: None until there is one.
    """

    module: nn.Module
    key: str
    param: nn.Parameter
    whole: Any = None


def _put(places: list[Place], is_whole: bool) -> None:
    for place in places:
        put_parameter(place.module, place.key, place.whole if is_whole else place.param)


class NormedWeight:
    """Stands for a weight that a norm's hook computes in each forward: programs do not keep it.

    Any use of it raises.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __deepcopy__(self, memo: dict[int, Any]) -> NormedWeight:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        while given:
            each = given.pop()
            if isinstance(each, cls):
                each._refuse()
            given += each if isinstance(each, (list, tuple)) else ()
        return NotImplemented  # torch raises

    def _refuse(self, *_: Any) -> NoReturn:
        raise ShardError(
            f"{self._name} is read, which the hook of a norm (torch.nn.utils.weight_norm or "
            "spectral_norm) computes in each forward, and which a compiled model does not keep. "
            "Read it in zerofx.whole(model), or use the norm of "
            "torch.nn.utils.parametrizations, whose weight is computed where it is read."
        )

    __bool__ = __len__ = __iter__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __getitem__ = __setitem__ = _refuse
    __abs__ = __float__ = _refuse


class Original:
    """The model's interface before it was compiled: its class, its own hooks, its own forward.

    Hooks that the model has at compile time are captured, like those of its submodules: some
    compute a parameter (weight_norm). They are removed from the compiled model. Hooks registered
    later run around the program and see real values. So do global module hooks, which capture
    therefore does not call for the model itself.

    kind: the user's class.
    is_captured: the whole model is restored, so that no call of a submodule reaches a program.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kind = type(model)
        self.is_captured = False
        self._standing: list[list[Place]] = []
        self._normed = [
            (module, hook, NormedWeight(f"{path}.{hook.name}".lstrip(".")))
            for path, module in model.named_modules()
            for hook in forward_pre_hooks(module)
            if isinstance(hook, NORM_HOOKS)
        ]
        self._put_away(self._normed)
        self._entries = call_entries(model)
        put_call_entries(model, without_hooks(self._entries))

    @property
    def is_whole_in_part(self) -> bool:
        """Whether whole tensors replace some of the parameters."""
        return bool(self._standing)

    def is_whole(self, param: nn.Parameter) -> bool:
        """Return whether a whole tensor replaces a parameter anywhere."""
        return any(place.param is param for places in self._standing for place in places)

    @contextlib.contextmanager
    def standing_in(self, places: list[Place]) -> Iterator[None]:
        """Replace parameters by whole tensors, except while the model is being captured."""
        self._standing.append(places)
        _put(places, is_whole=True)
        try:
            yield
        finally:
            _put(places, is_whole=False)
            self._standing = [each for each in self._standing if each is not places]
            for around in self._standing:
                _put(around, is_whole=True)

    @contextlib.contextmanager
    def with_normed_weights(self, module: nn.Module) -> Iterator[None]:
        """Let the weights that norms compute have values, while a module's parameters are whole."""
        inside = {id(m) for m in module.modules()}
        mine = [each for each in self._normed if id(each[0]) in inside]
        for owner, hook, _ in mine:
            owner.__dict__[hook.name] = normed(owner, hook)
        try:
            yield
        finally:
            self._put_away(mine)

    def _put_away(self, weights: list[tuple[nn.Module, Any, NormedWeight]]) -> None:
        for module, hook, instead in weights:
            if hook in forward_pre_hooks(module):  # else the norm was removed
                module.__dict__[hook.name] = instead

    @contextlib.contextmanager
    def captured(self, model: nn.Module) -> Iterator[None]:
        """Restore the whole original model; no call of a submodule reaches a program."""
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
        """Restore the original model for the duration of the block; then compile it again."""
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
    """Change the class of an object, bypassing any `__setattr__` of its own."""
    object.__setattr__(model, "__class__", kind)


@contextlib.contextmanager
def original(model: nn.Module) -> Iterator[None]:
    """Restore a compiled model to its original for the duration of the block."""
    added: Any = model.__dict__.get(SLOT)
    if added is None or added.original.is_captured:
        yield
        return
    with added.original.captured(model):
        yield
