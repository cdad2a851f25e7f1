"""What a schedule is given while it is read: an engine and shards that record."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.codegen.load_record import Recorder
from zerofx.ir import ops
from zerofx.ir.graphs import add_placeholder
from zerofx.ir.meta import Role, info
from zerofx.ir.program import ParamInfo
from zerofx.runtime.layout import Bucket, Layout


class Launch:
    """What a launch returns: only `rt.wait` takes it."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return "a launch that was not waited for"


class Calls:
    """Stands for `rt`: each of the engine's methods becomes the zerofx op of its name."""

    def __init__(
        self, recorder: Recorder, layout: Layout, params: dict[str, ParamInfo], device: str
    ) -> None:
        self._recorder, self._layout, self._params = recorder, layout, params
        self._device = torch.device(device)
        self.numbers: dict[int, int] = {}  # position of a saved value on the host -> its offload's
        self._filling: dict[int, int] = {}  # id of a gradient buffer -> its bucket
        self.stored: dict[int, fx.Node] = {}  # bucket -> its store_grad

    def __getattr__(self, name: str) -> Any:
        known = sorted(n for n in vars(Calls) if not n.startswith("_"))
        raise self._recorder.refuse(f"the engine has no call {name}; it has {', '.join(known)}")

    # -- gathered parameters ----------------------------------------------------------------------
    def all_gather(self, shard: Tensor, bucket: int, slot: int = -1) -> Launch:
        return Launch(self._gather(ops.all_gather, shard, bucket, *_slot(slot)))

    def refresh(self, shard: Tensor, bucket: int) -> Launch:
        return Launch(self._gather(ops.refresh, shard, bucket))

    def resident(self, shard: Tensor, bucket: int) -> Tensor:
        return self._gather(ops.resident, shard, bucket).meta["val"]

    def _gather(self, target: Any, shard: Tensor, bucket: int, *slot: int) -> fx.Node:
        b = self._bucket(bucket)
        node = self._recorder.node(shard, f"the shard of bucket {bucket}")
        cast = {"dtype": b.compute_dtype} if b.is_cast else None
        return self._recorder.communicate(
            target, node, bucket, b.numel, *slot, named=cast, **_of(b)
        )

    # -- shards that live off the device ----------------------------------------------------------
    def reload_shard(self, shard: Tensor, bucket: int, slot: int = -1) -> Launch:
        return Launch(self._reload(ops.reload_shard, shard, bucket, *_slot(slot)))

    def refresh_shard(self, shard: Tensor, bucket: int) -> Launch:
        return Launch(self._reload(ops.refresh_shard, shard, bucket))

    def _reload(self, target: Any, shard: Tensor, bucket: int, *slot: int) -> fx.Node:
        b = self._bucket(bucket)
        node = self._recorder.node(shard, f"the shard of bucket {bucket}")
        cast = {"dtype": b.compute_dtype} if b.is_cast else None
        numel = self._layout.shard_numel(b)
        return self._recorder.communicate(target, node, bucket, numel, *slot, named=cast, **_of(b))

    def read_shard(self, shard: Tensor, bucket: int) -> Launch:
        b = self._bucket(bucket)
        node = self._recorder.node(shard, f"the shard of bucket {bucket}")
        numel = self._layout.shard_numel(b)
        return Launch(self._recorder.communicate(ops.read_shard, node, bucket, numel, **_of(b)))

    def offload_grad(self, reduced: Tensor, bucket: int) -> Launch:
        b = self._bucket(bucket)
        node = self._recorder.node(reduced, "the reduced slice")
        return Launch(self._recorder.communicate(ops.offload_grad, node, bucket, **_of(b)))

    # -- waiting, taking apart, giving back -------------------------------------------------------
    def wait(self, flight: Launch) -> Tensor:
        if not isinstance(flight, Launch):
            raise self._recorder.refuse("rt.wait takes what a launch returned")
        if flight.node.target in ops.COPIES:
            fields = _told(flight.node)
        else:
            fields = _of(self._launched(flight.node))
        return self._recorder.communicate(ops.wait, flight.node, **fields).meta["val"]

    def unpack(self, full: Tensor, bucket: int, params: tuple[int, ...]) -> tuple[Tensor, ...]:
        node = self._recorder.node(full, "what rt.unpack takes apart")
        views = []
        for piece in self._members(bucket, params):
            arguments = (node, piece.offset, list(piece.shape))
            unit = self._params[piece.name].unit
            view = self._recorder.communicate(
                ops.param_view, *arguments, name=piece.name, unit=unit
            )
            views.append(view.meta["val"])
        return tuple(views)

    def release(self, full: Tensor, slot: int = -1) -> None:
        node = self._recorder.node(full, "what rt.release gives back")
        launch = node.args[0] if node.target is ops.wait else None
        fields = _of(self._launched(launch)) if isinstance(launch, fx.Node) else {}
        self._recorder.communicate(ops.release, node, *_slot(slot), **fields)

    def _launched(self, launch: fx.Node) -> Bucket:
        index: Any = launch.args[1]
        return self._layout.buckets[index]

    # -- gradients --------------------------------------------------------------------------------
    def grad_buffer(self, bucket: int, zero: bool = False, slot: int = -1) -> Tensor:
        b = self._bucket(bucket)
        like = self._recorder.shards[bucket]
        node = self._recorder.node(like, "the shard")
        made = self._recorder.communicate(
            ops.grad_buffer, node, bucket, b.numel, zero, *_slot(slot),
            named=_reduced(b, b.reduce_dtype), **_of(b),
        ).meta["val"]  # fmt: skip
        self._filling[id(made)] = bucket
        return made

    def pack(
        self, buffer: Tensor, bucket: int, params: tuple[int, ...], grads: Sequence[Tensor]
    ) -> None:
        if self._filling.get(id(buffer), bucket) != bucket:
            mine = self._filling[id(buffer)]
            raise self._recorder.refuse(
                f"rt.pack names bucket {bucket}, but the buffer is that of bucket {mine}"
            )
        node = self._recorder.node(buffer, "the gradient buffer")
        offsets = [p.offset for p in self._members(bucket, params)]
        given = [self._recorder.node(g, "a gradient") for g in grads]
        self._recorder.communicate(ops.pack, node, given, offsets, **_of(self._bucket(bucket)))

    def reduce_scatter(self, buffer: Tensor, bucket: int, scale: float) -> Launch:
        return self._reduce(ops.reduce_scatter, buffer, bucket, scale)

    def all_reduce(self, buffer: Tensor, bucket: int, scale: float) -> Launch:
        return self._reduce(ops.all_reduce, buffer, bucket, scale)

    def _reduce(self, target: Any, buffer: Tensor, bucket: int, scale: float) -> Launch:
        b = self._bucket(bucket)
        node = self._recorder.node(buffer, "the gradient buffer")
        numel = self._layout.shard_numel(b)
        return Launch(self._recorder.communicate(target, node, bucket, numel, scale, **_of(b)))

    def store_grad(self, reduced: Tensor, bucket: int) -> None:
        b = self._bucket(bucket)
        node = self._recorder.node(reduced, "the reduced slice")
        self.stored[bucket] = self._recorder.communicate(
            ops.store_grad, node, bucket, named=_reduced(b, b.dtype), **_of(b)
        )

    def update(self, shard: Tensor, bucket: int) -> None:
        node = self._recorder.node(shard, f"the shard of bucket {bucket}")
        stored = self.stored.get(bucket)
        if stored is None:
            raise self._recorder.refuse(
                f"rt.update of bucket {bucket} comes before rt.store_grad of it"
            )
        self._recorder.communicate(ops.update, stored, node, bucket, **_of(self._bucket(bucket)))

    # -- values that wait on the host -------------------------------------------------------------
    def offload(self, x: Tensor) -> Launch:
        node = self._recorder.node(x, "what rt.offload copies to the host")
        number = sum(n.target is ops.offload for n in self._recorder.graph.nodes)
        return self._copy(ops.offload, node, number)

    def reload(self, host: Tensor) -> Launch:
        node = self._recorder.node(host, "what rt.reload copies to the device")
        number = info(node).index  # of a value that was read back
        if node.op == "placeholder":
            number = self.numbers.get(number, -1)  # -1: verify refuses it
        return self._copy(ops.reload, node, number, {"device": self._device})

    def write_out(self, host: Tensor, name: str) -> Launch:
        node = self._recorder.node(host, "what rt.write_out writes")
        if not isinstance(name, str):
            raise self._recorder.refuse(f"rt.write_out names its value by a text, not by {name!r}")
        return self._copy(ops.write_out, node, info(node).index, more=(name,))

    def read_back(self, stored: Tensor) -> Launch:
        node = self._recorder.node(stored, "what rt.read_back reads")
        return self._copy(ops.read_back, node, self.numbers.get(info(node).index, -1))

    def _copy(
        self,
        target: Any,
        node: fx.Node,
        number: int,
        named: dict[str, Any] | None = None,
        more: tuple[Any, ...] = (),
    ) -> Launch:
        fields = _told(node) | {"name": info(node).name or node.name, "index": number}
        return Launch(self._recorder.communicate(target, node, *more, named=named, **fields))

    # -- buffers ----------------------------------------------------------------------------------
    def sync_buffers(self, values: Sequence[Tensor]) -> list[Tensor]:
        given = [self._recorder.node(v, "a buffer's new value") for v in values]
        synced = self._recorder.communicate(ops.sync_buffers, given)
        made = []
        for k in range(len(given)):
            item = self._recorder.communicate(operator.getitem, synced, k)
            made.append(item.meta["val"])
        return made

    # -- checks -----------------------------------------------------------------------------------
    def _bucket(self, bucket: int) -> Bucket:
        num = len(self._layout.buckets)
        if type(bucket) is not int or not 0 <= bucket < num:
            raise self._recorder.refuse(f"bucket {bucket!r} is none of the layout's {num}")
        return self._layout.buckets[bucket]

    def _members(self, bucket: int, params: tuple[int, ...]) -> list[Any]:
        held = self._bucket(bucket).params
        if not isinstance(params, tuple):
            raise self._recorder.refuse(f"positions of parameters are a tuple; this is {params!r}")
        if wrong := [i for i in params if type(i) is not int or not 0 <= i < len(held)]:
            raise self._recorder.refuse(
                f"position {wrong[0]!r} is none of the {len(held)} parameters of bucket {bucket}"
            )
        return [held[i] for i in params]


