"""What the value of a node lies in: memory of its own, a slot, or that of an argument."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from zerofx.analysis.storage import (
    CATEGORY_OF,
    Category,
    Storage,
    is_scaled,
    is_view,
    landing_dtype,
    sent_as,
    slot_of,
    span_bytes,
)
from zerofx.ir import ops
from zerofx.ir.graphs import is_in_place
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import FORWARD, Program
from zerofx.runtime.homes import staged_bytes
from zerofx.runtime.layout import Bucket
from zerofx.runtime.policy import reduction, shard_copies
from zerofx.runtime.policy.reduction import End
from zerofx.runtime.policy.shard_copies import SentAs
from zerofx.runtime.tiers import Tier


class Places:
    """The storages of a program's values, as a walk through its graphs finds them.

    held: node of the graph that is walked -> what its value lies in; start: the time of the first.
    """

    graph: str
    start: int

    def __init__(self, program: Program, packs_apart: bool) -> None:
        self.program, self.packs_apart = program, packs_apart
        self.storages: list[Storage] = []
        self.held: dict[fx.Node, tuple[Storage, ...]] = {}
        self.given: dict[tuple, tuple[Storage, ...]] = {}  # placeholders that both graphs share
        self.saved: dict[int, tuple[Storage, ...]] = {}
        self.forever: list[Storage] = []

    def hold(self, node: fx.Node, time: int) -> tuple[Storage, ...]:
        """Return what the value of the node that runs at `time` lies in."""
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            return self._own(node, Category.BUFFERS, value(node), time, forever=True)
        target = node.target
        if target is operator.getitem:
            source = node.all_input_nodes[0]
            parts, index = self.held[source], node.args[1]
            is_taken_apart = not is_view(source) and len(parts) > 1
            return (parts[index],) if is_taken_apart else parts  # type: ignore[index]
        if target in ops.ALL and target not in _MAKES:
            return self._communication(node, time)
        if is_view(node):
            return self.held[next(a for a in node.args if isinstance(a, fx.Node))]
        val = value(node)
        if isinstance(val, (tuple, list)):
            made = [self._own(node, self.category(node), v, time) for v in val]
            return tuple(m[0] if m else self._nothing(node, time) for m in made)
        return self._own(node, self.category(node), val, time)

    def _own(
        self, node: fx.Node, category: Category, val: Any, time: int,
        slot: int = -1, forever: bool = False, name: str = "",
    ) -> tuple[Storage, ...]:  # fmt: skip
        if not isinstance(val, torch.Tensor):
            return ()
        where = info(node)
        name = name or where.name or node.name
        is_lent = category is Category.HOST and node.op != "placeholder"
        made = Storage(category, span_bytes(val), name, time, time, where, slot, is_lent)
        self.storages.append(made)
        if forever:
            made.birth = 0
            self.forever.append(made)
        return (made,)

    def _nothing(self, node: fx.Node, time: int) -> Storage:
        return Storage(Category.TEMPORARIES, 0, node.name, time, time, info(node))

    def _placeholder(self, node: fx.Node) -> tuple[Storage, ...]:
        where = info(node)
        if where.role is Role.SAVED and where.index in self.saved:
            return self.saved[where.index]
        is_early = where.role is Role.TANGENT or self.graph == FORWARD
        key = (where.role, where.index if where.role is not Role.PARAM else -1, where.name)
        if key not in self.given:
            category = _GIVEN.get(where.role, Category.TEMPORARIES)  # type: ignore[arg-type]
            if where.role is Role.SHARD:
                category = CATEGORY_OF.get(self._home(node), category)
            birth = self.start if is_early else 0
            is_forever = where.role is not Role.TANGENT
            self.given[key] = self._own(node, category, value(node), birth, forever=is_forever)
        return self.given[key]

    def _communication(self, node: fx.Node, time: int) -> tuple[Storage, ...]:
        """Return what a zerofx op's result lies in: a slot, memory of its own, or its argument."""
        target = node.target
        if target in ops.COPIES:
            return self._copy(node, time)
        if target is ops.wait and node.all_input_nodes[0].target in _HOLD_SOURCE:
            return self.held[node.all_input_nodes[0]][:1]  # the source goes with the wait
        if target is ops.offload_grad:
            return (*self._landing(node, time), *self._leaving(node, time))
        if is_in_place(node, self.program.layout) and not self.packs_apart:
            return ()  # the gradient's own memory
        if target is ops.read_shard:
            assert self.program.layout is not None
            made = self._own(node, Category.HOST, value(node), time)
            made[0].nbytes = staged_bytes(self.program.layout, info(node).index)
            return made
        if target in (ops.all_gather, ops.reload_shard, ops.grad_buffer):
            is_grad = target is ops.grad_buffer
            category = Category.GRADIENTS if is_grad else Category.GATHERED
            slot = slot_of(node)
            name = where.unit if (where := info(node)).unit else node.name
            made = self._own(node, category, value(node), time, slot, name=name)
            return made if target is not ops.reload_shard else made + self._sent(node, time)
        if target in ops.REDUCES and self._home(node) is not Tier.DEVICE:  # until it has left
            return self._own(node, Category.GRADIENTS, value(node), time, name="reduced slice")
        if target in ops.REDUCES and not self._reduces_apart(node):
            return ()  # the gradient's shard, or what is lent for it
        if target in (ops.refresh, ops.refresh_shard):
            return self._casting(node, time)
        if target is ops.resident:
            return ()  # a copy that stays
        if target in (ops.release, ops.store_grad):
            return ()  # what is stored lies in p.grad
        return self.held[next(iter(node.all_input_nodes))]

    def _sent(self, node: fx.Node, time: int) -> tuple[Storage, ...]:
        """Return what a reload holds until its wait: what was read for it, or a cast of that."""
        if sent_as(self.program, self._bucket(node)) is SentAs.CAST:
            return self._own(node, Category.HOST, value(node), time, name="cast copy")
        return self.held[node.all_input_nodes[0]]

    def _reduces_apart(self, node: fx.Node) -> bool:
        """Tell whether a bucket is reduced where it was packed, to be added to p.grad then."""
        if self.program.layout is None:
            return False
        end = reduction.end_of(self.program.layout, self._bucket(node), self.packs_apart)
        return end is End.PACKED

    def _landing(self, node: fx.Node, time: int) -> tuple[Storage, ...]:
        """Return where a reduced slice arrives: in p.grad, or beside it in another format."""
        scaled = is_scaled(self.program)
        if reduction.lands_in_gradient(self._bucket(node), scaled, self.packs_apart):
            return (self._nothing(node, time),)
        return self._own(node, Category.HOST, value(node), time)

    def _leaving(self, node: fx.Node, time: int) -> tuple[Storage, ...]:
        """Return what is copied of it: the slice itself, or what that is unscaled into."""
        bucket = self._bucket(node)
        if landing_dtype(self.program, bucket) is value(node).dtype:
            return self.held[node.all_input_nodes[0]]
        wide = value(node).to(bucket.dtype)
        return self._own(node, Category.GRADIENTS, wide, time, name="reduced slice, unscaled")

    def _casting(self, node: fx.Node, time: int) -> tuple[Storage, ...]:
        """Return the cast of a shard on the host of which a copy that stays is made, if any."""
        is_away = self._home(node) is not Tier.DEVICE
        if not is_away or not shard_copies.refresh_moves(self.graph == FORWARD):
            return ()
        if sent_as(self.program, self._bucket(node)) is not SentAs.CAST:
            return ()
        if node.target is ops.refresh_shard:
            return self._nothing(node, time), *self._own(node, Category.HOST, value(node), time)
        assert self.program.layout is not None  # the copy to this rank's slice is waited for there
        cast = span_bytes(value(node)) // self.program.layout.shard_size
        lent = Storage(Category.HOST, cast, "cast copy", time, time, info(node), is_lent=True)
        self.storages.append(lent)
        return ()

    def _bucket(self, node: fx.Node) -> Bucket:
        assert self.program.layout is not None
        return self.program.layout.buckets[info(node).index]

    def _home(self, node: fx.Node) -> Tier:
        return Tier.DEVICE if self.program.layout is None else self._bucket(node).home

    def _copy(self, node: fx.Node, time: int) -> tuple[Storage, ...]:
        """Return where a copy arrives, and behind that its source, which is held until the wait."""
        source = self.held[node.all_input_nodes[0]]
        category = _ARRIVES[node.target]  # type: ignore[index]
        for storage in source:
            if storage.category is Category.TEMPORARIES:
                storage.category = Category.ACTIVATIONS
        return self._own(node, category, value(node), time) + source

    def category(self, node: fx.Node) -> Category:
        """Return what fresh memory is for."""
        if any(user.target is ops.pack for user in node.users):
            return Category.GRADIENTS
        return Category.TEMPORARIES


_ARRIVES = {
    ops.offload: Category.HOST,
    ops.write_out: Category.NVME,
    ops.read_back: Category.HOST,
    ops.reload: Category.ACTIVATIONS,
}
_HOLD_SOURCE = ops.COPIES | {ops.offload_grad, ops.reload_shard, ops.refresh_shard}
_MAKES = frozenset({ops.sync_buffers})
_GIVEN = {
    Role.PARAM: Category.PARAMETERS,
    Role.SHARD: Category.PARAMETERS,
    Role.BUFFER: Category.BUFFERS,
    Role.INPUT: Category.INPUTS,
    Role.TANGENT: Category.OUTPUTS,
    Role.SAVED: Category.ACTIVATIONS,
}
