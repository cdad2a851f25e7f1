"""Signatures: the key of a call. Calls of one model with equal keys run the same program."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerofx.capture import call as trees
from zerofx.capture.guard import check_constant, has_hidden_state
from zerofx.capture.model_state import PLAIN, ModelState, Reading, number_key, tensor_key
from zerofx.capture.original import MODEL, Entry
from zerofx.errors import CaptureError

_TENSORS = frozenset({Tensor, nn.Parameter})
_MODE_NAMES = (
    "grad mode",
    "inference mode",
    "default dtype",
    "deterministic algorithms",
    "CPU autocast",
    "CUDA autocast",
)


class Signature(NamedTuple):
    """The properties that a program depends on, besides the model's code.

    args, kwargs: a key for each argument. For a tensor: ("tensor", shape, dtype, strides, device,
        requires_grad); for a constant: (type, value); for a container: the keys of its leaves.
    modes: the values of `_MODE_NAMES` in order; autocast is (device, dtype, cache) or None.
    training, trainable: one byte per submodule (parameter), in registration order.
    buffers, attributes: the forms of the buffers; the values of the modules' plain attributes.
    entry: the function of the model that is called; the other fields cover what it reaches.
    """

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    modes: tuple[Any, ...]
    training: bytes
    trainable: bytes
    buffers: Reading
    attributes: Reading
    entry: Entry = MODEL

    @property
    def takes_gradients(self) -> bool:
        return bool(self.modes[0])


def signature_key(state: ModelState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """Return the key of `model(*args, **kwargs)` under the present modes.

    Raises:
        CaptureError: an argument that is not a tensor cannot be part of a key; the message names
            it.
    """
    try:
        keys = tuple([_key(a) for a in args])
        named = tuple([(k, _key(v)) for k, v in kwargs.items()]) if kwargs else ()
    except TypeError as error:
        raise _unhashable(args, kwargs) from error
    return Signature(keys, named, _modes(), *state.read(), state.entry)


def _key(value: Any) -> Any:
    kind = type(value)
    if kind in _TENSORS:
        return tensor_key(value)
    if kind in PLAIN:
        return kind, value
    if isinstance(value, (float, complex)):
        return number_key(value)
    if kind is dict:
        return kind, tuple([(k, _key(v)) for k, v in value.items()])
    if kind is tuple or kind is list:
        return kind, tuple([_key(v) for v in value])
    return _open_key(value)


def _open_key(value: Any) -> Any:
    """Return the key of a constant, or of a record, named tuple or mapping that pytree opens."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device, value.requires_grad
    names, leaves, _ = trees.flatten_named(value)
    if len(leaves) == 1 and leaves[0] is value:
        if isinstance(value, functools.partial):
            return type(value), _key((value.func, value.args, value.keywords))
        hash(value)
        if has_hidden_state(value):
            raise TypeError("its key would not change with it.")
        return type(value), value
    return type(value), tuple(names), tuple([_key(v) for v in leaves])


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        _autocast("cpu"),
        _autocast("cuda"),
    )


def _autocast(device_type: str) -> Any:
    if not torch.is_autocast_enabled(device_type):
        return None
    return device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()


def describe_sizes(signature: Signature) -> str:
    """Describe the part of a signature that may differ from rank to rank.

    It consists of the shapes of tensors among the arguments and the buffers, and the values of the
    other arguments. It does not include dtypes, modes and flags.
    """
    return _sizes((signature.args, signature.kwargs, tuple(signature.buffers.named)))


def _sizes(key: Any) -> str:
    if isinstance(key, tuple):
        if key and key[0] == "tensor":
            return str(tuple(key[1]))
        return f"({', '.join([_sizes(k) for k in key])})"
    is_plain = key is None or isinstance(key, (bool, int, float, str))
    return repr(key) if is_plain else getattr(key, "__name__", type(key).__name__)


def _unhashable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    names, leaves, _ = trees.flatten_named((args, kwargs))
    try:
        for name, leaf in zip(names, leaves, strict=True):
            check_constant(trees.call_name(name), leaf)
    except CaptureError as error:
        return error
    return CaptureError("capture: an argument has a key that cannot be hashed.")


