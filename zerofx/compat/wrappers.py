"""Other data parallelism: which modules it has touched, and where it asks before it touches one.

None of these wrappers asks a module whether it may be wrapped. Each does something to it first that
a module can notice, before anything has changed: DistributedDataParallel looks for a list of
parameters to ignore, DataParallel lists the parameters to copy, `fully_shard` and `replicate` note
themselves in the module's `__dict__`, FullyShardedDataParallel and `fully_shard` mark the modules
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
    "distributed_by",
    "is_called_by",
    "reducer_of",
    "unwrapped",
]

_INSIDE = {DistributedDataParallel: "module", DataParallel: "module"}


def unwrapped(module: nn.Module) -> str:
    """Return the attribute in which a wrapper has the plain module, "" if it is no wrapper."""
    return next((inside for kind, inside in _INSIDE.items() if isinstance(module, kind)), "")


def distributed_by(module: nn.Module) -> str:
    """Return what has made a module parallel in place, or around flat parameters; "" if none."""
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

    They note themselves (`fully_shard`, `replicate`) before they look at the parameters.
    """
    found = list(module.__dict__.get(REGISTRY_KEY, ()))
    if found:
        del module.__dict__[REGISTRY_KEY]
        module.__dict__.pop(_STATE_KEY, None)
    return found


def is_called_by(module: str) -> bool:
    """Tell whether the caller's caller is code of torch's `module`, or of one inside it."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name == module or name.startswith(f"{module}.")


def reducer_of(params: Any) -> str:
    """Return "DistributedDataParallel" if one that runs now reduces any of these parameters."""
    running = DistributedDataParallel._active_ddp_module
    if running is None:
        return ""
    mine = {id(p) for p in params}
    is_reduced = any(id(p) in mine for p in running._module_parameters)
    return "DistributedDataParallel" if is_reduced else ""
