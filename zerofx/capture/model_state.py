"""Model state: the flags, buffers and plain attributes that a program depends on."""

from __future__ import annotations

import dis
import enum
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.capture.lines import is_user_file
from zerofx.capture.original import MODEL, SLOT, Entry, original
from zerofx.compat.modules import CONTAINERS, forward_hooks, own_buffers
from zerofx.compat.tensors import DisableTorchFunctionSubclass
from zerofx.compat.tracing import is_traced

# -- Settings that a forward reads besides its modules' plain attributes: constants of the program -
# These are entries of lists, dicts and config objects that a module holds, globals, closures
# and attributes of classes. Whether forward may read one is decided by name: an entry counts if
# code that forward can reach mentions its name. Only numbers, strings, dtypes and
# devices are considered.


DEPTH = 3  # nesting depth of containers
MOST = 64  # most entries of a container of settings
_CONTAINERS = (list, dict)
_TORCH = ("torch", "builtins")
_NO_SETTINGS = (nn.Module, Tensor, type, types.FunctionType, types.BuiltinFunctionType)


class Reach:
    """The code outside torch that the forwards of a model can reach, determined by name.

    names: the names in that code: attributes, globals, and strings, which may be keys.
    called: a method that is called in addition to the forwards.
    """

    def __init__(self, modules: dict[str, nn.Module], called: Any = None) -> None:
        self.names: set[str] = set()
        self.classes: dict[type, str] = {}
        self.functions: list[types.FunctionType] = []
        self._seen: set[int] = set()
        self._pending: list[tuple[Any, type | None]] = []
        for name, module in modules.items():
            kind = type(module)
            if kind not in self.classes:
                self.classes[kind] = name
                self._add(getattr(kind, "forward", None), kind)
            for value in vars(module).values():  # activations that are lambdas
                if isinstance(value, (types.FunctionType, types.MethodType)):
                    self._add(value, kind)
            for hook in forward_hooks(module):
                self._add(hook, None)
        self._add(called, type(getattr(called, "__self__", None)))
        while self._pending:
            self._follow(*self._pending.pop())

    def _add(self, value: Any, owner: type | None) -> None:
        function = getattr(value, "__func__", value)
        if not isinstance(function, types.FunctionType) or id(function) in self._seen:
            return
        if is_user_file(function.__code__.co_filename):
            self._seen.add(id(function))
            self.functions.append(function)
            self._pending.append((function, owner))

    def _follow(self, function: types.FunctionType, owner: type | None) -> None:
        named = set(_names(function.__code__))
        self.names |= named
        for name in named:
            self._add(function.__globals__.get(name), None)
            for kind in owner.__mro__ if owner is not None else ():
                held = kind.__dict__.get(name)
                self._add(held.fget if isinstance(held, property) else held, owner)
        for cell in function.__closure__ or ():
            self._add(_content(cell), None)


