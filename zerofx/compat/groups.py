"""Process groups: the flat collectives, the object behind a group, the store.

The flat collectives are renamed in 2.13, where the old names warn. A group's backend object is what
torch.distributed's wrappers end in: point-to-point calls on it cost half as much Python.
"""

from __future__ import annotations

from typing import Any

import torch


def all_gather_flat(group: Any, out: torch.Tensor, shard: torch.Tensor) -> Any:
    """Launch an all-gather into one flat tensor; return its handle."""
    import torch.distributed as dist

    launch = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return launch(out, shard, group=group, async_op=True)


def reduce_scatter_flat(group: Any, out: torch.Tensor, full: torch.Tensor) -> Any:
    """Launch a reduce-scatter (sum) of one flat tensor; return its handle."""
    import torch.distributed as dist

    launch = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return launch(out, full, group=group, async_op=True)


def group_backend(group: Any, device: torch.device) -> Any:
    """Return the backend object that carries out the collectives of `group` on `device`."""
    return group._get_backend(device)


def default_store() -> Any:
    """Return the key-value store that the default process group was made with."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
