"""Names of the schedule's values: from the user's model, unique within a function."""

from __future__ import annotations

import operator

from torch import fx

from zerofx.codegen.text import identifier
from zerofx.ir.meta import Role, info
from zerofx.ir.names import op_stem
from zerofx.ir.spec import spec_of
from zerofx.layout.tiers import Tier


class Names:
    """Hands out one identifier a node."""

    def __init__(self, reserved: tuple[str, ...] = ()) -> None:
        self.taken = set(reserved)
        self.of: dict[fx.Node, str] = {}

    def bind(self, node: fx.Node) -> str:
        """Return the node's name, made on first use."""
        if node not in self.of:
            self.of[node] = self._free(self._stem(node))
        return self.of[node]

    def share(self, node: fx.Node, other: fx.Node) -> None:
        """Let a node go by another's name (a pack is its buffer)."""
        self.of[node] = self.bind(other)

    def _free(self, stem: str) -> str:
        name, k = stem, 1
        while name in self.taken:
            k += 1
            name = f"{stem}_{k}"
        self.taken.add(name)
        return name

    def _stem(self, node: fx.Node) -> str:
        where = info(node)
        if stem := op_stem(node):
            return stem
        if where.role in (Role.INPUT, Role.BUFFER):
            return identifier(where.name) or node.name
        if where.role is Role.TANGENT:
            return f"grad_{identifier(where.name) or node.name}"
        if where.role is Role.SAVED:
            name = identifier(where.name)
            if (tier := _waits_in(node)) is not Tier.DEVICE:
                name = f"{name}_on_{tier.value}"
            return f"{identifier(where.unit)}_{name}" if where.unit else name
        base = node.name
        if node.target is operator.getitem:
            base = f"{node.args[0].name}_{node.args[1]}"  # type: ignore[union-attr]
        return f"{identifier(where.unit)}_{base}" if where.unit else identifier(base)


def _waits_in(node: fx.Node) -> Tier:
    """Return the tier in which a saved value waits: the one that its way back begins in."""
    for user in node.users:
        spec = spec_of(user)
        if spec is not None and spec.is_copy:
            return Tier.HOST if spec.lands is Tier.DEVICE else Tier.NVME
    return Tier.DEVICE
