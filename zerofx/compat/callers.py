"""Which part of torch.distributed is calling: it asks for the same attribute with different needs.

`get_model_state_dict` calls the model's own `state_dict()`, as users do, but wants shards, not
whole tensors. `set_*_state_dict(full_state_dict=True, broadcast_from_rank0=True)` calls
`to_local()` of a parameter in order to write rows of it there. `async_save` copies DTensors by
`new_empty()` and their attributes. None of them passes anything that tells it from a user's call,
and none has a hook, so the caller's module decides.
"""

from __future__ import annotations

import sys

_CHECKPOINT = "torch.distributed.checkpoint."
_STAGER = "torch.distributed.checkpoint._state_dict_stager"
_DISTRIBUTION = "torch.distributed._state_dict_utils"


def _caller(depth: int = 0) -> str:
    """Return the module that called the function that asks, or which is `depth` frames further."""
    return str(sys._getframe(3 + depth).f_globals.get("__name__"))


def is_called_by_checkpoint() -> bool:
    """Return whether the function that asks was called by torch.distributed.checkpoint itself."""
    return _caller().startswith(_CHECKPOINT)


def is_called_by_distribution() -> bool:
    """Return whether it was called by the code that hands a full state dict out to the ranks."""
    return _caller() == _DISTRIBUTION


def is_called_by_stager() -> bool:
    """Return whether `async_save`'s copy called what a `__torch_function__` handler answers."""
    return _caller(depth=1) == _STAGER
