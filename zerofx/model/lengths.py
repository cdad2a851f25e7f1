"""Dynamic sizes: which sizes of a model's calls vary, and which program serves such a call.

A dimension seen with a second value becomes a symbol in programs compiled from then on, and so does
an argument that is a number. Dimensions that were equal in all calls share one symbol. A size of 0
or 1 stays a constant, because torch handles these sizes specially.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from zerofx.capture.call import Call
from zerofx.capture.signature import Signature
from zerofx.ir.sizes import NUMBER, Dim, Sizes, Symbol
from zerofx.plan.fields import nearest

# The call, the handles of the hooks, and which of the rank's pipeline stages it is for, from 0.
Key = tuple[Signature, tuple[tuple[int, ...], ...], int]
# The number of a tensor among those of the arguments' leaves, and a dimension of it; or STRIDE and
# that, for the stride of a dimension of a tensor that is not contiguous; or that of an int or float
# among those, and NUMBER.
Place = tuple[int, int]
STRIDE = 1000
CALLS = 64  # calls per family that are inspected to tell which sizes vary
KNOWN = 4096  # calls whose program is remembered


@dataclass
class _Family:
    """Calls that differ only in sizes, and in strides of tensors that are not contiguous.

    seen: the sizes of calls, without duplicates.
    fixed: dimensions that cannot vary.
    served: the programs with dynamic sizes, by key, the latest last.
    """

    seen: list[dict[Place, Any]] = field(default_factory=list)
    fixed: set[Place] = field(default_factory=set)
    served: dict[Key, _Served] = field(default_factory=dict)

    def values(self, place: Place) -> tuple[Any, ...]:
        return tuple(call[place] for call in self.seen)

    def note(self, sizes: dict[Place, Any]) -> None:
        if sizes not in self.seen:
            self.seen.append(sizes)
            del self.seen[1:-CALLS]


@dataclass(frozen=True)
class _Served:
    """The sizes that a program serves: any size where `names` has a symbol, `others` elsewhere.

    conditions: restrict the sizes, in the form of `Sizes`.
    """

    sizes: Sizes
    names: dict[Place, str]
    others: dict[Place, Any]

    @classmethod
    def of(cls, sizes: Sizes, call: Call, values: Mapping[Place, Any]) -> _Served:
        names = {_place(d, call): s.name for s in sizes.symbols for d in s.dims}
        return cls(sizes, names, {p: n for p, n in values.items() if p not in names})

    def key(self, call: Key) -> Key:
        """Return the key of the program that serves a call, if its other sizes match."""
        suffix = "".join(f", {condition}" for condition in self.sizes.conditions)
        return _named(call, {place: f"{name}{suffix}" for place, name in self.names.items()})

    def serves(self, call: Mapping[Place, Any]) -> bool:
        if any(call[place] != size for place, size in self.others.items()):
            return False
        values = self.values(call)
        if any(call[place] != values[name] for place, name in self.names.items()):
            return False
        return self.sizes.allow(values)

    def values(self, call: Mapping[Place, Any]) -> dict[str, int]:
        """Return the value of each symbol in a call."""
        return {name: call[place] for place, name in self.names.items()}

    def covers(self, other: _Served) -> bool:
        """Return whether this serves every call that the other one serves."""
        is_free = all(self.others.get(place, n) == n for place, n in other.others.items())
        mine, theirs = set(self.sizes.conditions), set(other.sizes.conditions)
        return is_free and other.names.items() <= self.names.items() and mine <= theirs


class Lengths:
    """Finds the keys of programs that serve calls of several sizes.

    admits: returns whether the program of a key may run at given sizes.
    declared: the maximum sizes of dimensions that vary from the first call on (`ids.shape[1]`).
    """

    def __init__(
        self, admits: Callable[[Key, Mapping[str, int]], bool], declared: Mapping[str, int]
    ) -> None:
        self._admits, self._declared = admits, declared
        self._families: dict[Key, _Family] = {}
        self._known: dict[Key, Key] = {}  # a call's key -> the key of the program that serves it

    def learn(self, other: Lengths) -> None:
        """Copy the observed sizes and known programs of another model like this one."""
        for key, family in other._families.items():
            copied = _Family(list(family.seen), set(family.fixed), dict(family.served))
            self._families[key] = copied

    def key_of(self, key: Key) -> Key:
        """Return the key of the program that serves a call; the call's own key if there is none."""
        found = self._known.get(key)
        if found is not None:
            return found
        family, sizes = self._family(key)
        for general, served in reversed(family.served.items()):
            if served.serves(sizes) and self._admits(general, served.values(sizes)):
                if len(self._known) >= KNOWN:
                    self._known.clear()
                self._known[key] = general
                return general
        return key

    def undeclared(self, call: Call) -> dict[str, str]:
        """Return the declared dimensions that a call lacks, with a hint for each."""
        sizes = [(n, d) for n in call.tensors for d in range(call.leaves[n].dim())]
        has = [str(Dim(n, d, call.names[n])) for n, d in sizes]
        return {name: nearest(name, has) for name in self._declared if name not in has}

    def varying(self, key: Key, call: Call) -> tuple[Symbol, ...]:
        """Record a call that no program serves yet; return the sizes of it that vary."""
        family, sizes = self._family(key)
        family.note(sizes)
        # All values seen and the bound -> the places with them.
        groups: dict[tuple[Any, ...], list[Place]] = {}
        for place, size in sizes.items():
            bound = self._declared.get(str(_dim(place, call)), 0)
            values = *family.values(place), bound, type(size)
            is_free = isinstance(size, float) or size > 1
            is_varying = len({v for v in values[:-2] if v not in (0, 1)}) > 1 or bound
            if is_varying and is_free and place not in family.fixed:
                groups.setdefault(values, []).append(place)
        found = []
        for values, places in groups.items():
            number, dim = first = places[0]
            name = f"n{number}" if dim == NUMBER else f"s{number}_{dim}"
            hint = sizes[first] if dim == NUMBER else max(values[:-1])
            found.append(Symbol(name, hint, tuple(_dim(place, call) for place in places)))
        return tuple(found)

    def fix(self, key: Key, call: Call, symbols: Sequence[Symbol]) -> None:
        """Treat dimensions as constants from now on: a program cannot have symbols for them."""
        family, _ = self._family(key)
        family.fixed.update(_place(d, call) for s in symbols for d in s.dims)

    def serve(self, key: Key, call: Call, sizes: Sizes) -> Key:
        """Record the sizes served by a program that is compiled for this call; return its key."""
        family, values = self._family(key)
        served = _Served.of(sizes, call, values)
        general = served.key(key)
        family.served[general] = served
        return general

    def is_served_by(self, key: Key, general: Key) -> bool:
        """Return whether a program is no longer needed, because a later one serves its calls."""
        for family in self._families.values():
            later = family.served.get(general)
            if later is None:
                continue
            if key in family.served:
                return later.covers(family.served[key])
            own, sizes = self._family(key)
            return own is family and later.serves(sizes)
        return False

    def forget(self, key: Key) -> None:
        """Drop the program of this key."""
        for family in self._families.values():
            family.served.pop(key, None)
        self._known = {k: v for k, v in self._known.items() if v != key}

    def _family(self, key: Key) -> tuple[_Family, dict[Place, Any]]:
        sizes: dict[Place, Any] = {}

        def masked(number: int, tensor: tuple[Any, ...]) -> tuple[Any, ...]:
            sizes.update({(number, dim): size for dim, size in enumerate(tensor[1])})
            kind = "contiguous" if _is_contiguous(tensor[1], tensor[3]) else "strided"
            if kind == "strided":
                strides = enumerate(tensor[3])
                sizes.update({(number, STRIDE + dim): stride for dim, stride in strides})
            return _TENSOR, len(tensor[1]), tensor[2], kind, *tensor[4:]

        def without(number: int, value: tuple[Any, ...]) -> tuple[Any, ...]:
            sizes[number, NUMBER] = value[1]
            return (value[0],)

        general = _mapped(key, masked, without)
        return self._families.setdefault(general, _Family()), sizes


