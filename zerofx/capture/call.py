"""Calls: the arguments and results of a model call as numbered, named leaves, and back."""

from __future__ import annotations

import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.capture.guard import check_arguments, check_packed
from zerofx.capture.original import Entry
from zerofx.compat.graphs import FakeTensorMode, TreeSpec, pytree
from zerofx.compat.modules import own_parameters
from zerofx.compat.tracing import is_symbolic
from zerofx.errors import PlanError
from zerofx.plan.fields import covers

# -- Flatten a call's arguments and results into numbered leaves, and rebuild them -----------------
# torch's pytree knows tuples, lists, dicts, named tuples and the classes that libraries register
# with it (`ModelOutput`). Unregistered dataclasses and subclasses of dict are opened here through a
# private node type, so that zerofx registers no class on the user's behalf. So are shapes, of which
# pytree makes tuples.


class _Opened:
    """The tree node that represents one object of a class that pytree does not know."""

    def __init__(self, kind: type, keys: tuple[Any, ...], values: list[Any]) -> None:
        self.kind, self.keys, self.values = kind, keys, values


def _flatten(node: _Opened) -> tuple[list[Any], tuple[type, tuple[Any, ...]]]:
    return node.values, (node.kind, node.keys)


def _flatten_with_keys(node: _Opened) -> tuple[list[tuple[Any, Any]], Any]:
    is_record = dataclasses.is_dataclass(node.kind)
    step: Any = pytree.GetAttrKey if is_record else pytree.MappingKey
    if node.kind is torch.Size:
        step = pytree.SequenceKey
    pairs: list[tuple[Any, Any]] = [
        (step(k), v) for k, v in zip(node.keys, node.values, strict=True)
    ]
    return pairs, (node.kind, node.keys)


def _unflatten(values: Any, context: tuple[type, tuple[Any, ...]]) -> Any:
    """Rebuild the object without calling its constructor, which may compute or raise."""
    kind, keys = context
    if kind is torch.Size:
        values = tuple(values)
        is_shape = all(isinstance(v, int) or is_symbolic(v) for v in values)
        return torch.Size(values) if is_shape else values
    made: Any = kind.__new__(kind)  # type: ignore[call-overload]
    pairs = zip(keys, values, strict=True)
    if dataclasses.is_dataclass(kind):
        for key, value in pairs:
            object.__setattr__(made, key, value)
    elif issubclass(kind, UserDict):
        made.data = dict(pairs)
    else:
        dict.update(made, pairs)
    return made


