"""Settings that a forward reads past the module's plain attributes: a program has them baked in.

These are the entries of lists, dicts and config objects that a module holds, globals, closures and
attributes of classes. Which of them a forward may read is told by names: an entry counts if the
code that forward can reach names it. Values of other kinds than numbers, strings, dtypes and
devices are not looked at.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from zerofx.capture.lines import is_user_file
from zerofx.compat.modules import forward_hooks
from zerofx.compat.tracing import is_traced

DEPTH = 3  # of containers in containers
MOST = 64  # entries of a container that is taken for settings
_CONTAINERS = (list, dict)
_TORCH = ("torch", "builtins")
_NO_SETTINGS = (nn.Module, Tensor, type, types.FunctionType, types.BuiltinFunctionType)


class Reach:
    """The code that the forwards of a model can reach, by name, outside torch.

    names: what it names: attributes, globals, and strings, which may be keys.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
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
    """The settings of a model that lie outside its modules' plain attributes."""

    def __init__(self, modules: dict[str, nn.Module], is_plain: Callable[[Any], bool]) -> None:
        self._reach = Reach(modules)
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
        """Find the settings in what the modules hold now."""
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
        """Look at these no longer."""
        self._left_out.update(labels)

    def read(self) -> list[Any]:
        """Return the values as of now, None where a setting is gone."""
        return [get() for _, get in self._slots]

    def labels(self) -> list[str]:
        return [label for label, _ in self._slots]

    def leaked(self) -> list[str]:
        """Return which lists and dicts outside the modules hold tensors of a trace."""
        return [
            label
            for label, held in self._kept_in
            if any(map(is_traced, held.values() if isinstance(held, dict) else held))
        ]

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
        """Take in the entries of a container or a config object, once."""
        if type(value) in _CONTAINERS or is_class:
            holder = value
        elif isinstance(value, _NO_SETTINGS) or not _is_config(value):
            return
        else:
            holder = vars(value)
        is_named = holder is not value or is_class  # attributes, of which only those named count
        if id(holder) in self._seen or (len(holder) > MOST and not is_named):
            return
        self._seen.add(id(holder))
        if holder is value and not is_class:
            self._containers.append((label, value))
        keys = range(len(holder)) if type(holder) is list else list(holder)
        for key in keys:
            if is_named and key not in self._reach.names:
                continue
            if is_class:  # of a class its plain attributes; methods are code
                if self._is_plain(holder[key]) or type(holder[key]) in _CONTAINERS:
                    self._setting(f"{label}{key}", holder, key, depth)
                continue
            joined = f"{label}.{key}" if is_named else f"{label}[{key!r}]"
            self._setting(joined, holder, key, depth)


class _Entry:
    """Reads one entry of a list or a dict."""

    __slots__ = ("_holder", "_key")

    def __init__(self, holder: Any, key: Any) -> None:
        self._holder, self._key = holder, key

    def __call__(self) -> Any:
        try:
            return self._holder[self._key]
        except (KeyError, IndexError):
            return None


class _Length:
    """Reads how many entries a container has."""

    __slots__ = ("_holder",)

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    def __call__(self) -> int:
        return len(self._holder)


class _Cell:
    """Reads a variable of an enclosing function."""

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
    """Tell whether an object's attributes may be settings: one of the user's, or a namespace."""
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
    """Yield the globals that a function reads, and not the attributes that have such names.

    A script's own loop variables are globals too, and change at every step.
    """
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _globals_of(value)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield what a function names: attributes, globals, and strings, which may be keys."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _names(value)
        elif isinstance(value, str):
            yield value
