"""The storages of a node's value: memory of its own, a slot, or the memory of an argument."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from zerofx.analysis.memory.micro import Micro
from zerofx.analysis.memory.storage import (
    CATEGORY_OF,
    Category,
    Storage,
    is_scaled,
    is_view,
    sent_as,
    span_bytes,
)
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import FORWARD, Planned
from zerofx.ir.spec import gradients_of, spec_of
from zerofx.layout.buckets import Bucket
from zerofx.layout.tiers import Tier
from zerofx.policy import reduction, shard_copies
from zerofx.policy.reduction import End
from zerofx.policy.shard_copies import SentAs


class Places:
    """The storages of a program's values, collected by a walk through its graphs.

    held: node of the present graph -> the storages of its value; start: the time of its first node;
    overwritten: the arguments that its nodes write over, by position.
    """

    graph: str
    start: int
    overwritten: dict[fx.Node, int]

    def __init__(self, program: Planned, micro: Micro) -> None:
        self.program, self.micro, self.packs_apart = program, micro, micro.packs_apart
        self.storages: list[Storage] = []
        self.held: dict[fx.Node, tuple[Storage, ...]] = {}
        self.given: dict[tuple, tuple[Storage, ...]] = {}  # placeholders that both graphs share
        self.saved: dict[int, tuple[Storage, ...]] = {}
        self.forever: list[Storage] = []

    def hold(self, node: fx.Node, time: int) -> tuple[Storage, ...]:
        """Return the storages of the value of the node that runs at `time`."""
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            return self.own(node, Category.BUFFERS, value(node), time, forever=True)
        target = node.target
        if target is operator.getitem:
            source = node.all_input_nodes[0]
            parts, index = self.held[source], node.args[1]
            is_taken_apart = not is_view(source) and len(parts) > 1
            return (parts[index],) if is_taken_apart else parts  # type: ignore[index]
        if node in self.overwritten:
            return self.held[node.args[self.overwritten[node]]]  # type: ignore[index]
        spec = spec_of(node)
        if spec is not None and spec.hold is not None:
            return spec.hold(self, node, time)
        if is_view(node):
            return self.held[next(a for a in node.args if isinstance(a, fx.Node))]
        val = value(node)
        if isinstance(val, (tuple, list)):
            made = [self.own(node, self.category(node), v, time) for v in val]
            return tuple(m[0] if m else self.nothing(node, time) for m in made)
        return self.own(node, self.category(node), val, time)

    def own(
        self, node: fx.Node, category: Category, val: Any, time: int,
        slot: int = -1, forever: bool = False, name: str = "",
    ) -> tuple[Storage, ...]:  # fmt: skip
        """Return memory of the value's own, with the slot's size if it is in a slot."""
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

    def nothing(self, node: fx.Node, time: int) -> Storage:
        """Return a storage of no bytes."""
        return Storage(Category.TEMPORARIES, 0, node.name, time, time, info(node))

    def _placeholder(self, node: fx.Node) -> tuple[Storage, ...]:
        where = info(node)
        if where.role is Role.SAVED and where.index in self.saved:
            return self.saved[where.index]
        is_tangent = where.role is Role.TANGENT
        is_own_result = is_tangent and where.index < self.program.stage.num_outputs
        if is_own_result and self.program.joins_results and not is_scaled(self.program):
            return ()  # a part of the whole gradient, which stands beside the graphs
        is_early = is_tangent or self.graph == FORWARD
        key = (where.role, where.index if where.role is not Role.PARAM else -1, where.name)
        if key not in self.given:
            category = _GIVEN.get(where.role, Category.TEMPORARIES)  # type: ignore[arg-type]
            if where.role is Role.SHARD:
                category = CATEGORY_OF.get(self.home(node), category)
            birth = self.start if is_early else 0
            is_forever = not is_tangent
            self.given[key] = self.own(node, category, value(node), birth, forever=is_forever)
        return self.given[key]

    def is_cast_on_way(self, node: fx.Node) -> bool:
        """Return whether a refresh casts a host shard into temporary memory before the copy."""
        is_away = self.home(node) is not Tier.DEVICE
        if not is_away or not shard_copies.refresh_moves(self.graph == FORWARD):
            return False
        return sent_as(self.program, self.bucket(node)) is SentAs.CAST

    def reduces_apart(self, node: fx.Node) -> bool:
        """Return whether a bucket is reduced where it was packed, and then added to p.grad."""
        end = reduction.end_of(self.program.layout, self.bucket(node), self.packs_apart)
        return end is End.PACKED

    def bucket(self, node: fx.Node) -> Bucket:
        """Return the bucket of a node."""
        return self.program.layout.buckets[info(node).index]

    def home(self, node: fx.Node) -> Tier:
        """Return the tier of that bucket."""
        return self.bucket(node).home

    def category(self, node: fx.Node) -> Category:
        """Return the category of newly allocated memory."""
        if any(gradients_of(user) for user in node.users):
            return Category.GRADIENTS
        return Category.TEMPORARIES


_GIVEN = {
    Role.PARAM: Category.PARAMETERS,
    Role.SHARD: Category.PARAMETERS,
    Role.BUFFER: Category.BUFFERS,
    Role.INPUT: Category.INPUTS,
    Role.TANGENT: Category.OUTPUTS,
    Role.SAVED: Category.ACTIVATIONS,
}
