"""The zerofx ops as registered torch ops: what passes insert, and what every graph can run.

Each op has a fake rule (shapes only) and a real body (`zerofx.runtime.graph_calls`), which ends in
the same methods of the engine that an emitted `schedule.py` calls. A graph is
therefore runnable after every pass, with the same arithmetic as the emitted module.

Launches (`all_gather`, `refresh`, `reduce_scatter`, `all_reduce`) return the tensor that will hold
the result; it may be read only behind `wait`.

`dtype` says where a number format changes: a gather casts the shard before it travels, packing
casts gradients into their buffer's format, storing casts the reduced slice to the shard's. It is
left out where nothing changes. The real bodies take the formats from the layout.

`offload` copies a value to host memory, `reload` back to the device: launches too, with the same
`wait`. Behind an offload's wait the value's own memory is given back. The fake host value lies on
the CPU. `write_out` takes what arrived on the host on to NVMe, `read_back` from there to the host;
behind a write's wait the host's place is given back, and what stands for the value is its place in
a file, whose fake lies on the CPU too.

`reload_shard` copies a shard that lives off the device to it, `refresh_shard` brings a copy there
that stays up to date, `offload_grad` copies a reduced slice to where its shard lives, `read_shard`
brings a shard from NVMe to the host: launches too.

`update` runs the optimizer over a shard, in place: what backward does where the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from zerofx.runtime.graph_calls import current_calls

_LIB = torch.library.Library("zerofx", "DEF")
_Format = torch.dtype | None


def _define(schema: str, real: Callable, fake: Callable, effect: bool = False) -> Callable:
    """Register one op; `effect` keeps its nodes where nothing reads their result."""
    name = schema.split("(")[0]
    _LIB.define(schema)
    _LIB.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerofx::{name}", fake, lib=_LIB)
    op = getattr(torch.ops.zerofx, name).default
    if effect:
        has_side_effect(op)
    return op


# -- gathered parameters ------------------------------------------------------------------------
def _real_all_gather(
    shard: Tensor, bucket: int, numel: int, slot: int = -1, *, dtype: _Format = None
) -> Tensor:
    return current_calls().all_gather(shard, bucket, slot)


def _real_refresh(shard: Tensor, bucket: int, numel: int, *, dtype: _Format = None) -> Tensor:
    return current_calls().refresh(shard, bucket)


def _real_resident(shard: Tensor, bucket: int, numel: int, *, dtype: _Format = None) -> Tensor:
    return current_calls().resident(shard, bucket)


def _fake_full(
    shard: Tensor, bucket: int, numel: int, slot: int = -1, *, dtype: _Format = None
) -> Tensor:
    return shard.new_empty(numel, dtype=dtype)


all_gather = _define(
    "all_gather(Tensor shard, int bucket, int numel, int slot=-1, *, ScalarType? dtype=None)"
    " -> Tensor",
    _real_all_gather,
    _fake_full,
)
refresh = _define(
    "refresh(Tensor shard, int bucket, int numel, *, ScalarType? dtype=None) -> Tensor",
    _real_refresh,
    _fake_full,
)
resident = _define(
    "resident(Tensor shard, int bucket, int numel, *, ScalarType? dtype=None) -> Tensor",
    _real_resident,
    _fake_full,
)
wait = _define(
    "wait(Tensor(a) launched) -> Tensor(a)",
    lambda launched: current_calls().wait(launched),
    lambda launched: launched.view_as(launched),
)
param_view = _define(
    "param_view(Tensor(a) full, int offset, int[] shape) -> Tensor(a)",
    lambda full, offset, shape: _view(full, offset, shape),
    lambda full, offset, shape: _view(full, offset, shape),
)
release = _define(
    "release(Tensor full, int slot=-1) -> ()",
    lambda full, slot=-1: current_calls().release(full, slot),
    lambda full, slot=-1: None,
    effect=True,
)


def _view(full: Tensor, offset: int, shape: list[int]) -> Tensor:
    numel = 1
    for size in shape:
        numel *= size
    return full.narrow(0, offset, numel).view(shape)


# -- gradients ----------------------------------------------------------------------------------
def _real_grad_buffer(
    like: Tensor, bucket: int, numel: int, zero: bool, slot: int = -1, *, dtype: _Format = None
) -> Tensor:
    return current_calls().grad_buffer(bucket, zero, slot)


def _fake_grad_buffer(
    like: Tensor, bucket: int, numel: int, zero: bool, slot: int = -1, *, dtype: _Format = None
) -> Tensor:
    return like.new_empty(numel, dtype=dtype)


grad_buffer = _define(
    "grad_buffer(Tensor like, int bucket, int numel, bool zero, int slot=-1, *, "
    "ScalarType? dtype=None) -> Tensor",
    _real_grad_buffer,
    _fake_grad_buffer,
)


def _real_pack(buffer: Tensor, grads: list[Tensor], offsets: list[int]) -> Tensor:
    return current_calls().pack(buffer, grads, offsets)


pack = _define(
    "pack(Tensor(a!) buffer, Tensor[] grads, int[] offsets) -> Tensor(a!)",
    _real_pack,
    lambda buffer, grads, offsets: buffer,
    effect=True,
)
reduce_scatter = _define(
    "reduce_scatter(Tensor packed, int bucket, int numel, float scale) -> Tensor",
    lambda packed, bucket, numel, scale: current_calls().reduce(packed, bucket, scale),
    lambda packed, bucket, numel, scale: packed.new_empty(numel),
    effect=True,
)
all_reduce = _define(
    "all_reduce(Tensor packed, int bucket, int numel, float scale) -> Tensor",
    lambda packed, bucket, numel, scale: current_calls().reduce(packed, bucket, scale),
    lambda packed, bucket, numel, scale: packed.new_empty(numel),
    effect=True,
)


def _real_store_grad(reduced: Tensor, bucket: int, *, dtype: _Format = None) -> Tensor:
    return current_calls().store_grad(reduced, bucket)


def _fake_store_grad(reduced: Tensor, bucket: int, *, dtype: _Format = None) -> Tensor:
    return torch.empty_like(reduced, dtype=dtype)


store_grad = _define(
    "store_grad(Tensor reduced, int bucket, *, ScalarType? dtype=None) -> Tensor",
    _real_store_grad,
    _fake_store_grad,
    effect=True,
)

update = _define(
    "update(Tensor stored, Tensor(a!) shard, int bucket) -> ()",
    lambda stored, shard, bucket: current_calls().update(stored, shard, bucket),
    lambda stored, shard, bucket: None,
    effect=True,
)


# -- values that wait on the host ---------------------------------------------------------------
def _fake_offload(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def _fake_reload(host: Tensor, *, device: torch.device) -> Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


offload = _define(
    "offload(Tensor x) -> Tensor", lambda x: current_calls().offload(x), _fake_offload
)
reload = _define(
    "reload(Tensor host, *, Device device) -> Tensor",
    lambda host, *, device: current_calls().reload(host),
    _fake_reload,
)
write_out = _define(
    "write_out(Tensor host, str name) -> Tensor",
    lambda host, name: current_calls().write_out(host, name),
    lambda host, name: _fake_offload(host),
)
read_back = _define(
    "read_back(Tensor stored) -> Tensor",
    lambda stored: current_calls().read_back(stored),
    _fake_offload,
)


# -- shards that live off the device ------------------------------------------------------------
def _real_reload_shard(
    shard: Tensor, bucket: int, numel: int, slot: int = -1, *, dtype: _Format = None
) -> Tensor:
    return current_calls().reload_shard(shard, bucket, slot)


def _real_refresh_shard(shard: Tensor, bucket: int, numel: int, *, dtype: _Format = None) -> Tensor:
    return current_calls().refresh_shard(shard, bucket)


reload_shard = _define(
    "reload_shard(Tensor shard, int bucket, int numel, int slot=-1, *, ScalarType? dtype=None)"
    " -> Tensor",
    _real_reload_shard,
    _fake_full,
)
refresh_shard = _define(
    "refresh_shard(Tensor shard, int bucket, int numel, *, ScalarType? dtype=None) -> Tensor",
    _real_refresh_shard,
    _fake_full,
)
read_shard = _define(
    "read_shard(Tensor shard, int bucket, int numel) -> Tensor",
    lambda shard, bucket, numel: current_calls().read_shard(shard, bucket),
    lambda shard, bucket, numel: shard.new_empty(numel, device="cpu"),
)
offload_grad = _define(
    "offload_grad(Tensor reduced, int bucket) -> Tensor",
    lambda reduced, bucket: current_calls().offload_grad(reduced, bucket),
    lambda reduced, bucket: _fake_offload(reduced),
    effect=True,
)

# -- buffers ------------------------------------------------------------------------------------
sync_buffers = _define(
    "sync_buffers(Tensor[] values) -> Tensor[]",
    lambda values: current_calls().sync_buffers(values),
    lambda values: [torch.empty_like(v) for v in values],
)

GATHERS = frozenset({all_gather, refresh})
REDUCES = frozenset({reduce_scatter, all_reduce})
LAUNCHES = GATHERS | REDUCES  # what the ranks agree on
SPILLS = frozenset({write_out, read_back})  # between host and NVMe
COPIES = SPILLS | {offload, reload}  # of values: launches too, but each rank's own
RELOADS = frozenset({reload_shard, refresh_shard})  # what brings a shard to the device
MOVES = RELOADS | {read_shard, offload_grad}  # launches of a rank's own that are about a bucket
TRANSFERS = LAUNCHES | COPIES | MOVES  # all that `wait` takes
ALL = TRANSFERS | {
    resident, wait, param_view, release, grad_buffer, pack, store_grad, update, sync_buffers,
}  # fmt: skip
