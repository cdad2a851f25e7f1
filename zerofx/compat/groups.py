"""Process groups: the flat collectives, the backend of a group, and the store.

The flat collectives are renamed in 2.13, where the old names warn. The wrappers of
torch.distributed end in a group's backend object. Point-to-point calls on it directly cost half as
much Python.
"""

from __future__ import annotations

import os
from datetime import timedelta
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
    """Return the backend object that runs the collectives of `group` on `device`."""
    return group._get_backend(device)


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that a submesh was sliced from, or the mesh itself if it is not a slice."""
    return mesh._get_root_mesh()


def default_store() -> Any:
    """Return the key-value store that the default process group was created with."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def store_of_job(limit_s: float) -> Any:
    """Return the store of the job described by torchrun's variables, like `env://`.

    Unlike `env://`, rank 0 does not wait here for the others to connect, so that the caller can
    report which ranks are missing.

    Raises:
        RuntimeError: the store cannot be reached within `limit_s`.
    """
    from torch.distributed import TCPStore

    uses_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=not uses_agent and int(os.environ["RANK"]) == 0,
        timeout=timedelta(seconds=limit_s),
        wait_for_workers=False,
        multi_tenant=not uses_agent,
    )


def set_timeout(group: Any, device: torch.device, seconds: float) -> None:
    """Set the timeout of collectives of `group` on `device` that are launched from now on."""
    group_backend(group, device)._set_default_timeout(timedelta(seconds=seconds))
