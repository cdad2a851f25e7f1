"""Parameters as users see them: a sharded wrapper, or a plain tensor if nothing is cut.

If a plan updates parameters inside backward, they show no gradient between backward and `step()`:
the gradient is used and freed inside backward.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from zerofx.compat.callers import is_called_by_stager
from zerofx.compat.tensors import (
    DisableTorchFunctionSubclass,
    allow_foreach,
    local_dtype,
    local_tensor,
    make_subclass,
    raw_data,
    raw_grad,
    raw_version,
    storage_identity,
    version_of,
)
from zerofx.errors import GradientError, ShardError
from zerofx.runtime.tensors import elementwise, norms
from zerofx.runtime.tensors.elementwise import with_refusing_backward
from zerofx.runtime.tensors.piece import Ledger, ParameterPiece, WholePiece
from zerofx.runtime.tensors.refuse import refuse_hook
from zerofx.runtime.tensors.tensor import (
    HANDLERS,
    READERS,
    VALUES,
    CutPiece,
    ShardedTensor,
    handles,
    reads_values,
    refuse,
    with_whole_parameters,
    wrap,
)

# -- Functions of a sharded tensor that read no element: sizes, flags, aliases of itself ---- ------


METHODS = """
size dim ndimension numel nelement stride is_contiguous element_size is_floating_point
is_same_size get_device is_inference is_signed is_conj is_neg type __len__ __dir__ retain_grad
""".split()
PROPERTIES = """
ndim layout is_leaf grad_fn is_cpu is_cuda is_meta is_xpu is_mps is_nested is_quantized is_mkldnn
is_sparse_csr is_dtensor itemsize nbytes retains_grad output_nr name volatile names
""".split()


def from_wrapper(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer from the wrapper, which carries the global sizes."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _getter(name: str) -> Callable[..., Any] | None:
    found = getattr(torch.Tensor, name, None)
    return getattr(found, "__get__", None)


for _name in METHODS:
    for _home in (torch, torch.Tensor):
        if hasattr(_home, _name):
            HANDLERS[getattr(_home, _name)] = from_wrapper
for _name in PROPERTIES:
    _get = _getter(_name)
    if _get is not None:
        HANDLERS[_get] = from_wrapper


@handles(torch.is_complex, torch.Tensor.is_complex)
def is_complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return a constant answer: optimizers ask for it on every parameter in every step."""
    return local_dtype(args[0]).is_complex


@handles(torch.Tensor.detach, torch.detach)
def detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Return another wrapper of the same piece; writes through it are visible in both."""
    return args[0]._alias()


@handles(torch.Tensor.detach_)
def detach_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Return the tensor unchanged, since it has no history."""
    return args[0]


@handles(torch.Tensor.new_empty)
def new_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Create a plain tensor of the given size; for `async_save`, one that is cut like the first.

    `async_save` fills the attributes of the result, the local tensor among them, with copies of the
    first tensor's attributes (as it does with every DTensor, whose `data_ptr()` is 0).
    """
    source = args[0]
    if is_called_by_stager():
        return wrap(local_tensor(source).new_empty(0, **kwargs), source.zfx)
    return func(local_tensor(source), *args[1:], **kwargs)


@handles(torch.Tensor.data_ptr)
def data_ptr(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Refuse the call, since the address of a piece is not that of the tensor; see `new_empty`."""
    if is_called_by_stager():
        return 0
    refuse(func, args, kwargs)


@handles(torch.Tensor.new_zeros, torch.Tensor.new_ones)
@handles(torch.Tensor.new_full, torch.Tensor.new_tensor)
def new_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Create a plain tensor of the given size, with this dtype and device."""
    return func(local_tensor(args[0]), *args[1:], **kwargs)


@handles(torch.Tensor.view_as, torch.Tensor.reshape_as, torch.Tensor.expand_as)
def shaped_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """View a plain tensor in the global shape of a sharded one.

    A sharded tensor viewed in its own shape returns another wrapper that appears in the tensor's
    autograd history. The schedules of torch.distributed.pipelining that split backward find
    parameters that way.
    """
    plain, other = args
    if plain is other:
        return with_refusing_backward(func, plain, plain.detach())
    if isinstance(plain, ShardedTensor):
        refuse(func, args, kwargs)
    return getattr(plain, func.__name__[: -len("_as")])(other.shape)


@handles(raw_version.__get__)
def version(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the version of the piece, to which writes go."""
    return version_of(local_tensor(args[0]))


VALUES.add(detach)


# -- The parameter classes: a sharded wrapper, or a plain tensor if nothing is cut -------------- --


# Imported for their registrations: without them every operation is refused.
TABLES = (elementwise, norms)


