"""What the user sees of a parameter: a sharded wrapper, or a plain tensor where nothing is cut.

Where a plan has the updates inside backward, a parameter shows no gradient between that and
`step()`: its gradient is used and freed there.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from zerofx.compat.tensors import (
    allow_foreach,
    make_subclass,
    raw_data,
    raw_grad,
    storage_identity,
)
from zerofx.errors import ShardError
from zerofx.runtime.tensors import elementwise as param_elementwise
from zerofx.runtime.tensors import metadata as param_metadata
from zerofx.runtime.tensors import norms as param_norms
from zerofx.runtime.tensors.piece import Ledger, ParameterPiece, WholePiece
from zerofx.runtime.tensors.refuse import refuse_hook
from zerofx.runtime.tensors.tensor import CutPiece, ShardedTensor, wrap

# Imported for what they register: without them every operation is refused.
TABLES = (param_elementwise, param_metadata, param_norms)


class ModelParameter:
    """What all parameters of compiled models have: a piece, and a gradient that programs assign.

    `_is_param` is what nn.Parameter's instance check reads; `_aliases` says that the local tensor
    lies in the flat shard of parameters.
    """

    zfx: ParameterPiece
    _is_param = True
    _aliases = True

    def register_hook(self, hook: Any) -> NoReturn:
        refuse_hook(self.zfx.name, "register_hook")

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        refuse_hook(self.zfx.name, "register_post_accumulate_grad_hook")

    def _check_grad_read(self) -> None:
        """Raise if backward has used and freed the gradient, and `step()` has not come yet."""
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

    It is a plain tensor to every operation and optimizer, with nothing between it and torch;
    only what would detach it from the flat bucket is caught. Its two kinds are below.
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
                f"{name}: p.data was given {list(value.shape)} {value.dtype} on "
                f"{value.device}, but the parameter is {list(self.shape)} {self.dtype} on "
                f"{self.device}; convert the whole model (model.to(...))"
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


for _kind in (ShardedParameter, ReplicatedParameter, UpdatedParameter):
    allow_foreach(_kind)


def make_piece(ledger: Ledger, name: str) -> ParameterPiece:
    """Return the piece of a parameter that the ledger's rank owns."""
    kind = CutPiece if ledger.layout.shard_size > 1 else WholePiece
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
