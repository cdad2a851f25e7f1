"""What the user sees of a parameter: a sharded wrapper, or a plain tensor where nothing is cut."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from zerofx.compat.tensors import allow_foreach, make_subclass, raw_data, storage_identity
from zerofx.errors import ShardError
from zerofx.runtime import (
    param_elementwise,
    param_foreach,
    param_metadata,
    param_norms,
    param_random,
)
from zerofx.runtime.param_piece import Ledger, Piece
from zerofx.runtime.param_refuse import refuse_hook
from zerofx.runtime.param_tensor import ShardedParameter, ShardedTensor, wrap

__all__ = [
    "ReplicatedParameter",
    "ShardedParameter",
    "ShardedTensor",
    "replicated_parameter",
    "sharded_parameter",
]

# Imported for what they register: without them every operation is refused.
TABLES = (param_elementwise, param_foreach, param_metadata, param_norms, param_random)


class ReplicatedParameter(torch.nn.Parameter):
    """A parameter that every rank holds whole: a view of its flat bucket, with the global shape.

    It is a plain tensor to every operation and optimizer, so nothing stands between it and torch;
    only what would detach it from the flat bucket is caught.
    """

    _ledger: Ledger
    _zfx_name: str

    @property
    def data(self) -> torch.Tensor:
        self._ledger.handouts += 1
        return self._ledger.aliases.hand_out(self._zfx_name, raw_data.__get__(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise ShardError(
                f"{self._zfx_name}: p.data was given {list(value.shape)} {value.dtype} on "
                f"{value.device}, but the parameter is {list(self.shape)} {self.dtype} on "
                f"{self.device}; convert the whole model (model.to(...))"
            )
        aliases = self._ledger.aliases
        aliases.note_assignment(self._zfx_name, value)
        if (value.data_ptr(), value.stride()) == (self.data_ptr(), self.stride()):  # p.data *= 2
            self._ledger.note_write()
            return
        for alias in aliases.take_back(self._zfx_name):
            raw_data.__set__(alias, raw_data.__get__(alias).clone())
        shares = storage_identity(value) == storage_identity(self)  # p.data = p.data.t()
        with torch.no_grad():
            self.copy_(value.clone() if shares else value)

    def register_hook(self, hook: Any) -> NoReturn:
        refuse_hook(self._zfx_name, "register_hook")

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        refuse_hook(self._zfx_name, "register_post_accumulate_grad_hook")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._independent()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._independent().__reduce_ex__(protocol)

    def _independent(self) -> torch.nn.Parameter:
        """Return a plain parameter with the same values (a view would carry the whole bucket)."""
        return torch.nn.Parameter(self.detach().clone(), self.requires_grad)


allow_foreach(ReplicatedParameter)


def sharded_parameter(
    local: torch.Tensor,
    piece: Piece,
    requires_grad: bool,
    cls: type[ShardedParameter] = ShardedParameter,
) -> ShardedParameter:
    """Return the parameter whose piece is `local`, a view of the flat shard."""
    out = wrap(local, piece, cls=cls)
    return out.requires_grad_() if requires_grad else out


def replicated_parameter(
    view: torch.Tensor,
    piece: Piece,
    requires_grad: bool,
    cls: type[ReplicatedParameter] = ReplicatedParameter,
) -> ReplicatedParameter:
    """Return the parameter that is `view`, of the global shape, into its flat bucket."""
    out = make_subclass(cls, view, requires_grad)
    out._ledger, out._zfx_name = piece.ledger, piece.name
    return out