class ModelParameter:
    """Common base of the parameters of compiled models: a piece, and a gradient set by programs.

    `_is_param` is read by nn.Parameter's instance check. `_aliases` means that the local tensor is
    part of the flat shard of parameters.
    """

    zfx: ParameterPiece
    _is_param = True
    _aliases = True

    def register_hook(self, hook: Any) -> NoReturn:
        refuse_hook(self.zfx.name, "register_hook")

    def register_post_accumulate_grad_hook(self, hook: Any) -> RemovableHandle:
        """Register a hook to call with the parameter after a backward has set its gradient.

        By then `p.grad` is reduced, and holds the part that this rank owns. All hooks run at the
        end of the backward, in the order of the parameters, which is the same on every rank. Sums
        that wait for their reduction (`no_sync`) trigger no hook.
        """
        ledger = self.zfx.ledger
        if ledger.updates is not None:
            raise GradientError(
                f"{self.zfx.name}: register_post_accumulate_grad_hook finds no gradient under "
                "Plan(update='in-backward'), which uses and frees it inside backward. Use "
                "Plan(update='step')."
            )
        if not self.requires_grad:  # type: ignore[attr-defined]
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient.")
        hooks = ledger.hooks.setdefault(self.zfx.name, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def _check_grad_read(self) -> None:
        """Raise if backward has used and freed the gradient, and `step()` was not called yet."""
        updates = self.zfx.ledger.updates
        assert updates is not None
        updates.check_read(self.zfx.name)


class ShardedParameter(ModelParameter, ShardedTensor):
    """A parameter of which each rank holds a piece; `isinstance(p, nn.Parameter)` holds."""


class UpdatedShardedParameter(ModelParameter, ShardedTensor):
    """A sharded parameter whose gradient is used and freed inside backward."""

    def _get_grad(self) -> ShardedTensor | None:
        self._check_grad_read()
        return self._grad

    grad: Any = property(_get_grad, ShardedTensor._set_grad)


class PlainParameter(ModelParameter, torch.nn.Parameter):
    """A parameter that every rank holds whole: a view of its flat bucket, with the global shape.

    Every operation and optimizer treats it as a plain tensor, without overhead. zerofx only
    intercepts operations that would detach it from the flat bucket. Its two subclasses are below.
    """

    @property
    def data(self) -> torch.Tensor:
        ledger = self.zfx.ledger
        ledger.handouts += 1
        return ledger.aliases.hand_out(self.zfx.name, raw_data.__get__(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        ledger, name = self.zfx.ledger, self.zfx.name
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise ShardError(
                f"{name}: p.data was given {list(value.shape)} {value.dtype} on {value.device}, "
                f"but the parameter is {list(self.shape)} {self.dtype} on {self.device}. Convert "
                "the whole model (model.to(...))."
            )
        ledger.aliases.note_assignment(name, value)
        if (value.data_ptr(), value.stride()) == (self.data_ptr(), self.stride()):  # p.data *= 2
            ledger.note_write()
            return
        for alias in ledger.aliases.take_back(name):
            raw_data.__set__(alias, raw_data.__get__(alias).clone())
        shares = storage_identity(value) == storage_identity(self)  # p.data = p.data.t()
        with torch.no_grad():
            self.copy_(value.clone() if shares else value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._independent()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._independent().__reduce_ex__(protocol)

    def _independent(self) -> torch.nn.Parameter:
        """Return a plain parameter with the same values (a view would carry the whole bucket)."""
        return torch.nn.Parameter(self.detach().clone(), self.requires_grad)


class ReplicatedParameter(PlainParameter):
    """A parameter that every rank holds whole, with a gradient that optimizers read."""


class UpdatedParameter(PlainParameter):
    """A parameter that every rank holds whole, whose gradient is used and freed inside backward."""

    def _get_grad(self) -> torch.Tensor | None:
        self._check_grad_read()
        return raw_grad.__get__(self)

    def _set_grad(self, value: torch.Tensor | None) -> None:
        raw_grad.__set__(self, value)

    grad: Any = property(_get_grad, _set_grad)


def _read_whole(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Run a function on plain parameters as code that runs eagerly sees them; see `read_by`."""
    kwargs = kwargs or {}
    if reads_values(func, args):
        args, kwargs, _ = with_whole_parameters(args, kwargs)
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@contextlib.contextmanager
def read_by(ledger: Ledger, read: Callable[[str], torch.Tensor | None]) -> Iterator[None]:
    """Inside the block, let functions of a model's parameters compute with whole tensors.

    read: returns a parameter, by name, as a tensor that gives it a gradient; None leaves it as it
        is.
    """
    before, ledger.reader = ledger.reader, read
    READERS.append(ledger)
    PlainParameter.__torch_function__ = classmethod(_read_whole)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        READERS.pop()
        ledger.reader = before
        if not READERS:  # torch then runs functions of plain parameters without a call of Python
            del PlainParameter.__torch_function__


for _kind in (ShardedParameter, ReplicatedParameter, UpdatedParameter):
    allow_foreach(_kind)


def make_piece(ledger: Ledger, name: str) -> ParameterPiece:
    """Return the piece of a parameter that the ledger's rank owns."""
    kind = CutPiece if ledger.layout.is_cut else WholePiece
    return kind.of(ledger, name)


def make_parameter(flat: torch.Tensor, piece: ParameterPiece, requires_grad: bool) -> Any:
    """Return the parameter whose elements on this rank are `flat`, a range of the flat shard."""
    in_backward = piece.ledger.updates is not None
    if piece.is_cut:
        out = wrap(flat, piece, cls=UpdatedShardedParameter if in_backward else ShardedParameter)
        return out.requires_grad_() if requires_grad else out
    kind = UpdatedParameter if in_backward else ReplicatedParameter
    out = make_subclass(kind, piece.show(flat), requires_grad)
    out.zfx = piece
    return out
