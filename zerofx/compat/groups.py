"""Process groups: the flat collectives, the backend of a group, the store, and traced collectives.

The flat collectives are renamed in 2.13, where the old names warn. The wrappers of
torch.distributed end in a group's backend object. Point-to-point calls on it directly cost half as
much Python.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

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


# -- collectives of torch.distributed in a trace --------------------------------------------------
class _Done:
    """The handle of a traced collective, which the program has waited for."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


_DONE = _Done()


def _operator(op: Any) -> str:
    from torch.distributed import ReduceOp

    names = {"SUM": "sum", "AVG": "avg", "MAX": "max", "MIN": "min", "PRODUCT": "product"}
    for name, functional in names.items():
        if op == getattr(ReduceOp, name):
            return functional
    raise NotImplementedError(
        f"{getattr(op, 'op', op)} has no functional collective. Use one of {', '.join(names)}."
    )


def _wait(value: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(value)
    return waited


def _fill(out: torch.Tensor, value: torch.Tensor) -> None:
    """Write a result as a collective does: autograd does not see it, and formats must be equal."""
    if out.dtype != value.dtype:
        raise RuntimeError(
            f"a collective of {value.dtype} cannot write to a tensor of {out.dtype}."
        )
    out.detach().copy_(value.view(out.shape))


def _all_reduce(group: Any, tensors: list[torch.Tensor], opts: Any) -> None:
    op = _operator(opts.reduceOp)
    for tensor in tensors:
        value = tensor.detach().contiguous()
        _fill(tensor, _wait(torch.ops._c10d_functional.all_reduce(value, op, group.group_name)))


def _broadcast(group: Any, tensors: list[torch.Tensor], opts: Any) -> None:
    for tensor in tensors:
        value = tensor.detach().contiguous()
        source = opts.rootRank
        _fill(tensor, _wait(torch.ops._c10d_functional.broadcast(value, source, group.group_name)))


def _gathered(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    flat, gather = tensor.detach().reshape(-1), torch.ops._c10d_functional.all_gather_into_tensor
    return _wait(gather(flat, group.size(), group.group_name))


def _all_gather_flat(group: Any, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> None:
    _fill(out, _gathered(group, tensor))


def _all_gather(group: Any, outs: Any, tensors: list[torch.Tensor], opts: Any = None) -> None:
    for out, tensor in zip(outs, tensors, strict=True):
        for each, value in zip(out, _gathered(group, tensor).chunk(group.size()), strict=True):
            _fill(each, value)


def _scattered(group: Any, flat: torch.Tensor, op: Any) -> torch.Tensor:
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor
    return _wait(scatter(flat, _operator(op), group.size(), group.group_name))


def _reduce_scatter_flat(group: Any, out: torch.Tensor, full: torch.Tensor, opts: Any) -> None:
    _fill(out, _scattered(group, full.detach().reshape(-1), opts.reduceOp))


def _reduce_scatter(group: Any, outs: list[torch.Tensor], fulls: Any, opts: Any) -> None:
    for out, full in zip(outs, fulls, strict=True):
        flat = torch.cat([each.detach().reshape(-1) for each in full])
        _fill(out, _scattered(group, flat, opts.reduceOp))


def _all_to_all_flat(
    group: Any, out: torch.Tensor, tensor: torch.Tensor, takes: Any, gives: Any, opts: Any = None
) -> None:
    size = group.size()
    takes = list(takes) or [out.shape[0] // size] * size
    gives = list(gives) or [tensor.shape[0] // size] * size
    swap = torch.ops._c10d_functional.all_to_all_single
    _fill(out, _wait(swap(tensor.detach().contiguous(), takes, gives, group.group_name)))


# The methods in which the functions of torch.distributed end, under their names in 2.11 and 2.13.
_TRACED: dict[str, Callable[..., None]] = {
    "allreduce": _all_reduce,
    "broadcast": _broadcast,
    "allgather": _all_gather,
    "_allgather_base": _all_gather_flat,
    "all_gather_single": _all_gather_flat,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_flat,
    "reduce_scatter_single": _reduce_scatter_flat,
    "alltoall_base": _all_to_all_flat,
    "all_to_all_single": _all_to_all_flat,
}


@contextlib.contextmanager
def traced_collectives(is_traced: Callable[[Any], bool]) -> Iterator[None]:
    """Trace collectives of torch.distributed as functional ones, which are operators of the graph.

    Only calls with a tensor for which `is_traced` holds; all others run as before. A call with
    `async_op=True` waits at once.
    """
    from torch.distributed import ProcessGroup

    def traced(real: Any, functional: Callable[..., None]) -> Any:
        @functools.wraps(real)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else None
            while isinstance(first, list) and first:
                first = first[0]
            if not is_traced(first):
                return real(group, *args, **kwargs)
            with torch.no_grad():
                functional(group, *args, **kwargs)
            return _DONE

        return call

    with contextlib.ExitStack() as stack:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for name, functional in _TRACED.items():
                if (real := vars(ProcessGroup).get(name)) is not None:
                    patched = traced(real, functional)
                    stack.enter_context(mock.patch.object(ProcessGroup, name, patched))
        yield
