"""Sharded tensor: a DTensor of the global shape that holds this rank's flat piece.

Torch functions on it go through `__torch_function__` to one table. An operation that is not in the
table raises. The local tensor's shape differs from the global one, so letting torch run the
operation would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from zerofx.compat.callers import is_called_by_distribution
from zerofx.compat.graphs import pytree
from zerofx.compat.tensors import (
    DisableTorchFunctionSubclass,
    allow_foreach,
    local_device,
    local_dtype,
    local_tensor,
    new_dtensor,
    set_local_tensor,
)
from zerofx.errors import ShardError
from zerofx.runtime.tensors.checkpoint import box_at, chunks, write_items
from zerofx.runtime.tensors.piece import Ledger, ParameterPiece
from zerofx.runtime.tensors.refuse import op_name, refusal

K = TypeVar("K")
Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

HANDLERS: dict[Any, Handler] = {}
VALUES: set[Handler] = set()
"""Handlers that compute from values; in a forward that runs eagerly, these are whole instead."""
READERS: list[Ledger] = []
"""Ledgers of models whose forward runs eagerly now, innermost last."""
_VALUE_GETTERS = frozenset({"T", "mT", "H", "mH", "real", "imag"})


def handles(*funcs: Any) -> Callable[[Handler], Handler]:
    """Register a function as the handler of the torch functions `funcs`."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(funcs, handler))
        return handler

    return register


def reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a torch function computes from the values of its tensors.

    Sizes, flags and writes to a parameter do not.
    """
    handler = HANDLERS.get(func)
    if handler is not None and handler not in VALUES:
        return False
    name = op_name(func)
    if name != getattr(func, "__name__", name):  # of a property
        return name in _VALUE_GETTERS
    is_write = name.endswith("_") and not name.endswith("__")
    return not (is_write and args and getattr(args[0], "_is_param", False))


def with_whole_parameters(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments with whole tensors for parameters that code running eagerly reads.

    Also returns whether there are any.
    """
    found = False

    def whole(leaf: Any) -> Any:
        nonlocal found
        if not getattr(leaf, "_is_param", False) or leaf.zfx.ledger.reader is None:
            return leaf
        read = leaf.zfx.ledger.reader(leaf.zfx.name)
        found |= read is not None
        return leaf if read is None else read

    args, kwargs = pytree.tree_map(whole, (args, kwargs))
    return args, kwargs, found


