"""A compiled model's state under the names that the model gives it, whole or in pieces."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zerofx.errors import ShardError
from zerofx.model.lazy_state import LazyState
from zerofx.runtime.store.shards import ShardStore
from zerofx.runtime.store.state import FullReader, flat_state, full_state, sharded_state

if TYPE_CHECKING:
    from zerofx.model.module import CompiledModule


def state_of(model: CompiledModule, *args: Any, **kwargs: Any) -> Any:
    """Return the model's own state dict with full tensors on the host; see `LazyState` for NVMe."""
    if kwargs.pop("keep_vars", False):
        raise ShardError("state_dict(keep_vars=True): full tensors are copies; leave it out")
    store = model._engine.store
    state = model._model.state_dict(*args, keep_vars=True, **kwargs)
    is_part = bool(args) or kwargs.get("destination") is not None  # of an outer module's state
    if store.homes.nvme is None or is_part:
        return filled(store, state, full_state)
    names = _names(store, state)
    return LazyState(_on_host(state, names), names, store)


def filled(store: ShardStore, state: Any, values: Callable[[ShardStore], dict[str, Any]]) -> Any:
    """Put `values` (by canonical name) in place of the parameters in a state dict."""
    found, names = values(store), _names(store, state)
    _on_host(state, names)
    for key, name in names.items():
        state[key] = found[name]
    return state


def sharded_state_of(model: CompiledModule, flat: bool = False) -> dict[str, Any]:
    """Return the state in this rank's shards; buffers where they are, so that a load fills them."""
    store = model._engine.store
    store.check_bindings()
    shards: dict[str, Any] = dict(flat_state(store) if flat else sharded_state(store))
    state = model._model.state_dict(keep_vars=True)
    names = _names(store, state)
    return {
        key: shards[names[key]] if key in names else _detached(value)
        for key, value in state.items()
    }


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _names(store: ShardStore, state: Any) -> dict[str, str]:
    """Return the keys that stand for parameters, each with the parameter's canonical name."""
    known = {id(p): name for name, p in store.params.items()}
    return {key: known[id(value)] for key, value in state.items() if id(value) in known}


def _on_host(state: Any, names: dict[str, str]) -> Any:
    """Put plain tensors on the host in place of all others: copies, as parameters are."""
    for key, value in state.items():
        if key not in names and isinstance(value, Tensor):
            state[key] = value.detach().to("cpu", copy=True)
    return state


def full_state_dict(model: CompiledModule, rank0_only: bool = True) -> OrderedDict[str, Any]:
    """Return the model's full state on rank 0 (empty elsewhere), or on every rank.

    A collective call: every rank must make it. Rank 0 holds all of it at once, on several ranks
    also where it lives on NVMe; `iter_state_dict` gives one value at a time.
    """
    store = model._engine.store
    if not rank0_only or store.world.size == 1:
        found: OrderedDict[str, Any] = state_of(model)
        return found
    if store.world.rank != 0:
        full_state(store, rank0_only=True)
        return OrderedDict()
    state = model._model.state_dict(keep_vars=True)
    found = filled(store, state, lambda store: full_state(store, rank0_only=True))
    return found


def iter_state_dict(model: CompiledModule, rank0_only: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the items of `state_dict()` one by one, so that the model is never whole on a host.

    A collective call that lasts to the end of the loop: every rank must take all items. Parameters
    come in the order of their buckets, each gathered once, then what else the state dict has. With
    `rank0_only` the other ranks take part and are given nothing.

    Raises:
        DesyncError: a rank did something else before it had taken all; names it and the bucket.
    """
    store = model._engine.store
    is_for_us = not rank0_only or store.world.rank == 0
    state = model._model.state_dict(keep_vars=True)
    names = _names(store, state)
    keys: dict[str, list[str]] = {}
    for key, name in names.items():
        keys.setdefault(name, []).append(key)
    reader = FullReader(store)
    for name in store.layout.owned:
        value = reader.read(name)
        for key in keys.get(name, ()) if is_for_us else ():
            yield key, value
        del value  # before the next is made
    for key, value in _on_host(state, names).items() if is_for_us else ():
        if key not in names:
            yield key, value