pytree.register_pytree_node(_Opened, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


def _open(obj: Any) -> Any:
    """Replace a leaf that is a dataclass, a mapping or a shape by its `_Opened`, recursively."""
    keys: tuple[Any, ...]
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        keys = tuple(f.name for f in dataclasses.fields(obj) if hasattr(obj, f.name))
        values = [getattr(obj, k) for k in keys]
    elif isinstance(obj, (dict, UserDict)):
        keys = tuple(obj.keys())
        values = [obj[k] for k in keys]
    elif isinstance(obj, torch.Size):
        keys, values = tuple(range(len(obj))), [*obj]
    else:
        return obj
    return _Opened(type(obj), keys, [_all_opened(v) for v in values])


def _all_opened(tree: Any) -> Any:
    return pytree.tree_map(_open, tree, is_leaf=lambda node: isinstance(node, torch.Size))


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a tree and the spec that rebuilds it."""
    return pytree.tree_flatten(_all_opened(tree))


def flatten_named(tree: Any) -> tuple[list[str], list[Any], TreeSpec]:
    """Flatten a tree and name every leaf: `loss`, `[0]`, `hidden_states[2]`."""
    opened = _all_opened(tree)
    leaves, spec = pytree.tree_flatten(opened)
    return [_path_name(path) for path in _paths(opened)], leaves, spec


def _paths(node: Any) -> list[tuple[Any, ...]]:
    """Return the path of every leaf, even if a library registered a class without key names."""
    try:
        return [path for path, _ in pytree.tree_flatten_with_path(node)[0]]
    except ValueError:  # raised by some class inside: descend one level at a time
        pass

    def is_part(other: Any) -> bool:
        return other is not node

    try:
        parts, _ = pytree.tree_flatten_with_path(node, is_part)
    except ValueError:  # raised by this class
        values, _ = pytree.tree_flatten(node, is_part)
        if isinstance(node, Mapping) and len(node) == len(values):
            keys: list[Any] = [pytree.MappingKey(key) for key in node]
        else:
            keys = [pytree.SequenceKey(number) for number in range(len(values))]
        parts = [((key,), value) for key, value in zip(keys, values, strict=True)]
    return [(*path, *rest) for path, value in parts for rest in _paths(value)]


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """Rebuild the tree that `spec` describes from its leaves."""
    return pytree.tree_unflatten(leaves, spec)


def flatten_call(
    forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[str], list[Any], TreeSpec]:
    """Flatten ((args...), {kwargs}); leaves are named after forward's parameters."""
    try:
        known = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # a callable without a Python signature
        known = []
    positional = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names, leaves, spec = flatten_named((args, kwargs))
    for i, name in enumerate(names):
        names[i] = call_name(name)
        if name.startswith("[0]"):
            index, _, rest = name[4:].partition("]")
            if int(index) < len(positional):
                names[i] = positional[int(index)] + rest
    return names, leaves, spec


def call_name(name: str) -> str:
    """Convert a leaf's name in ((args...), {kwargs}) to `args[0]` or the keyword."""
    return name[3:].lstrip(".") if name.startswith("[1]") else "args" + name[3:]


def _path_name(path: tuple[Any, ...]) -> str:
    text = ""
    for key in path:
        if isinstance(key, pytree.SequenceKey):
            text += f"[{key.idx}]"
        else:
            text += f".{key.key if isinstance(key, pytree.MappingKey) else key.name}"
    return text.lstrip(".")


# -- One call of a model: its arguments as numbered, named leaves ----------------------------------


@dataclass(frozen=True)
class Call:
    """The leaves of ((args...), {kwargs}), in the order in which `spec` takes them.

    names: `x`, `batch.ids`, `labels`. tensors: the numbers of the leaves that are tensors.
    numbers: the numbers of the leaves that are ints or floats.
    """

    names: list[str]
    leaves: list[Any]
    spec: TreeSpec
    tensors: tuple[int, ...]
    numbers: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        """Flatten a call of a forward or of another function.

        Raises:
            CaptureError: an argument is neither a plain tensor nor a hashable constant.
        """
        check_packed(args, kwargs)
        names, leaves, spec = flatten_call(function, tuple(args), kwargs)
        check_arguments(names, leaves)
        tensors = tuple(i for i, v in enumerate(leaves) if isinstance(v, Tensor))
        numbers = tuple(i for i, v in enumerate(leaves) if type(v) in (int, float))
        return cls(names, leaves, spec, tensors, numbers)

    @property
    def ignored(self) -> tuple[int, ...]:
        """The numbers of the leaves that are parameters which the plan ignores."""
        return tuple(i for i in self.tensors if self.names[i].startswith(f"{KEYWORD}."))

    def varied(self, numbers: Mapping[int, Any]) -> Call:
        """Return the call with the given leaves replaced by other numbers."""
        leaves = [numbers.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        return dataclasses.replace(self, leaves=leaves)

    def fakes(
        self,
        mode: FakeTensorMode,
        device: torch.device | None,
        sizes: Mapping[tuple[int, int, bool], Any] | None = None,
    ) -> tuple[Tensor, ...]:
        """Create a fake for each tensor, with the same shape, strides, dtype and requires_grad.

        sizes: the replacements of sizes and strides that vary, by (leaf, dim, is it a stride). A
            contiguous tensor has the strides that follow from its sizes.
        """
        varying, made = sizes or {}, []
        with mode, torch.inference_mode(False), torch.no_grad():
            for number in self.tensors:
                own = self.leaves[number]
                shape = [varying.get((number, dim, False), n) for dim, n in enumerate(own.shape)]
                strides = [
                    varying.get((number, dim, True), n) for dim, n in enumerate(own.stride())
                ]
                if own.is_contiguous() and any(type(n) is not int for n in shape):
                    strides = contiguous_strides(shape)
                fake = torch.empty_strided(
                    shape,
                    strides,
                    dtype=own.dtype,
                    device=place(own, device),
                )
                made.append(fake.requires_grad_(own.requires_grad))
        return tuple(made)

    def rebuild(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with the call's tensors replaced by the given ones."""
        leaves = list(self.leaves)
        for number, tensor in zip(self.tensors, tensors, strict=True):
            leaves[number] = tensor
        args, kwargs = unflatten(leaves, self.spec)
        return args, kwargs


def contiguous_strides(shape: Sequence[Any]) -> list[Any]:
    """Return the strides of a contiguous tensor whose sizes may be symbols above 1."""
    strides: list[Any] = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


def place(tensor: Tensor, device: torch.device | None) -> torch.device:
    """Return the device of a fake: the tensor's own, or `device` for a tensor on meta."""
    return tensor.device if tensor.device.type != "meta" else device or torch.device("cpu")


# -- Parameters that the plan ignores: a program takes them as additional tensors of each call -----
# They stay the plain parameters of their modules: not sharded, moved, gathered or reduced. As they
# are inputs of programs, autograd handles them as it does any input: it accumulates each rank's own
# gradient in `p.grad`, and runs their hooks.


KEYWORD = "zerofx.ignored_params"  # keyword argument that maps names to these parameters


def find_ignored(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return all names of the parameters that a plan ignores.

    A tied parameter is ignored if a pattern matches any of its names.

    Raises:
        PlanError: a pattern matches no parameter.
    """
    if not patterns:
        return ()
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(covers(pattern, name) for name, _ in named):
            raise PlanError(
                f"Plan.ignored_params: {pattern!r} covers no parameter of {type(model).__name__}. "
                f"Its parameters are {', '.join(name for name, _ in named[:8])}"
                f"{' and others' if len(named) > 8 else ''}."
            )
    chosen = {id(p) for name, p in named if any(covers(pattern, name) for pattern in patterns)}
    return tuple(name for name, param in named if id(param) in chosen)


@dataclass(frozen=True)
class IgnoredPlace:
    """The location of an ignored parameter: its module's own dictionary, whose entry may change."""

    name: str
    holder: dict[str, Any]
    key: str


def ignored_of(model: nn.Module, names: Collection[str], entry: Entry) -> tuple[IgnoredPlace, ...]:
    """Return the ignored parameters that a function may read, tied ones under their first name."""
    found: dict[int, IgnoredPlace] = {}
    for path, module in entry.modules(model).items():
        holder = own_parameters(module)
        for key, param in holder.items():
            name = f"{path}.{key}" if path else key
            if param is not None and name in names:
                found.setdefault(id(param), IgnoredPlace(name, holder, key))
    return tuple(found.values())


def with_ignored(kwargs: dict[str, Any], places: Sequence[IgnoredPlace]) -> dict[str, Any]:
    """Return the keyword arguments of a program: the user's, and the ignored parameters."""
    if not places:
        return kwargs
    return {**kwargs, KEYWORD: {place.name: place.holder[place.key] for place in places}}
