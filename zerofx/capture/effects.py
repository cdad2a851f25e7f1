"""Side effects of a forward, which a program would not repeat: undone, then refused or kept."""

from __future__ import annotations

import operator
import pickle
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerofx.capture.lines import find_line
from zerofx.compat.autograd import NORM_HOOKS
from zerofx.compat.graphs import pytree
from zerofx.compat.modules import CONTAINERS, FLAT_WEIGHTS, forward_pre_hooks, own_children
from zerofx.compat.tracing import is_traced
from zerofx.errors import CaptureError

Run = Callable[[], Any]


class HostGenerators:
    """A snapshot of the state of Python's and NumPy's global random generators."""

    def __init__(self) -> None:
        self._numpy = sys.modules.get("numpy")
        self._python_state = random.getstate()
        self._numpy_state = self._read_numpy()

    def _read_numpy(self) -> Any:
        if self._numpy is None:
            return None
        kind, key, *rest = self._numpy.random.get_state()
        return kind, key.tobytes(), *rest

    def has_moved(self) -> bool:
        return random.getstate() != self._python_state or self._read_numpy() != self._numpy_state

    def restore(self) -> str:
        """Restore both generators; return the name of the one that had moved, or ""."""
        moved = ""
        if random.getstate() != self._python_state:
            random.setstate(self._python_state)
            moved = "Python's random generator"
        if self._numpy is not None and self._read_numpy() != self._numpy_state:
            kind, key, *rest = self._numpy_state
            words = self._numpy.frombuffer(key, dtype=self._numpy.uint32)
            self._numpy.random.set_state((kind, words, *rest))
            moved = "NumPy's random generator"
        return moved


def refuse_host_random(moved: str, generators: HostGenerators, run: Run) -> CaptureError:
    """Return the error for a forward that drew from a host generator, with the line."""
    where = find_line(run, generators.has_moved)
    generators.restore()
    return CaptureError(
        f"capture: forward draws from {moved}{at_line(where)}, whose value would be baked into "
        "the program. Use torch's random functions, or pass the number as an argument."
    )


class Modes:
    """A snapshot of torch's global modes, which a forward must leave unchanged."""

    def __init__(self) -> None:
        self._before = self._read()

    @staticmethod
    def _read() -> dict[str, Any]:
        return {
            "the default dtype": torch.get_default_dtype(),
            "grad mode": torch.is_grad_enabled(),
            "CPU autocast": torch.is_autocast_enabled("cpu"),
            "CUDA autocast": torch.is_autocast_enabled("cuda"),
            "the choice of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "the seed of torch's generator": torch.initial_seed(),
        }

    def has_changed(self) -> bool:
        return self._read() != self._before

    def restore(self) -> str:
        """Restore the modes; return the changed one, or "". (The tracer restores the seed.)"""
        before, after = self._before, self._read()
        changed = [name for name in before if before[name] != after[name]]
        if not changed:
            return ""
        dtype, grad, on_cpu, on_cuda, is_deterministic, _ = before.values()
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_autocast_enabled("cpu", on_cpu)
        torch.set_autocast_enabled("cuda", on_cuda)
        torch.use_deterministic_algorithms(is_deterministic)
        return f"{changed[0]} ({before[changed[0]]} -> {after[changed[0]]})"


def refuse_mode(changed: str, run: Run) -> CaptureError:
    """Return the error for a forward that left a global mode changed, with the line."""
    where = find_line(run, Modes().has_changed)
    return CaptureError(
        f"capture: forward changes {changed}{at_line(where)} and leaves it so, which a program "
        "would not repeat. Use the context manager form, or set it outside the model."
    )


def at_line(where: str) -> str:
    return f" at {where}" if where else ""


# -- The plain attributes of a module before a forward, which must not change them -----------------
# A traced forward reads an attribute once; a program would go on using that value.


