"""Parameters that are updated inside backward: between that and `step()` they show no gradient."""

from __future__ import annotations

from typing import Any

import torch

from zerofx.compat.tensors import allow_foreach, raw_grad
from zerofx.runtime.param_tensor import ShardedParameter, ShardedTensor
from zerofx.runtime.sharded_parameter import ReplicatedParameter


class UpdatedShardedParameter(ShardedParameter):
    """A sharded parameter whose gradient is used and freed inside backward."""

    def _get_grad(self) -> ShardedTensor | None:
        updates = self._piece.ledger.updates
        assert updates is not None
        updates.check_read(self._piece.name)
        return self._grad

    grad: Any = property(_get_grad, ShardedTensor._set_grad)


class UpdatedParameter(ReplicatedParameter):
    """A replicated parameter whose gradient is used and freed inside backward."""

    def _get_grad(self) -> torch.Tensor | None:
        updates = self._ledger.updates
        assert updates is not None
        updates.check_read(self._zfx_name)
        return raw_grad.__get__(self)

    def _set_grad(self, value: torch.Tensor | None) -> None:
        raw_grad.__set__(self, value)

    grad: Any = property(_get_grad, _set_grad)


allow_foreach(UpdatedParameter)
