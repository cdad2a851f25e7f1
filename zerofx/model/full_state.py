"""State of a compiled model under the model's own names, whole or in pieces."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zerofx.compat.modules import note_state_metadata, state_metadata
from zerofx.errors import ShardError
from zerofx.runtime.store.shards import ShardStore
from zerofx.runtime.store.state import FullReader, flat_state, full_state, sharded_state

if TYPE_CHECKING:
    from zerofx.model.module import CompiledModule


# -- The state_dict of a model on NVMe: each parameter is gathered when it is read -----------------


_NONE = object()


class LazyState(OrderedDict[str, Any]):
    """Full plain tensors under the model's own names, each created when its key is read.

    Nothing is kept: every read creates a new tensor, so that a loop over `items()` holds one at a
    time. On several ranks, a read is a collective call, which all ranks must make in the same
    order. If a rank reads something else, or reads alone, the error names it. Pickles
    (`torch.save`), copies, `dict()` and `load_state_dict` see an ordinary dict, which holds all of
    its values at once.

    The values are those at the time of `state_dict()`. Once the parameters have changed, reads
    raise.
    """

    def __init__(self, state: Mapping[str, Any], names: Mapping[str, str], store: ShardStore):
        """Take over a state dict. names: its keys for parameters -> the parameter's name."""
        super().__init__((key, None if key in names else value) for key, value in state.items())
        self._store, self._names = store, dict(names)
        self._metadata = state_metadata(state)  # read by load_state_dict
        self._reader = FullReader(store)
        self._epoch = self._now()

    def _now(self) -> int:
        self._store.settle()
        self._store.poll_writes()
        return self._store.epoch

    def __getitem__(self, key: str) -> Any:
        if key not in self._names:
            return super().__getitem__(key)
        if self._now() != self._epoch:
            raise ShardError(
                f"{key}: the parameters have changed since this state_dict() was created, which "
                "reads them from NVMe only now. Create it again, or copy all its values at once "
                "with dict(model.state_dict())."
            )
        return self._reader.read(self._names[key])

    def __setitem__(self, key: str, value: Any) -> None:
        self.__dict__.get("_names", {}).pop(key, None)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._names.pop(key, None)

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def pop(self, key: str, default: Any = _NONE) -> Any:  # type: ignore[override]
        if key not in self and default is not _NONE:
            return default
        value = self[key]
        del self[key]
        return value

    def popitem(self, last: bool = True) -> tuple[str, Any]:
        key = next(reversed(self) if last else iter(self))
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return ValuesView(self)

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> OrderedDict[str, Any]:  # type: ignore[override]
        """Return all values at once, in an ordinary dict."""
        found: OrderedDict[str, Any] = OrderedDict()
        made: dict[str, Any] = {}  # by parameter: tied keys share one tensor
        for key in self:
            name = self._names.get(key)
            found[key] = made[name] if name in made else self[key]
            if name is not None:
                made[name] = found[key]
        if self._metadata is not None:
            note_state_metadata(found, self._metadata)
        return found

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[str, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.copy().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"LazyState({len(self)} entries, {len(self._names)} read on access)"


# -- The state of a compiled model under the model's own names, whole or in pieces -----------------


def state_of(model: CompiledModule, *args: Any, **kwargs: Any) -> Any:
    """Return the model's state dict with full tensors on the host; see `LazyState` for NVMe."""
    if kwargs.pop("keep_vars", False):
        raise ShardError("state_dict(keep_vars=True): full tensors are copies. Leave it out.")
    store = model._zerofx.engine.store
    state = plain_state(model, *args, **kwargs)
    is_part = bool(args) or kwargs.get("destination") is not None  # of an outer module's state
    if store.homes.nvme is None or is_part:
        return filled(store, state, full_state)
    names = _names(store, state)
    return LazyState(_on_host(state, names), names, store)


def plain_state(model: CompiledModule, *args: Any, **kwargs: Any) -> Any:
    """Return the state dict of the user's class, with the sharded parameters in it."""
    kind: Any = model._zerofx.original.kind
    return kind.state_dict(model, *args, keep_vars=True, **kwargs)


def filled(store: ShardStore, state: Any, values: Callable[[ShardStore], dict[str, Any]]) -> Any:
    """Replace the parameters in a state dict by `values` (by canonical name)."""
    found, names = values(store), _names(store, state)
    _on_host(state, names)
    for key, name in names.items():
        state[key] = found[name]
    return state


def sharded_state_of(model: CompiledModule, flat: bool = False) -> dict[str, Any]:
    """Return the state as this rank's shards; buffers are not copied, so that a load fills them."""
    store = model._zerofx.engine.store
    store.check_bindings()
    shards: dict[str, Any] = dict(flat_state(store) if flat else sharded_state(store))
    state = plain_state(model)
    names = _names(store, state)
    return {
        key: shards[names[key]] if key in names else _detached(value)
        for key, value in state.items()
    }


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _names(store: ShardStore, state: Any) -> dict[str, str]:
    """Return the keys of parameters, each with the parameter's canonical name."""
    known = {id(p): name for name, p in store.params.items()}
    return {key: known[id(value)] for key, value in state.items() if id(value) in known}


def _on_host(state: Any, names: dict[str, str]) -> Any:
    """Replace all other tensors by plain tensors on the host: copies, as for parameters."""
    for key, value in state.items():
        if key not in names and isinstance(value, Tensor):
            state[key] = value.detach().to("cpu", copy=True)
    return state


def full_state_dict(model: CompiledModule, rank0_only: bool = True) -> OrderedDict[str, Any]:
    """Return the model's full state on rank 0 (empty elsewhere), or on every rank.

    This is a collective call: every rank must make it. Rank 0 holds the whole state at once, even
    if the model lives on NVMe and there are several ranks. `iter_state_dict` yields one value at a
    time.

    Returns:
        Plain tensors of whole shapes on the host, under the model's own names.

    Raises:
        DesyncError: a rank did not make this call; names it.

    Example:
        state = zerofx.full_state_dict(model)  # on all ranks
        if rank == 0:
            torch.save(state, "model.pt")
    """
    store = model._zerofx.engine.store
    if not rank0_only or store.world.size == 1:
        found: OrderedDict[str, Any] = state_of(model)
        return found
    if store.world.rank != 0:
        full_state(store, rank0_only=True)
        return OrderedDict()
    state = plain_state(model)
    found = filled(store, state, lambda store: full_state(store, rank0_only=True))
    return found


def iter_state_dict(model: CompiledModule, rank0_only: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the items of `state_dict()` one by one, so that the model is never whole on a host.

    This is a collective call that lasts until the end of the loop: every rank must take all items.
    Parameters come first, in the order of their buckets, each bucket gathered once, followed by all
    other entries of the state dict. With `rank0_only`, the other ranks take part but get no items.

    Raises:
        DesyncError: a rank did something else before it had taken all items; names it and the
            bucket.

    Example:
        for name, value in zerofx.iter_state_dict(model):  # on all ranks
            print(name, value.norm().item())
    """
    store = model._zerofx.engine.store
    is_for_us = not rank0_only or store.world.rank == 0
    state = plain_state(model)
    names = _names(store, state)
    keys: dict[str, list[str]] = {}
    for key, name in names.items():
        keys.setdefault(name, []).append(key)
    reader = FullReader(store)
    for name in store.layout.owned:
        value = reader.read(name)
        for key in keys.get(name, ()) if is_for_us else ():
            yield key, value
        del value  # before the next one is created
    for key, value in _on_host(state, names).items() if is_for_us else ():
        if key not in names:
            yield key, value