# Stored in dictionaries of their own, or (forward) wrapped during capture.
RESERVED = frozenset({*CONTAINERS, "forward"})

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Held:
    """A snapshot of one module: its attributes and its children.

    attributes: by name, the value and a copy of its content if that can change in place: a shallow
        copy of a list, dict or set, or the state of a random generator.
    """

    module: nn.Module
    children: dict[str, Any]
    attributes: dict[str, tuple[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> Held:
        own = module.__dict__
        attributes = {n: (v, _content(v)) for n, v in own.items() if n not in RESERVED}
        return cls(module, dict(own_children(module)), attributes)

    def changed(self) -> list[str]:
        """Return the names of attributes and children that have changed."""
        children, now = own_children(self.module), self.module.__dict__
        names = {**self.children, **children}
        found = [n for n in names if children.get(n) is not self.children.get(n)]
        ignored = RESERVED | recomputed(self.module)
        for name in {**self.attributes, **now}:
            if name in ignored:
                continue
            if name not in now or name not in self.attributes:
                found.append(name)
                continue
            value, content = self.attributes[name]
            is_as_before = content is None or _same(content, _content(now[name]))
            if not (_same(value, now[name]) and is_as_before):
                found.append(name)
        return found

    def restore(self) -> None:
        """Restore every attribute and child, in place if the value is a container."""
        module, own = self.module, self.module.__dict__
        if list(own_children(module).items()) != list(self.children.items()):
            own_children(module).clear()
            own_children(module).update(self.children)
        for name in [n for n in own if n not in self.attributes and n not in RESERVED]:
            del own[name]
        for name, (value, content) in self.attributes.items():
            own[name] = value
            if content is not None:
                put_back(value, content)


def _content(value: Any) -> Any:
    """Return a copy of the part of a value that can change in place, or None."""
    if type(value) in (list, dict, set, OrderedDict):  # the last: a module's hooks
        return value.copy()
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__.startswith("numpy.random"):  # a Generator or a RandomState
        return pickle.dumps(value)
    return None


def put_back(value: Any, content: Any) -> None:
    """Restore the content of a value, in place."""
    if isinstance(value, list):
        value[:] = content
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(content)
    elif isinstance(value, random.Random):
        value.setstate(content)
    else:
        old = pickle.loads(content)
        for kind in ("bit_generator", "_bit_generator"):
            if hasattr(value, kind):
                getattr(value, kind).state = getattr(old, kind).state


def _same(old: Any, new: Any) -> bool:
    """Compare plain values and containers of them by value, everything else by identity."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, _PLAIN):
        return bool(old == new)
    if isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, dict):
        return list(old) == list(new) and all(map(_same, old.values(), new.values()))
    if isinstance(old, set):
        return len(old) == len(new) and all(v in new for v in old)
    return False


def recomputed(module: nn.Module) -> frozenset[str]:
    """Return the attributes that every forward sets before it reads them.

    `nn.LSTM` stores its flat weights this way; the hook forms of weight norm and spectral norm
    store their product.
    """
    names: set[str] = set()
    if isinstance(module, nn.RNNBase):
        names |= FLAT_WEIGHTS
    for hook in forward_pre_hooks(module):
        if isinstance(hook, NORM_HOOKS):
            names.add(hook.name)
    return frozenset(names)


def refuse_attribute(path: str, held: Held, run: Run) -> CaptureError:
    """Return the error for a forward that changed an attribute, with the line.

    path: the attribute's qualified name. The module's attributes must have been restored.
    """
    where = find_line(run, lambda: bool(held.changed()))
    return CaptureError(
        f"capture: forward changes the attribute {path}{at_line(where)}, which a program would "
        "not repeat (what it read would be baked in), and the next call would find or leave "
        "something else. Return the value instead, keep it in a buffer or, if only a first call "
        "changes it, call the model once before it is compiled."
    )


def refuse_rebinding(what: str, is_disturbed: Callable[[], bool], run: Run) -> CaptureError:
    """Return the error for a forward that rebinds or registers a parameter or buffer."""
    where = find_line(run, is_disturbed)
    return CaptureError(
        f"capture: forward {what}{at_line(where)}, which a program would not repeat. Do it outside "
        "forward (a buffer may get a new value of its own shape and dtype that does not require "
        "grad)."
    )


# -- Attributes that a first call sets: caches, flags, hooks, the latest shape ---------------------
# A program does not repeat this. That is correct if the next call finds the same values and
# computes the same. The attributes then receive the values that the call left, once, and the
# program is that of all later calls. A forward that changes attributes is therefore traced twice,
# the second time in the state that the first trace left. It must leave that state unchanged and
# compute the same as at first. Tensors in caches are compared by value; their values depend on
# constants alone.

ValueOf = Callable[[Tensor], Tensor | None]  # value of a traced tensor, None if it varies
_MAX_NESTED = 4


@dataclass(frozen=True)
class Change:
    """A new value of one attribute of a module.

    path: the module's name. content: the content of the value, if it is a container that was
        changed in place. is_read: whether forward reads the previous value.
    """

    path: str
    name: str
    value: Any
    content: Any = None
    is_read: bool = True

    def apply(self, model: nn.Module) -> None:
        """Give the attribute its new value."""
        model.get_submodule(self.path).__dict__[self.name] = self.value
        if self.content is not None:
            put_back(self.value, self.content)


class Unreadable:
    """A stand-in for an attribute's value that raises on every access."""

    def _refuse(self, *_: Any) -> Any:
        raise _Varies

    __bool__ = __len__ = __iter__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __floordiv__ = __mod__ = __getitem__ = __setitem__ = __contains__ = __call__ = _refuse
    __hash__ = __int__ = __float__ = __index__ = __str__ = __repr__ = __format__ = _refuse

    def __getattr__(self, name: str) -> Any:
        raise _Varies


class _Varies(Exception):
    """A value differs from call to call."""


def changes_of(path: str, held: Held, value_of: ValueOf) -> list[Change] | None:
    """Return the changes that a forward has made to a module's attributes.

    Return None if a later call cannot find them: a tensor that varies, or a replaced child.
    """
    names = held.changed()
    found: list[Change] = []
    own = held.module.__dict__
    try:
        for name in names:
            if name not in own:
                return None
            value, (before, _) = own[name], held.attributes.get(name, (held, None))
            if value is not before:
                found.append(Change(path, name, _settled(value, value_of)))
                continue
            settled = _settled(value, value_of)  # a container whose content has changed
            if settled is value:
                return None  # a random generator
            found.append(Change(path, name, value, settled))
    except _Varies:
        return None
    return found


def _settled(value: Any, value_of: ValueOf, depth: int = 0) -> Any:
    """Return a value as the next call finds it, with traced tensors replaced by real ones.

    Raises:
        _Varies: the value holds a tensor that differs from call to call.
    """
    if isinstance(value, Tensor):
        real = value_of(value) if is_traced(value) else value
        if real is None or value.requires_grad != real.requires_grad:
            raise _Varies
        return real
    if depth > _MAX_NESTED:
        raise _Varies
    if type(value) in (list, tuple, set):
        return type(value)(_settled(v, value_of, depth + 1) for v in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((k, _settled(v, value_of, depth + 1)) for k, v in value.items())
    inside = getattr(value, "__dict__", {}) if not isinstance(value, (type, nn.Module)) else {}
    if any(map(is_traced, pytree.tree_leaves(list(inside.values())))):
        raise _Varies
    return value


def is_alike(one: Change | None, other: Change) -> bool:
    """Return whether two calls leave equal values in an attribute, tensors compared by value."""
    if one is None or one.content is not None or other.content is not None:
        return False
    leaves, spec = pytree.tree_flatten(one.value)
    others, other_spec = pytree.tree_flatten(other.value)
    return spec == other_spec and all(map(_are_equal, leaves, others))


# -- Whether two traces compute the same -----------------------------------------------------------
_UNSET = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


class _Folded:
    """A traced graph, its nodes that depend on constants alone, and the values of these."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self.constant: set[fx.Node] = set()
        self.other: list[fx.Node] = []
        self._values: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            if _is_constant(node) and all(n in self.constant for n in node.all_input_nodes):
                self.constant.add(node)
            else:
                self.other.append(node)

    def value(self, node: fx.Node) -> Any:
        """Compute a constant node."""
        pending = [node]
        while pending:
            top = pending[-1]
            missing = [n for n in top.all_input_nodes if n not in self._values]
            if missing:
                pending += missing
                continue
            pending.pop()
            if top.op == "get_attr":
                self._values[top] = operator.attrgetter(str(top.target))(self._gm)
            elif top not in self._values:
                args, kwargs = fx.node.map_arg((top.args, top.kwargs), self._values.__getitem__)
                with torch.no_grad():
                    self._values[top] = top.target(*args, **kwargs)  # type: ignore[operator]
        return self._values[node]


def _is_constant(node: fx.Node) -> bool:
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    tags = getattr(node.target, "tags", (torch.Tag.nondeterministic_seeded,))
    is_random = torch.Tag.nondeterministic_seeded in tags
    is_call = node.op == "call_function" and not node.is_impure() and not is_random
    return is_call and node.target not in _UNSET


def is_same(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Return whether two traces compute the same function of their inputs, call by call."""
    a, b = _Folded(one), _Folded(other)
    pairs: dict[fx.Node, fx.Node] = {}
    if len(a.other) != len(b.other):
        return False
    for left, right in zip(a.other, b.other, strict=True):
        if (left.op, left.target) != (right.op, right.target) and left.op != "placeholder":
            return False
        if not _have_same_arguments(left, right, a, b, pairs):
            return False
        pairs[left] = right
    return True


def _have_same_arguments(
    left: fx.Node, right: fx.Node, a: _Folded, b: _Folded, pairs: dict[fx.Node, fx.Node]
) -> bool:
    ours, spec = pytree.tree_flatten((left.args, left.kwargs))
    theirs, other_spec = pytree.tree_flatten((right.args, right.kwargs))
    if spec != other_spec:
        return False
    for mine, its in zip(ours, theirs, strict=True):
        if not isinstance(mine, fx.Node):
            if type(mine) is not type(its) or mine != its:
                return False
        elif mine in a.constant:
            if its not in b.constant:
                return False
            if pairs.get(mine) is its:
                continue
            is_same_call = mine.op != "get_attr" and mine.target is its.target
            is_alike = is_same_call and _have_same_arguments(mine, its, a, b, pairs)
            if not is_alike and not _are_equal(a.value(mine), b.value(its)):
                return False
            pairs[mine] = its
        elif pairs.get(mine) is not its:
            return False
    return True


def _are_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    forms = [(t.shape, t.stride(), t.dtype, t.device) for t in (one, other)]
    return forms[0] == forms[1] and torch.equal(one.nan_to_num(), other.nan_to_num())