class Settings:
    """The settings of a model outside of its modules' plain attributes."""

    def __init__(
        self, modules: dict[str, nn.Module], is_plain: Callable[[Any], bool], called: Any = None
    ) -> None:
        self._reach = Reach(modules, called)
        self._is_plain = is_plain
        self._slots: list[tuple[str, Callable[[], Any]]] = []
        self._seen: set[int] = set()
        self._containers: list[tuple[str, Any]] = []
        for function in self._reach.functions:
            self._of_function(function)
        for kind, path in self._reach.classes.items():
            for base in kind.__mro__:
                if not base.__module__.startswith(_TORCH):
                    self._entries(f"class of {path or 'the model'}: ", base.__dict__, 1, True)
        self._kept_in = list(self._containers)
        self._fixed, self._fixed_seen = list(self._slots), set(self._seen)
        self._left_out: set[str] = set()

    def look(self, modules: dict[str, nn.Module], ours: frozenset[str]) -> None:
        """Find the settings in the modules' present values."""
        self._slots, self._seen = list(self._fixed), set(self._fixed_seen)
        for path, module in modules.items():
            for name, value in vars(module).items():
                if name not in ours and name in self._reach.names:
                    label = f"{path}.{name}" if path else name
                    self._entries(label, value, 1)
                    if type(value) in (list, dict, set) and all(map(self._is_plain, value)):
                        self._slots.append((f"len({label})", _Length(value)))
        self._slots = [slot for slot in self._slots if slot[0] not in self._left_out]

    def leave_out(self, labels: Iterable[str]) -> None:
        """Stop reading the settings with these labels."""
        self._left_out.update(labels)

    def read(self) -> list[Any]:
        """Return the present values, with None for a setting that no longer exists."""
        return [get() for _, get in self._slots]

    def labels(self) -> list[str]:
        return [label for label, _ in self._slots]

    def leaked(self) -> list[str]:
        """Return the lists and dicts outside the modules that hold tensors of a trace."""
        return [
            label
            for label, held in self._kept_in
            if any(map(is_traced, held.values() if isinstance(held, dict) else held))
        ]

    def may_read(self, name: str) -> bool:
        """Return whether code that forward reaches mentions an attribute."""
        return name in self._reach.names

    def _of_function(self, function: types.FunctionType) -> None:
        held, code = function.__globals__, function.__code__
        for name in sorted(set(_globals_of(code)) & held.keys()):
            self._setting(f"global {name}", held, name, 0)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            value = _content(cell)
            if self._is_plain(value):
                self._slots.append((f"{name} of {function.__name__}", _Cell(cell)))
            else:
                self._entries(name, value, 1)
        for value in function.__defaults__ or ():
            self._entries(f"default of {function.__name__}", value, 1)

    def _setting(self, label: str, holder: Any, key: Any, depth: int) -> None:
        value = holder[key]
        if self._is_plain(value):
            self._slots.append((label, _Entry(holder, key)))
        elif depth < DEPTH:
            self._entries(label, value, depth + 1)

    def _entries(self, label: str, value: Any, depth: int, is_class: bool = False) -> None:
        """Add the entries of a container or a config object, once."""
        if type(value) in _CONTAINERS or is_class:
            holder = value
        elif isinstance(value, _NO_SETTINGS) or not _is_config(value):
            return
        else:
            holder = vars(value)
        is_named = holder is not value or is_class  # attributes: only the mentioned ones count
        if id(holder) in self._seen or (len(holder) > MOST and not is_named):
            return
        self._seen.add(id(holder))
        if holder is value and not is_class:
            self._containers.append((label, value))
        keys = range(len(holder)) if type(holder) is list else list(holder)
        for key in keys:
            if is_named and key not in self._reach.names:
                continue
            if is_class:  # only plain attributes of a class; methods are code
                if self._is_plain(holder[key]) or type(holder[key]) in _CONTAINERS:
                    self._setting(f"{label}{key}", holder, key, depth)
                continue
            joined = f"{label}.{key}" if is_named else f"{label}[{key!r}]"
            self._setting(joined, holder, key, depth)


class _Entry:
    """A reader of one entry of a list or a dict."""

    __slots__ = ("_holder", "_key")

    def __init__(self, holder: Any, key: Any) -> None:
        self._holder, self._key = holder, key

    def __call__(self) -> Any:
        try:
            return self._holder[self._key]
        except (KeyError, IndexError):
            return None


class _Length:
    """A reader of the length of a container."""

    __slots__ = ("_holder",)

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    def __call__(self) -> int:
        return len(self._holder)


class _Cell:
    """A reader of a variable of an enclosing function."""

    __slots__ = ("_cell",)

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __call__(self) -> Any:
        return _content(self._cell)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_config(value: Any) -> bool:
    """Return whether an object may hold settings: an object of a user's class, or a namespace."""
    if isinstance(value, types.ModuleType):
        return is_user_file(getattr(value, "__file__", None) or "<")
    kind = type(value)
    return isinstance(getattr(value, "__dict__", None), dict) and (
        kind.__module__ in ("types", "argparse") or _is_user_class(kind)
    )