def _named(key: Key, names: Mapping[Place, str]) -> Key:
    """Return a key with the sizes that vary replaced by their names."""

    def named(number: int, tensor: tuple[Any, ...]) -> tuple[Any, ...]:
        shape = tuple(names.get((number, dim), size) for dim, size in enumerate(tensor[1]))
        strides: Any = tuple(names.get((number, STRIDE + d), n) for d, n in enumerate(tensor[3]))
        if not any(isinstance(size, str) for size in (*shape, *strides)):
            return tensor
        if _is_contiguous(tensor[1], tensor[3]):
            strides = "contiguous"
        return _TENSOR, shape, tensor[2], strides, *tensor[4:]

    def of_number(number: int, value: tuple[Any, ...]) -> tuple[Any, ...]:
        return value[0], names.get((number, NUMBER), value[1])

    return _mapped(key, named, of_number)


_TENSOR = "tensor"
Change = Callable[[int, tuple[Any, ...]], tuple[Any, ...]]


def _mapped(key: Key, of_tensor: Change, of_number: Change) -> Key:
    """Return a key with its tensors and numbers transformed, each numbered in order."""
    tensors, numbers = count(), count()

    def walk(part: Any) -> Any:
        if not isinstance(part, tuple):
            return part
        if len(part) == 6 and part[0] == _TENSOR and isinstance(part[1], torch.Size):
            return of_tensor(next(tensors), part)
        if part and part[0] is functools.partial:
            return part
        if len(part) == 2 and part[0] in (int, float):
            number = next(numbers)  # a NaN appears as text in its key
            return of_number(number, part) if type(part[1]) is part[0] else part
        return tuple([walk(p) for p in part])

    signature = key[0]
    args, kwargs = walk(signature.args), walk(signature.kwargs)
    return signature._replace(args=args, kwargs=kwargs), *key[1:]


def _place(dim: Dim, call: Call) -> Place:
    if dim.dim == NUMBER:
        return call.numbers.index(dim.leaf), NUMBER
    return call.tensors.index(dim.leaf), dim.dim + STRIDE * dim.is_stride


def _dim(place: Place, call: Call) -> Dim:
    number, dim = place
    if dim == NUMBER:
        leaf = call.numbers[number]
        return Dim(leaf, NUMBER, call.names[leaf])
    leaf = call.tensors[number]
    return Dim(leaf, dim % STRIDE, call.names[leaf], dim >= STRIDE)


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True
