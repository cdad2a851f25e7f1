"""The state_dict of a model that lives on NVMe: each parameter is gathered when it is read."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import ItemsView, Mapping, ValuesView
from typing import Any

from zerofx.compat.modules import note_state_metadata, state_metadata
from zerofx.errors import ShardError
from zerofx.runtime.store.shards import ShardStore
from zerofx.runtime.store.state import FullReader

_NONE = object()


class LazyState(OrderedDict[str, Any]):
    """Full plain tensors under the model's own names, each made when its key is read.

    Nothing is kept: every read makes a new tensor, so that a loop over `items()` holds one at a
    time. On several ranks a read is a collective call, which all ranks make in the same order; one
    that reads something else, or goes on alone, is named. Pickles (`torch.save`), copies, `dict()`
    and `load_state_dict` see an ordinary dict, all of whose values are then there at once.

    Values are those of the moment of `state_dict()`: once the parameters have changed, reads raise.
    """

    def __init__(self, state: Mapping[str, Any], names: Mapping[str, str], store: ShardStore):
        """Take over a state dict. names: its keys that stand for parameters -> which of them."""
        super().__init__((key, None if key in names else value) for key, value in state.items())
        self._store, self._names = store, dict(names)
        self._metadata = state_metadata(state)  # load_state_dict asks for it
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
                f"{key}: the parameters have changed since this state_dict() was made, which reads "
                "them from NVMe only now; make it anew, or keep all its values at once by "
                "dict(model.state_dict())"
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
        made: dict[str, Any] = {}  # by parameter: tied keys share theirs
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
        return f"LazyState({len(self)} entries, {len(self._names)} read when asked for)"
