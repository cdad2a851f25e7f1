"""Order in backward: gradients packed, buckets reduced, slices stored, each exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from zerofx.ir import ops
from zerofx.ir.facts import Fact
from zerofx.ir.meta import Role, value
from zerofx.ir.program import Program
from zerofx.ir.verify_buffers import Buffer, Kind, args, argument, slot_of
from zerofx.ir.verify_fault import name_of, user_line
from zerofx.ir.verify_gathers import Order
from zerofx.ir.verify_sources import Crossing
from zerofx.ir.verify_values import label_of
from zerofx.runtime.layout import Bucket, ParamSlice


class GradientOrder(Order):
    """Order, and what becomes of the gradients."""

    def __init__(self, program: Program, graph: str, crossing: Crossing) -> None:
        super().__init__(program, graph, crossing)
        self._filling: dict[int, Buffer] = {}
        self._reduced: dict[int, Buffer] = {}
        self._expected = self._expect()

    def handlers(self) -> dict[Any, Callable[[fx.Node], None]]:
        return super().handlers() | {
            ops.grad_buffer: self.grad_buffer,
            ops.pack: self.pack,
            ops.reduce_scatter: self.reduce,
            ops.all_reduce: self.reduce,
            ops.offload_grad: self.offload_grad,
            ops.store_grad: self.store,
        }

    def _expect(self) -> dict[int, dict[int, ParamSlice]] | None:
        """Return, by bucket and offset, the parameters whose gradients the captured graph has."""
        reference = self.program.reference
        if reference is None or self.layout is None:
            return None
        expected: dict[int, dict[int, ParamSlice]] = {}
        for bucket in self.layout.buckets:
            for param in bucket.params:
                if label_of(Role.GRAD, param.name) in reference.outputs:
                    expected.setdefault(bucket.index, {})[param.offset] = param
        return expected

    # -- the ops ----------------------------------------------------------------------------------
    def grad_buffer(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        self.numel(node, bucket.numel, f"bucket {bucket.index}")
        self.dtype(node, bucket.reduce_dtype, f"a gradient of bucket {bucket.index} on its way")
        before = self._filling.get(bucket.index)
        if before is not None and before.packed:
            self.fail(
                node,
                f"{node.name} is a second gradient buffer of bucket {bucket.index} "
                f"({bucket.label()}), after {before.made.name}; pack into that one",
            )
        buffer = Buffer(Kind.PACKED, node, bucket.index, slot_of(node))
        buffer.zeroed = bool(argument(node, 3))
        self._filling[bucket.index] = buffer
        self.add(node, buffer)
        self.claim(node, buffer)

    def pack(self, node: fx.Node) -> None:
        buffer = self._packed_buffer(node)
        assert self.layout is not None
        bucket = self.layout.buckets[buffer.bucket]
        grads, offsets = args(node)[1], args(node)[2]
        if len(grads) != len(offsets):
            self.fail(node, f"{node.name} packs {len(grads)} gradients at {len(offsets)} offsets")
        if buffer.reduced is not None:
            self.fail(
                node,
                f"{node.name} packs into bucket {bucket.index} ({bucket.label()}) after "
                f"{buffer.reduced.name} has reduced it; move the reduction behind the last pack",
            )
        for grad, offset in zip(grads, offsets, strict=True):
            self._packed(node, buffer, bucket, grad, offset)
        self.roots.set(node, buffer)

    def _packed_buffer(self, node: fx.Node) -> Buffer:
        packed = args(node)[0]
        buffers = self.roots[packed]
        is_whole = packed.target in (ops.grad_buffer, ops.pack)
        if len(buffers) != 1 or buffers[0].kind is not Kind.PACKED or not is_whole:
            self.fail(node, f"{node.name} is given {packed}, which is no gradient buffer")
        return buffers[0]

    def _packed(
        self, node: fx.Node, buffer: Buffer, bucket: Bucket, grad: fx.Node, offset: int
    ) -> None:
        param = bucket.at.get(offset)
        if param is None:
            self.fail(
                node,
                f"{node.name} packs {name_of(grad)} at offset {offset}, where bucket "
                f"{bucket.index} ({bucket.label()}) has no parameter",
            )
        given = value(grad)
        if tuple(given.shape) != param.shape or given.dtype != bucket.compute_dtype:
            self.fail(
                node,
                f"the gradient packed for {param.name} is {given.dtype}{list(given.shape)}; the "
                f"parameter is {bucket.compute_dtype}{list(param.shape)} ({user_line(grad)})",
            )
        before = buffer.packed.get(offset, grad)
        if before is not grad:
            self.fail(
                node,
                f"the gradient of {param.name} is packed twice: {name_of(before)}, then "
                f"{name_of(grad)} ({user_line(grad)})",
            )
        if self._expected is not None and offset not in self._expected.get(bucket.index, {}):
            self.fail(node, f"{node.name} packs a gradient of {param.name}, which has none")
        buffer.packed[offset] = grad

    def reduce(self, node: fx.Node) -> None:
        bucket, buffer = self.bucket(node), self._packed_buffer(node)
        assert self.layout is not None
        label = f"bucket {bucket.index} ({bucket.label()})"
        if buffer.bucket != bucket.index:
            self.fail(
                node, f"{node.name} reduces as {label} the gradients of bucket {buffer.bucket}"
            )
        if bucket.index in self._reduced:
            first = self._reduced[bucket.index].made.name
            self.fail(node, f"{label} is reduced twice: by {first} and by {node.name}")
        wanted = ops.all_reduce if self.layout.shard_size == 1 else ops.reduce_scatter
        if node.target is not wanted:
            self.fail(
                node,
                f"{label} is sharded over {self.layout.shard_size} ranks: its reduction is "
                f"{_short(wanted)}, not {_short(node.target)}",
            )
        self.numel(node, self.layout.shard_numel(bucket), f"a shard of bucket {bucket.index}")
        self._scale(node, label)
        self._complete(node, buffer, bucket)
        buffer.reduced, buffer.landed = node, False
        made = Buffer(Kind.REDUCED, node, bucket.index, landed=False, source=buffer)
        made.is_away = self.is_away(bucket)
        self._reduced[bucket.index] = made
        self.add(node, made)

    def _scale(self, node: fx.Node, label: str) -> None:
        scale, world = argument(node, 3), self.program.world_size
        if scale != 1.0 / world:
            self.fail(
                node,
                f"{label} is reduced at scale {scale!r}; the mean over {world} ranks is "
                f"1/{world} = {1.0 / world!r}",
            )

    def _complete(self, node: fx.Node, buffer: Buffer, bucket: Bucket) -> None:
        expected = (self._expected or {}).get(bucket.index, {})
        missing = [p for offset, p in expected.items() if offset not in buffer.packed]
        if missing:
            self.fail(
                node,
                f"{node.name} reduces bucket {bucket.index} before the gradient of "
                f"{missing[0].name} is packed; move it behind the last pack of the bucket",
            )
        if len(buffer.packed) < len(bucket.params) and not buffer.zeroed:
            rest = next(p.name for p in bucket.params if p.offset not in buffer.packed)
            self.fail(
                node,
                f"{node.name} reduces bucket {bucket.index}, where nothing was packed for {rest}: "
                f"make {buffer.made.name} with zero=True",
            )

    def offload_grad(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        buffer = self._reduced_slice(node, bucket, "offloads")
        buffer.offloaded, buffer.landed = node, False
        self.roots.set(node, buffer)

    def _reduced_slice(self, node: fx.Node, bucket: Bucket, verb: str) -> Buffer:
        reduced = args(node)[0]
        buffers = self.roots[reduced]
        if len(buffers) != 1 or buffers[0].kind is not Kind.REDUCED:
            self.fail(node, f"{node.name} {verb} {reduced}, which no reduction delivered")
        if buffers[0].bucket != bucket.index:
            self.fail(
                node,
                f"{node.name} {verb} the reduced gradients of bucket {buffers[0].bucket} as those "
                f"of bucket {bucket.index} ({bucket.label()})",
            )
        return buffers[0]

    def store(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        buffer = self._reduced_slice(node, bucket, "stores")
        if buffer.is_away and args(node)[0].args[0] is not buffer.offloaded:
            self.fail(
                node,
                f"{node.name} stores {self.label(buffer)} as it lies on the device; its bucket "
                "lives elsewhere: store what offload_grad's wait returns",
            )
        if buffer.stored is not None:
            self.fail(node, f"{self.label(buffer)} is stored twice: {buffer.stored.name} did it")
        self.dtype(node, bucket.dtype, f"a stored gradient of bucket {bucket.index}")
        buffer.stored = node

    # -- the end ----------------------------------------------------------------------------------
    def finish(self) -> None:
        super().finish()
        for buffer in self._reduced.values():
            if not buffer.landed:
                self.fail(buffer.made, f"{self.label(buffer)} is launched but never waited for")
            if buffer.stored is None:
                self.fail(buffer.made, f"{self.label(buffer)} is never stored: its gradients stay")
        if Fact.GRADS_REDUCED not in self.program.facts:
            return
        output = self.program.graph(self.name).output_node()
        for index, params in (self._expected or {}).items():
            if index not in self._reduced:
                name = next(iter(params.values())).name
                self.fail(
                    output,
                    f"the gradient of {name} is never reduced: backward has no reduction of "
                    f"bucket {index}",
                )
        specs = self.program.outputs[self.name]
        for spec, result in zip(specs, args(output)[0], strict=True):
            if spec.role is not Role.SHARD_GRAD:
                continue
            stored = self._reduced[spec.index].stored if spec.index in self._reduced else None
            if stored is not result:
                self.fail(output, f"returns {result} as the gradient shard of bucket {spec.index}")


def _short(target: Any) -> str:
    return str(target.name()).removeprefix("zerofx::")
