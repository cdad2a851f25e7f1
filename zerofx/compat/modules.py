"""Internals of nn.Module: its own dictionaries, hooks and flat weights.

The public methods walk the whole tree, skip entries that are None or tied, and return copies.
zerofx replaces entries and compares them with those at compile time, so it needs the dictionaries
themselves.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules import batchnorm
from torch.utils.module_tracker import ModuleTracker

Entries: TypeAlias = dict[str, Any]  # by the module's own names; an entry may be None

# The module's own dictionaries, not copies: replacing an entry there replaces it in the module.
# They stay the same objects for the lifetime of the module.
own_parameters: Callable[[nn.Module], Entries] = attrgetter("_parameters")

own_buffers: Callable[[nn.Module], Entries] = attrgetter("_buffers")

own_children: Callable[[nn.Module], Entries] = attrgetter("_modules")

# The names of the attributes in which a module stores them.
CONTAINERS = ("_parameters", "_buffers", "_modules")

BatchNorm = batchnorm._BatchNorm  # of any number of dimensions, synchronised or not

# The names of buffers that are not part of the module's state.
unsaved_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")

# Methods without arguments by which torch's modules initialise their own parameters.
RESETS = ("reset_parameters", "_reset_parameters")

# Plain attributes that an RNN sets before each of its calls.
FLAT_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})


def put_parameter(module: nn.Module, key: str, param: nn.Parameter) -> None:
    """Set a module's parameter in place, and update an RNN's list of flat weights."""
    own_parameters(module)[key] = param
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]


def state_metadata(state: Mapping[str, Any]) -> Any:
    """Return the versions that `state_dict()` stores next to the values, or None."""
    return getattr(state, "_metadata", None)


def note_state_metadata(state: Any, metadata: Any) -> None:
    """Store the versions where `load_state_dict()` looks for them."""
    state._metadata = metadata


# -- hooks ----------------------------------------------------------------------------------------
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dictionaries in which a module stores its forward and backward hooks."""
    return [getattr(module, kind) for kind in _HOOKS]


def forward_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks that a forward runs."""
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run before a forward."""
    return list(module._forward_pre_hooks.values())


def global_module_hooks() -> list[dict[int, Any]]:
    """Return the dictionaries in which torch stores hooks that it calls for every module."""
    return [getattr(torch.nn.modules.module, f"_global{kind}") for kind in _HOOKS]


def handles_in(hooks: dict[int, Any]) -> tuple[int, ...]:
    """Return the handles of hooks, except those that only record which module runs."""
    return tuple([handle for handle, hook in hooks.items() if not _only_notes(hook)])


def _only_notes(hook: Any) -> bool:
    """Return whether a hook changes nothing, like that of torch's flop counter."""
    return isinstance(getattr(hook, "__self__", None), ModuleTracker)


# The attributes that decide how a module is called: its forward, if it is an attribute, and its
# hooks.
_CALL = (
    "forward",
    *_HOOKS,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    "_compiled_call_impl",
)


def call_uncompiled(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module with its hooks, bypassing the replacement call set by `intercept`."""
    return module._call_impl(*args, **kwargs)


def intercept(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Make calls of a module run `call` instead; None undoes it. Its copies are not affected."""
    module._compiled_call_impl = call


def intercepted(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that calls of a module run instead, if any."""
    return module._compiled_call_impl


def call_entries(module: nn.Module) -> Entries:
    """Return the attributes of a module itself that decide how it is called."""
    return {name: module.__dict__[name] for name in _CALL if name in module.__dict__}


def put_call_entries(module: nn.Module, entries: Entries) -> None:
    """Replace the attributes that decide how a module is called."""
    for name in _CALL:
        module.__dict__.pop(name, None)
    module.__dict__.update(entries)


def without_hooks(entries: Entries) -> Entries:
    """Return these attributes for a module without hooks and with its class's forward."""
    kept = {"_is_full_backward_hook": None}
    return kept | {n: OrderedDict() for n, held in entries.items() if isinstance(held, dict)}


@contextlib.contextmanager
def without_global_hooks(module: nn.Module) -> Iterator[None]:
    """Make hooks that torch calls for every module skip this one.

    Hooks that only record which module runs skip all modules, because the running code is not the
    user's.
    """
    held = [(hooks, dict(hooks)) for hooks in global_module_hooks()]
    for hooks, before in held:
        hooks.update({key: _passing_over(module, hook) for key, hook in before.items()})
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update({key: hook for key, hook in before.items() if key in hooks})


def _passing_over(module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    is_note = _only_notes(hook)

    @functools.wraps(hook)
    def passing_over(called: nn.Module, *args: Any) -> Any:
        return None if called is module or is_note else hook(called, *args)

    return passing_over