def _is_user_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return module is not None and is_user_file(getattr(module, "__file__", None) or "main")


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Yield the globals that a function reads, but not attributes with the same names.

    The loop variables of a script are globals too, and change at every step.
    """
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _globals_of(value)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names in a function: attributes, globals, and strings, which may be keys."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _names(value)
        elif isinstance(value, str):
            yield value


# -- The model state that a program depends on, read at every call: flags, buffers, attributes -----


PLAIN = frozenset({int, bool, str, type(None), bytes, torch.dtype, torch.device})
_NAMED = (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {SLOT}
_ANY = CONTAINERS[0]  # an attribute that every module has
_training = attrgetter("training")
_requires_grad = attrgetter("requires_grad")


class Reading:
    """Named values of a model at one time, as part of a key.

    A new reading is created only if a value has changed. Successive calls share one reading, which
    is compared by identity and hashed once.
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
    """The model's part of a signature; holds its modules and parameters in lists.

    entry: the function whose modules and parameters count.
    """

    def __init__(self, model: nn.Module, entry: Entry = MODEL) -> None:
        self.entry = entry
        with original(model):
            named, params = entry.modules(model), entry.parameters(model)
            self.module_names, self._modules = tuple(named), list(named.values())
            called = None if entry.is_parameters else entry.function(model)
            self._buffers, self._attributes = Buffers(named), Attributes(named, called)
        self.param_names, self._params = tuple(params), list(params.values())

    def leave_out(self, attributes: Iterable[tuple[str, str]]) -> None:
        """Exclude from keys the attributes, given by (module, name), that forward only sets."""
        self._attributes.leave_out(attributes)

    def leave_out_changed(self) -> list[str]:
        """Exclude from keys the settings that a forward has changed itself; return their names."""
        return self._attributes.leave_out_changed()

    def leaked(self) -> list[str]:
        """Return the lists and dicts outside the modules that hold tensors of a trace."""
        return self._attributes.leaked()

    def may_read(self, name: str) -> bool:
        """Return whether code that forward reaches mentions a module attribute of this name."""
        return name not in _OF_EVERY_MODULE and self._attributes.may_read(name)

    def read(self) -> tuple[bytes, bytes, Reading, Reading]:
        """Return the present (training, trainable, buffers, attributes).

        Costs about 25 ns per module and per parameter for the flags, 50 ns per attribute and 0.4 us
        per buffer.
        """
        with DisableTorchFunctionSubclass():
            return (
                bytes(map(_training, self._modules)),
                bytes(map(_requires_grad, self._params)),
                self._buffers.read(),
                self._attributes.read(),
            )


class Buffers:
    """The form of every buffer, and which names share one tensor: regions rely on both."""

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
    """The modules' own attributes: the values of plain ones are constants of a program.

    Plain are numbers, strings, functions, classes and tuples of them. `Settings` covers lists,
    dicts, config objects and everything outside the modules.
    """

    def __init__(self, modules: dict[str, nn.Module], called: Any = None) -> None:
        self._modules, self._settings = modules, Settings(modules, is_plain, called)
        self._owners = [(name, vars(module)) for name, module in modules.items()]
        self._dicts = [own for _, own in self._owners]
        self._left_out: set[tuple[str, str]] = set()
        self._getters: list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = []
        self._counts: list[int] = []
        self._values: list[Any] = []
        self._reading = Reading()

    def read(self) -> Reading:
        """Return the present attributes; unchanged ones cost only a comparison."""
        if list(map(len, self._dicts)) != self._counts or not self._is_as_before():
            self._look()
        return self._reading

    def _is_as_before(self) -> bool:
        try:
            now = [*chain.from_iterable([get(own) for get, own in self._getters])]
        except KeyError:  # one attribute was removed and another added
            return False
        now += self._settings.read()
        return len(now) == len(self._values) and all(map(is_, now, self._values))

    def _look(self) -> None:
        named: list[tuple[str, Any]] = []
        self._counts = list(map(len, self._dicts))
        self._getters, self._values = [], []
        for prefix, own in self._owners:
            left_out = _OF_EVERY_MODULE | {n for path, n in self._left_out if path == prefix}
            names = [n for n in own if n not in left_out]
            if names:
                get = itemgetter(*names, _ANY)  # at least two names, so that the result is a tuple
                self._getters.append((get, own))
                self._values += get(own)
                named += [(_join(prefix, n), _attribute_key(own[n])) for n in names]
        self._settings.look(self._modules, _OF_EVERY_MODULE)
        inside = self._settings.read()
        self._values += inside
        keys = map(_attribute_key, inside)
        named += zip(self._settings.labels(), keys, strict=True)
        self._reading = Reading(tuple(named))

    def leave_out(self, attributes: Iterable[tuple[str, str]]) -> None:
        """Stop reading the attributes given by (module, name)."""
        self._left_out.update(attributes)
        self._counts = []

    def leaked(self) -> list[str]:
        return self._settings.leaked()

    def may_read(self, name: str) -> bool:
        return self._settings.may_read(name)

    def leave_out_changed(self) -> list[str]:
        """Stop reading settings that changed since they were read; return their labels.

        A setting that was None has received its default (`config.problem_type` of transformers) and
        is kept with its new value.
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
    """Return whether a value is a number, a string, or another constant for a program."""
    return type(value) in PLAIN or isinstance(value, (float, complex, enum.Enum))


def tensor_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties of an input tensor that a program relies on."""
    return (
        "tensor", tensor.shape, tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad
    )  # fmt: skip


def number_key(value: float | complex) -> tuple[type, Any]:
    """Return a key that distinguishes -0.0 from 0.0 and treats all NaNs as equal."""
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
