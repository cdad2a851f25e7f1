"""What `p.data` handed out: it keeps its values when `p.data` is replaced, as in eager PyTorch.

There the tensor that was assigned becomes the parameter's memory, and the earlier `p.data` keeps
the old memory. Loops that average weights rely on that (`backup = p.data; p.data = average; ...;
p.data = backup`). Here a parameter stays in its flat shard, so that the values are copied in and
what was handed out before moves to memory of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

# id of an alias -> the alias, what shares it out, the parameter's name
_handed_out: dict[int, tuple[weakref.ref[Tensor], Aliases, str]] = {}


class Aliases:
    """The living aliases of one model's parameters, by parameter.

    tied: parameters that were given the `p.data` of another one which still has it: in eager
        PyTorch they would share memory from then on. By name, (the other's owner, its name).
    """

    def __init__(self) -> None:
        self._ids: dict[str, set[int]] = {}
        self.tied: dict[str, tuple[Aliases, str]] = {}
        self._borrowers: dict[str, list[tuple[Aliases, str]]] = {}

    def hand_out(self, name: str, alias: Any) -> Any:
        """Return `alias` of a parameter's memory, and know it as long as it lives."""
        number, ids = id(alias), self._ids.setdefault(name, set())

        def forget(_: Any) -> None:
            _handed_out.pop(number, None)
            ids.discard(number)

        _handed_out[number] = weakref.ref(alias, forget), self, name
        ids.add(number)
        return alias

    def take_back(self, name: str) -> Iterator[Any]:
        """Yield the living aliases of a parameter, which are no longer its aliases after that."""
        for number in list(self._ids.get(name, ())):
            alias = _handed_out.pop(number)[0]()
            if alias is not None:
                yield alias
        self._ids.pop(name, None)

    def note_assignment(self, name: str, value: Any) -> None:
        """Note whether `p.data = value` ties two parameters; end the ties that it undoes."""
        self.tied.pop(name, None)
        for borrower, other in self._borrowers.pop(name, ()):
            if borrower.tied.get(other) == (self, name):
                del borrower.tied[other]
        found = _handed_out.get(id(value))
        if found is not None and found[1:] != (self, name):
            _, owner, other = found
            self.tied[name] = owner, other
            owner._borrowers.setdefault(other, []).append((self, name))