def _told(node: fx.Node) -> dict[str, Any]:
    """Return what is known of a value that a copy takes elsewhere."""
    where = info(node)
    return {k: getattr(where, k) for k in ("unit", "module", "line", "name", "index")}


def _of(bucket: Bucket) -> dict[str, Any]:
    return {"unit": bucket.label(), "index": bucket.index}


def _reduced(bucket: Bucket, dtype: torch.dtype) -> dict[str, Any] | None:
    """Return the dtype argument where gradients travel in another format than the shards'."""
    return {"dtype": dtype} if bucket.reduce_dtype is not bucket.dtype else None


def _slot(slot: int) -> tuple[int, ...]:
    """Return a slot as the graph's argument: left out where there is none."""
    return () if slot == -1 else (slot,)


class Shards:
    """Stands for `shards`: a placeholder for each bucket that the schedule names."""

    def __init__(self, recorder: Recorder, layout: Layout, device: str) -> None:
        self._recorder, self._layout, self._device = recorder, layout, device
        self._made: dict[int, Tensor] = {}

    def add(self, index: int, shard: Tensor) -> None:
        self._made[index] = shard

    def __getitem__(self, index: int) -> Tensor:
        if index not in self._made:
            num = len(self._layout.buckets)
            if type(index) is not int or not 0 <= index < num:
                raise self._recorder.refuse(f"shards[{index!r}] is none of the layout's {num}")
            self._made[index] = self._make(self._layout.buckets[index])
        return self._made[index]

    def _make(self, bucket: Bucket) -> Tensor:
        dtype = str(bucket.dtype).removeprefix("torch.")
        val = self._recorder.fake(dtype, [self._layout.shard_numel(bucket)], [1], self._device)
        name = f"shard_{bucket.index}"
        fields = {**_of(bucket), "name": name, "phase": self._recorder.phase}
        node = add_placeholder(self._recorder.graph, name, val, Role.SHARD, **fields)
        return self._recorder.bind(val, node)
