"""Values that a trace knows: computed from constants alone, and only if forward asks for them.

A fake tensor has no values. But much of what a forward looks into depends on nothing that varies: a
causal mask, the drop rates of `torch.linspace`, a table that it made from a shape. `KnownValues`
notes how such a tensor was made, and computes it for real if its values decide how the trace goes
on (`.item()`, `if`, `nonzero`, a mask as an index).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from zerofx.compat.strides import TrueStrides

aten = torch.ops.aten
_NOTE = "_zerofx_origin"  # the attribute of a fake tensor that says how it was made
_READING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# These take a tensor for its form alone; what they fill the result with, from their arguments.
_FILLS: dict[Any, Callable[[Sequence[Any]], Any]] = {
    aten.zeros_like.default: lambda args: 0,
    aten.new_zeros.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.new_ones.default: lambda args: 1,
    aten.zero.default: lambda args: 0,
    aten.full_like.default: lambda args: args[1],
    aten.fill.Scalar: lambda args: args[1],
    aten.new_full.default: lambda args: args[2],
}
# What these return has no value yet: memory as it was, and the tensors that a trace begins with.
_UNSET = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default}
# Comparisons of a number in [0, 1) with a number: what they are at most bounds, (low, high).
_BELOW = {aten.lt: True, aten.le: True, aten.gt: False, aten.ge: False}


class _Unknown(Exception):
    """A value depends on what varies from call to call."""


@dataclass
class _Origin:
    """The call that made a fake tensor.

    func: None for a tensor that no call made, such as a buffer; `value` is the tensor itself.
    which: its place among several results, None for the only one.
    """

    func: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    which: int | None = None
    value: Tensor | None = None


class KnownValues(TrueStrides):
    """A fake mode that answers what a forward asks of constants.

    read: the tensors given to `hold` whose values the trace has used, by id.
    holds: whether these values are given.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: dict[int, Tensor] = {}
        self.holds = True
        self._written: set[StorageWeakRef] = set()

    def hold(self, fake: Tensor, real: Tensor) -> None:
        """Let a fake have the value of a real tensor until it is written to."""
        fake.__dict__[_NOTE] = _Origin(None, value=real)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Forget afterwards which tensors were written to."""
        before = set(self._written)
        try:
            yield
        finally:
            self._written = before

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of the value of a tensor that tracing made, None if it varies."""
        while isinstance(tensor, FunctionalTensor):
            torch._sync(tensor)
            tensor = torch._from_functional_tensor(tensor.elem)
        try:
            return self._value(tensor).clone()
        except _Unknown:
            return None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if any(tag in func.tags for tag in _READING):
            try:
                return self._answer(func, tuple(args), kwargs)
            except _Unknown:
                pass  # torch says what it thinks of it
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self._note(func, tuple(args), kwargs, made)
        return made

    # -- how values are made -----------------------------------------------------------------------

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> None:
        """Note how the results of a call were made, if all that it takes may be known."""
        given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        if func._schema.is_mutable:
            self._written.update(StorageWeakRef(t.untyped_storage()) for t in given)
            return
        if func in _FILLS and isinstance(made, FakeTensor):
            if not _has_symbols(made):
                form = {"dtype": made.dtype, "device": made.device}
                call = made.shape, made.stride(), _FILLS[func](args)
                made.__dict__[_NOTE] = _Origin(_filled, call, form)
            return
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if func in _UNSET or (is_random and func is not aten.rand.default):
            return
        if _has_symbols((args, kwargs)) or any(_is_foreign(t) for t in given):
            return
        results = made if isinstance(made, (tuple, list)) else [made]
        for which, each in enumerate(results):
            if isinstance(each, FakeTensor) and not any(each is t for t in given):
                place = None if each is made else which
                each.__dict__[_NOTE] = _Origin(func, args, kwargs, place)

    def _value(self, tensor: Tensor) -> Tensor:
        """Compute a tensor's value, after those of the tensors that it is made of.

        Raises:
            _Unknown: it varies from call to call.
        """
        pending = [tensor]
        while pending:
            origin = self._origin(pending[-1])
            leaves = pytree.tree_leaves((origin.args, origin.kwargs))
            fakes = [v for v in leaves if isinstance(v, FakeTensor)]
            missing = [v for v in fakes if self._origin(v).value is None]
            if origin.value is None and missing:
                pending += missing
                continue
            pending.pop()
            if origin.value is None:
                made = self._run(origin.func, origin.args, origin.kwargs)
                origin.value = made if origin.which is None else made[origin.which]
        return self._real(tensor)

    def _origin(self, tensor: Tensor) -> _Origin:
        if not isinstance(tensor, FakeTensor):
            return _Origin(None, value=tensor)
        origin = tensor.__dict__.get(_NOTE)
        is_written = StorageWeakRef(tensor.untyped_storage()) in self._written
        if origin is None or is_written or origin.func is aten.rand.default:
            raise _Unknown
        if origin.func is None and not self.holds:
            raise _Unknown
        return origin

    def _real(self, value: Any) -> Any:
        """Return what was computed of a fake, and any other value as it is."""
        if not isinstance(value, FakeTensor):
            return value
        origin = self._origin(value)
        if origin.func is None and origin.value is not None:
            self.read[id(origin.value)] = origin.value
        return origin.value

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = pytree.tree_map(self._real, (args, dict(kwargs)))
        with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad():
            return func(*args, **kwargs)

    # -- how they are asked for --------------------------------------------------------------------

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call that needs values.

        Raises:
            _Unknown: these vary from call to call.
        """
        if _has_symbols((args, kwargs)):
            raise _Unknown
        if func is aten._local_scalar_dense.default and (drawn := self._drawn(args[0])) is not None:
            return drawn
        given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, FakeTensor)]
        if func is aten.index.Tensor:
            return self._indexed(args[0], args[1])
        if func is aten.masked_select.default:
            given = [t for t in given if t is not args[0]]  # of which the form is enough
        for tensor in given:
            self._value(tensor)
        if func is aten.masked_select.default:
            mask = self._real(args[1]).expand(torch.broadcast_shapes(args[0].shape, args[1].shape))
            return self._fake(args[0].new_empty, int(mask.sum()))
        made = self._run(func, args, kwargs)
        if not isinstance(made, (Tensor, tuple, list)):
            return made
        fakes = [self._like(t) for t in ([made] if isinstance(made, Tensor) else made)]
        for which, fake in enumerate(fakes):
            place = None if isinstance(made, Tensor) else which
            fake.__dict__[_NOTE] = _Origin(func, args, kwargs, place)
        return fakes[0] if isinstance(made, Tensor) else type(made)(fakes)

    def _indexed(self, source: Tensor, indices: Sequence[Tensor | None]) -> Any:
        """Index by the places that masks name, if there are masks and they are known."""
        plain: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                plain.append(index)
                continue
            mask = self._value(index)
            with unset_fake_temporarily():
                places = mask.nonzero().unbind(1)
            plain += map(self._like, places)
        if len(plain) == len(indices) and all(a is b for a, b in zip(plain, indices, strict=True)):
            raise _Unknown
        with self:
            made = aten.index.Tensor(source, plain)
        self._note(aten.index.Tensor, (source, list(indices)), {}, made)
        return made

    def _drawn(self, tensor: Tensor) -> bool | None:
        """Decide a comparison of numbers in [0, 1) whose other side lies outside."""
        origin = tensor.__dict__.get(_NOTE) if isinstance(tensor, FakeTensor) else None
        packet = getattr(origin and origin.func, "overloadpacket", None)
        if origin is None or packet not in _BELOW:
            return None
        number, limit = origin.args[:2]
        drawn = number.__dict__.get(_NOTE) if isinstance(number, FakeTensor) else None
        if drawn is None or drawn.func is not aten.rand.default:
            return None
        if isinstance(limit, Tensor):
            limit = self._value(limit).item()
        if limit >= 1:
            return _BELOW[packet]
        is_below = limit < 0 or (limit == 0 and packet in (aten.lt, aten.ge))
        return not _BELOW[packet] if is_below else None

    def _like(self, real: Tensor) -> Tensor:
        form = {"dtype": real.dtype, "device": real.device}
        return self._fake(torch.empty_strided, real.shape, real.stride(), **form)

    def _fake(self, make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        with self:
            return make(*args, **kwargs)


def _is_foreign(tensor: Tensor) -> bool:
    """Tell whether a tensor has no value that could be computed here."""
    if isinstance(tensor, FakeTensor):
        return _NOTE not in tensor.__dict__
    return type(tensor) not in (Tensor, torch.nn.Parameter)


def _filled(shape: Any, stride: Any, value: Any, **form: Any) -> Tensor:
    return torch.empty_strided(shape, stride, **form).fill_(value)


def _has_symbols(values: Any) -> bool:
    """Tell whether sizes that vary are among the values, or in the forms of tensors among them."""
    for each in pytree.tree_leaves(values):
        numbers = (*each.shape, *each.stride()) if isinstance(each, Tensor) else (each,)
        if any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in numbers):
            return True
    return False