class ShardedTensor(DTensor):
    """A tensor cut like a sharded parameter: a gradient, an optimizer state, or a result of these.

    `shape`, `ndim` and `numel()` are global. `to_local()` is the flat piece (possibly empty).
    `full_tensor()` gathers the whole; all ranks must call it together.
    """

    zfx: ParameterPiece
    _is_param = False  # read by nn.Parameter's instance check
    _aliases = False  # whether the local tensor is part of the flat shard of parameters
    _grad: ShardedTensor | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if READERS and reads_values(func, args):
            args, kwargs, found = with_whole_parameters(args, kwargs)
            if found:
                return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is None:
            refuse(func, args, kwargs)
        if not args:
            args, kwargs = _first_by_position(kwargs)
        return handler(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        refuse(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        piece, kind = self.zfx, type(self).__name__
        return (
            f"{kind}({piece.name}, {list(self.shape)}, {self.dtype}, elements "
            f"{piece.says()} of {piece.shape.numel()})"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if self._is_param:
            raise ShardError(
                f"{self.zfx.name}: deepcopy of a sharded parameter is refused, since the copy "
                "would belong to no model. Copy the compiled module as a whole, or use "
                "zerofx.full_state_dict(model)."
            )
        memo[id(self)] = wrap(local_tensor(self).clone(), self.zfx)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardError(
            f"{self.zfx.name}: pickling a {type(self).__name__} would save only this rank's piece. "
            "Use zerofx.save(dir, model, optimizer), or torch.save of "
            "zerofx.full_state_dict(model) and zerofx.full_optimizer_state_dict(model, optimizer)."
        )

    # Read in every optimizer step, so it runs without a Python frame: a twentieth of the cost of
    # __torch_function__.
    shape: Any = property(attrgetter("zfx.shape"))
    dtype: Any = property(local_dtype)
    device: Any = property(local_device)
    is_sparse: Any = False

    def _set_grad(self, value: torch.Tensor | None) -> None:
        self._grad = None if value is None else checked_grad(self, value)
        if value is None and (drop := self.zfx.ledger.when_dropped.get(self.zfx.name)):
            drop()

    grad: Any = property(attrgetter("_grad"), _set_grad)

    @property
    def data(self) -> ShardedTensor:
        made = self._alias()
        if self._aliases:
            self.zfx.ledger.aliases.hand_out(self.zfx.name, made)
        return made

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        rebind(self, value)

    def _alias(self) -> Any:
        return wrap(local_tensor(self), self.zfx, aliases=self._aliases)

    @property
    def requires_grad(self) -> bool:
        with DisableTorchFunctionSubclass():
            return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor:
        with DisableTorchFunctionSubclass():
            super().requires_grad_(requires_grad)
        return self

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the flat piece itself.

        Writes to it are detected as far as torch counts them (a fused optimizer's are not). After
        the first `to_local()`, resident parameters are gathered again after every backward. After
        any other write, call `model.refresh()`.

        torch's `set_model_state_dict` and `set_optimizer_state_dict` with `broadcast_from_rank0`
        get a proxy object instead, since they write rows of the whole tensor into it.
        """
        if is_called_by_distribution():
            return cast(torch.Tensor, Landing(local_tensor(self), self.zfx))
        if self._aliases:
            self.zfx.ledger.handouts += 1
        return local_tensor(self)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole plain tensor; all ranks must call it together.

        It is not part of a program, so a gradient of it cannot reach the shards. A backward that
        computes one raises, because the gradient would be lost.
        """
        whole = self.zfx.whole(local_tensor(self))
        if not (torch.is_grad_enabled() and self.requires_grad):
            return whole
        anchor = torch.empty(0, requires_grad=True)
        return cast(torch.Tensor, _Whole.apply(anchor, whole, self.zfx.name))  # type: ignore[no-untyped-call]

    # The following methods bypass __torch_function__.

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **kwargs: Any
    ) -> DTensor:
        """Return the whole tensor on every rank, for placements that are `Replicate()`.

        All ranks must call it together. Other placements and meshes are refused.
        """
        is_whole = bool(placements) and all(isinstance(p, Replicate) for p in placements)
        if not is_whole or device_mesh not in (None, self.device_mesh):
            raise refusal("redistribute", self.zfx)
        whole = self.full_tensor()
        return DTensor.from_local(whole, self.device_mesh, placements, run_check=False)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        self._settle()
        return write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        self._settle()
        return chunks(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return box_at(self, index.offset)

    def _settle(self) -> None:
        """Wait for updates of parameters that are in progress on the host."""
        if self._aliases:
            # Not join(): async_save calls this from its own thread.
            self.zfx.ledger.pending.settle()

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refusal("set_", self.zfx)

    def as_subclass(self, cls: type) -> NoReturn:
        raise refusal("as_subclass", self.zfx)


allow_foreach(ShardedTensor)


def _first_by_position(kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a keyword-only call, with the first argument passed by position."""
    first = next(k for k in ("input", "tensor", "self", "x", "A", *kwargs) if k in kwargs)
    return (kwargs[first],), {k: v for k, v in kwargs.items() if k != first}


def wrap(
    local: torch.Tensor, piece: ParameterPiece, aliases: bool = False, cls: type = ShardedTensor
) -> Any:
    """Return a wrapper of `local`, which holds this rank's elements of the piece's parameter."""
    out: Any = new_dtensor(cls, local, piece.spec(local.dtype), requires_grad=False)
    out.zfx = piece
    if aliases:
        out._aliases = True
    return out


class CutPiece(ParameterPiece):
    """The piece of a sharded parameter: its tensors are wrappers of flat memory."""

    is_cut = True

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return local_tensor(tensor)

    def show(self, flat: torch.Tensor) -> torch.Tensor:
        return wrap(flat, self)

    def publish(self, param: Any, gradient: torch.Tensor) -> None:
        param._grad = gradient  # created by `show`: the check of p.grad = ... is not needed


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that this rank holds of any tensor; a plain one is returned itself.

    Inside autograd.grad, methods of sharded tensors do not reach their own handlers.
    """
    return local_tensor(tensor) if isinstance(tensor, ShardedTensor) else tensor


class Landing:
    """Proxy for a tensor's local part, into which torch writes rows of a full state dict."""

    def __init__(self, local: torch.Tensor, piece: ParameterPiece) -> None:
        self._local, self._piece = local, piece

    @torch.no_grad()
    def copy_(self, rows: torch.Tensor) -> None:
        """Keep this rank's elements of the rows given to all ranks; a collective call."""
        full = self._piece.whole_of_rows(rows)
        self._local.copy_(self._piece.cut(full.reshape(-1)))
        self._piece.ledger.note_write()


def local_value(target: ShardedTensor, value: torch.Tensor, doing: str) -> torch.Tensor:
    """Return the elements of `value` that belong to the piece of `target`.

    `value` is a tensor cut alike, a full plain tensor, or a DTensor (which all ranks then gather
    together).
    """
    piece = target.zfx
    if isinstance(value, ShardedTensor):
        if value.zfx.same_cut(piece):
            return local_tensor(value)
        raise ShardError(
            f"{piece.name}: {doing} mixes it with {value.zfx.name}, which is cut differently "
            f"({list(piece.shape)} elements {piece.says()} against {list(value.shape)} elements "
            f"{value.zfx.says()}). Use full_tensor() of both."
        )
    if isinstance(value, DTensor):
        value = whole_of(value, piece, doing)
    if value.ndim == 0:
        return value
    if value.numel() == 1 and value.ndim <= len(piece.shape):
        return value.reshape(1)
    try:
        full = value.expand(piece.shape)
    except RuntimeError:
        raise ShardError(
            f"{piece.name}: {doing} of a tensor of shape {list(value.shape)}, but the parameter "
            f"has global shape {list(piece.shape)}. Give the full tensor."
        ) from None
    return piece.cut(full.reshape(-1))


class _Whole(torch.autograd.Function):
    """A whole parameter that is read, not trained: a gradient with respect to it raises."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, whole: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise ShardError(
            f"{ctx.name} got a gradient through full_tensor(), which would be lost. Call the "
            "module that has the parameter. If a library replaces forward after zerofx.compile, "
            "compile the model later, as the trainers of zerofx.integrations do. To only read the "
            "parameter, use full_tensor().detach()."
        )


@torch.no_grad()
def whole_of(value: DTensor, piece: ParameterPiece, doing: str) -> torch.Tensor:
    """Return a DTensor of another cut (FSDP2, for example) whole; a collective call on its mesh."""
    if value.shape != piece.shape:
        raise ShardError(
            f"{piece.name}: {doing} of a DTensor of shape {list(value.shape)}, but the parameter "
            f"has global shape {list(piece.shape)}. Give one of the same shape."
        )
    piece.ledger.world.agree(f"{doing} of a DTensor", piece.name)
    mesh, local = value.device_mesh, value.to_local()
    local = local.to(mesh.device_type)
    # torch does not distinguish equal meshes. It may give this value the mesh of another model over
    # the same ranks, and a different one on each rank. So zerofx gathers values itself if torch
    # cuts them over our ranks.
    if mesh == piece.ledger.mesh and tuple(value.placements) == (Shard(0),):
        return piece.whole_of_rows(local)
    there = DTensor.from_local(
        local, mesh, value.placements, shape=value.shape, stride=value.stride()
    )
    return there.full_tensor()


def checked_grad(param: ShardedTensor, value: torch.Tensor) -> ShardedTensor:
    """Return `value` if it may become `param.grad`, with torch's checks for plain tensors."""
    name = param.zfx.name
    if not isinstance(value, ShardedTensor):
        raise ShardError(
            f"{name}: p.grad was given a plain {type(value).__name__} of shape "
            f"{list(value.shape)}, but gradients here are pieces ({param!r}). Write into the "
            "gradient in place, or give torch.zeros_like(p).copy_(full_gradient)."
        )
    if not value.zfx.same_cut(param.zfx) or value.dtype != param.dtype:
        raise ShardError(f"{name}: p.grad was given {value!r}, which is not cut like {param!r}.")
    return value


def rebind(target: ShardedTensor, value: torch.Tensor) -> None:
    """Perform `target.data = value`: the storage stays in the flat shard, so values are copied."""
    local = local_tensor(target)
    if value.dtype != local.dtype or value.device != local.device or value.shape != target.shape:
        raise ShardError(
            f"{target.zfx.name}: p.data was given {list(value.shape)} {value.dtype} on "
            f"{value.device}, but the shard is {list(target.shape)} {local.dtype} on "
            f"{local.device}. Convert the whole model (model.to(...)), or copy into p."
        )
    given = local_value(target, value, "p.data = ...")
    # P.data *= 2 assigns the tensor that it has changed.
    is_own = given.data_ptr() == local.data_ptr()
    if target._aliases:
        _leave_aliases(target, value, is_own)
    if not is_own:
        with torch.no_grad():
            local.copy_(given)
    if target._aliases:
        target.zfx.ledger.note_write()


def _leave_aliases(target: ShardedTensor, value: torch.Tensor, is_own: bool) -> None:
    """Let earlier results of `p.data` keep the values that `p.data = value` replaces."""
    aliases, name = target.zfx.ledger.aliases, target.zfx.name
    aliases.note_assignment(name, value)
    if is_own:
        return
    for alias in aliases.take_back(name):
        set_local_tensor(alias, local_tensor(alias).clone())
        alias._aliases = False


def first_of(kind: type[K], args: Any) -> K | None:
    """Return the first tensor of a kind in nested lists, tuples and dicts."""
    if isinstance(args, kind):
        return args
    if isinstance(args, dict):
        args = args.values()
    elif not isinstance(args, (list, tuple)):
        return None
    return next((t for t in (first_of(kind, a) for a in args) if t is not None), None)


def find_sharded(args: Any) -> ShardedTensor | None:
    """Return the first sharded tensor in nested lists, tuples and dicts."""
    return first_of(ShardedTensor, args)


def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "") -> NoReturn:
    """Raise for an operation that a piece does not support.

    Raises:
        ShardError: always; it names the operation, the parameter, its piece and the fix.
    """
    target = find_sharded(args)
    if target is None:
        target = find_sharded(kwargs)
    assert target is not None, f"{op_name(func)}: no sharded tensor among its arguments"
    raise refusal(op_name(func), target.zfx, why)