def describe_difference(new: Signature, old: Signature, state: ModelState) -> str:
    """Describe how two calls differ: `x.shape[1]: 16, was 12`.

    Every difference is listed; the result is "nothing" if there is none.
    """
    found: list[str] = []
    if len(new.args) != len(old.args):
        found.append(f"positional arguments: {len(new.args)}, was {len(old.args)}")
    for i, (a, b) in enumerate(zip(new.args, old.args, strict=False)):
        found += _differences(f"args[{i}]", a, b)
    mine, theirs = dict(new.kwargs), dict(old.kwargs)
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        if name in mine and name in theirs:
            found += _differences(name, mine[name], theirs[name])
        else:
            found.append(f"{name}: {'given' if name in mine else 'not given'}, unlike before")
    if not found and list(mine) != list(theirs):
        found.append("the order of keyword arguments")
    for label, a, b in zip(_MODE_NAMES, new.modes, old.modes, strict=True):
        if a != b:
            found.append(f"{label}: {a}, was {b}")
    found += _flags("training", state.module_names, new.training, old.training)
    found += _flags("requires_grad", state.param_names, new.trainable, old.trainable)
    found += _reading_differences("buffer", new.buffers, old.buffers)
    found += _reading_differences("attribute", new.attributes, old.attributes)
    return "; ".join(found) or "nothing"


def _flags(what: str, names: tuple[str, ...], new: bytes, old: bytes) -> list[str]:
    changed = [i for i, (a, b) in enumerate(zip(new, old, strict=False)) if a != b]
    if not changed:
        return []
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    first = changed[0]
    label = names[first] or "the model"
    return [f"{what} of {label}{more}: {bool(new[first])}, was {bool(old[first])}"]


def _reading_differences(what: str, new: Reading, old: Reading) -> list[str]:
    """Compare two readings by name; they may come from a model and a copy of it."""
    if new == old:
        return []
    mine, theirs = dict(new.named), dict(old.named)
    found: list[str] = []
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        if name in mine and name in theirs:
            found += _differences(f"{what} {name}", mine[name], theirs[name])
        else:
            found.append(f"{what} {name}: {'new' if name in mine else 'gone'}")
    return found


def _differences(name: str, new: Any, old: Any) -> list[str]:
    """Compare two keys of one argument."""
    if new == old:
        return []
    if new[0] != old[0]:
        return [f"{name}: {_kind(new)}, was {_kind(old)}"]
    if new[0] == "tensor":
        return _tensor_differences(name, new, old)
    if new[0] in (dict, tuple, list):
        return _item_differences(name, new, old)
    if len(new) == 3 and isinstance(new[1], tuple) and new[1] == old[1]:
        return [
            d
            for leaf, a, b in zip(new[1], new[2], old[2], strict=True)
            for d in _differences(_join(name, leaf), a, b)
        ]
    return [f"{name}: {new[1]!r}, was {old[1]!r}"]


def _tensor_differences(name: str, new: Any, old: Any) -> list[str]:
    found = []
    if len(new[1]) != len(old[1]):
        found.append(f"{name}.ndim: {len(new[1])}, was {len(old[1])}")
    else:
        for dim, (a, b) in enumerate(zip(new[1], old[1], strict=True)):
            if a != b:
                found.append(f"{name}.shape[{dim}]: {a}, was {b}")
    labels = ((2, "dtype"), (3, "stride()"), (4, "device"), (5, "requires_grad"))
    for i, label in labels:
        is_consequence = label == "stride()" and found  # strides follow the shape
        if new[i] != old[i] and not is_consequence:
            found.append(f"{name}.{label}: {new[i]}, was {old[i]}")
    return found


def _item_differences(name: str, new: Any, old: Any) -> list[str]:
    if len(new[1]) != len(old[1]):
        return [f"len({name}): {len(new[1])}, was {len(old[1])}"]
    found: list[str] = []
    for i, (a, b) in enumerate(zip(new[1], old[1], strict=True)):
        if new[0] is not dict:
            found += _differences(f"{name}[{i}]", a, b)
        elif a[0] != b[0]:
            found.append(f"{name}: key {a[0]!r}, was {b[0]!r}")
        else:
            found += _differences(f"{name}[{a[0]!r}]", a[1], b[1])
    return found


def _join(name: str, leaf: str) -> str:
    return name + leaf if leaf.startswith("[") else f"{name}.{leaf}"


def _kind(key: Any) -> str:
    if key[0] is None:
        return "None"
    if key[0] == "tied":
        return f"one with {key[1]}"
    return key[0] if isinstance(key[0], str) else key[0].__name__
