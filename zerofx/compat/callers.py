"""Callers: which part of torch.distributed is using a model, and which marks it has left.

These libraries do not identify themselves, and they offer no hooks. So the calling module decides,
or a mark that a caller leaves.

Checkpoints use the same attributes as users, with other needs. `get_model_state_dict` calls the
model's own `state_dict()`, but wants shards, not whole tensors.
`set_*_state_dict(full_state_dict=True, broadcast_from_rank0=True)` calls `to_local()` of a
parameter in order to write rows into it. `async_save` copies DTensors with `new_empty()` and their
attributes.

Wrappers do not ask a module whether it may be wrapped. But each first does something to the module
that can be detected before anything has changed. DistributedDataParallel reads a list of parameters
to ignore, and DataParallel lists the parameters to copy. `fully_shard` and `replicate` register
themselves in the module's `__dict__`. FullyShardedDataParallel and `fully_shard` mark the modules
that they manage, and `distribute_module` looks for its own mark.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed._composable.contract import STATE_KEY as _STATE_KEY
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = [
    "DTensor",
    "applied",
    "asking",
    "distributed_by",
    "is_called_by",
    "is_called_by_checkpoint",
    "is_called_by_distribution",
    "is_called_by_stager",
    "is_called_to_generate",
    "is_within_checkpoint",
    "reducer_of",
    "saving_state",
    "unwrapped",
]

_STAGER = "torch.distributed.checkpoint._state_dict_stager"
_DISTRIBUTION = "torch.distributed._state_dict_utils"
_INSIDE = {DistributedDataParallel: "module", DataParallel: "module"}


# -- the caller ----------------------------------------------------------------------------------
def _is_in(module: str, depth: int) -> bool:
    """Return whether the frame `depth` above the caller runs code of `module` or of a submodule."""
    name = str(sys._getframe(depth + 1).f_globals.get("__name__"))
    return name == module or name.startswith(f"{module}.")


def is_called_by(module: str) -> bool:
    """Return whether the calling function was called by torch's `module`, or by one inside it."""
    return _is_in(module, 2)


def asking(module: str) -> Any:
    """Return the object whose method in `module` called the calling function, else None."""
    return sys._getframe(2).f_locals.get("self") if _is_in(module, 2) else None


def saving_state() -> Any:
    """Return the Accelerator whose `save_state` requests a model's state dict, else None."""
    asker = sys._getframe(2)
    is_get_state_dict = _is_in("accelerate.accelerator", 2)
    if not is_get_state_dict or asker.f_back is None or asker.f_back.f_code.co_name != "save_state":
        return None
    return asker.f_locals.get("self")


def is_called_by_checkpoint() -> bool:
    """Return whether the calling function was called by torch.distributed.checkpoint itself."""
    return _is_in("torch.distributed.checkpoint", 2)


def is_within_checkpoint() -> bool:
    """Return whether torch.distributed.checkpoint runs anywhere on this thread's stack."""
    depth = 1
    while True:
        try:
            if _is_in("torch.distributed.checkpoint", depth):
                return True
        except ValueError:  # the end of the stack
            return False
        depth += 1


def is_called_by_distribution() -> bool:
    """Return whether the caller is the code that distributes a full state dict to the ranks."""
    return _is_in(_DISTRIBUTION, 2)


def is_called_by_stager() -> bool:
    """Return whether `async_save` called the function that a `__torch_function__` handler runs."""
    return _is_in(_STAGER, 3)


def is_called_to_generate() -> bool:
    """Return whether transformers reads the mark of FSDP, unless its Trainer does.

    The Trainer would handle the gradients of such a model with methods of FSDP2.
    """
    return _is_in("transformers", 2) and not _is_in("transformers.trainer", 3)


# -- the caller's marks ---------------------------------------------------------------------------
def unwrapped(module: nn.Module) -> str:
    """Return the attribute in which a wrapper keeps the plain module, or "" if it is no wrapper."""
    return next((inside for kind, inside in _INSIDE.items() if isinstance(module, kind)), "")


def distributed_by(module: nn.Module) -> str:
    """Return what made a module parallel, in place or around flat parameters; "" if nothing."""
    if "replicate" in module.__dict__.get(REGISTRY_KEY, ()):
        return "replicate"
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # if it was not imported, it was not used
    if fsdp is None:
        return ""
    if isinstance(module, fsdp.FullyShardedDataParallel):
        return "FullyShardedDataParallel"
    return "fully_shard" if isinstance(module, fsdp.FSDPModule) else ""


def applied(module: nn.Module) -> list[str]:
    """Return the names of composable APIs that are being applied to a module; forget them.

    They register themselves (`fully_shard`, `replicate`) before they look at the parameters.
    """
    found = list(module.__dict__.get(REGISTRY_KEY, ()))
    if found:
        del module.__dict__[REGISTRY_KEY]
        module.__dict__.pop(_STATE_KEY, None)
    return found


def reducer_of(params: Any) -> str:
    """Return "DistributedDataParallel" if a running instance reduces any of these parameters."""
    running = DistributedDataParallel._active_ddp_module
    if running is None:
        return ""
    mine = {id(p) for p in params}
    is_reduced = any(id(p) in mine for p in running._module_parameters)
    return "DistributedDataParallel" if is_reduced else ""
