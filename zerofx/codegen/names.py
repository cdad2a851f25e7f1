"""Names of the schedule's values: from the user's model, unique within a function."""

from __future__ import annotations

import operator

from torch import fx

from zerofx.codegen.text import identifier
from zerofx.ir import ops
from zerofx.ir.meta import Role, info
from zerofx.ir.names import copy_stem, is_moved, move_stem

_STEMS = {
    ops.all_gather: "gather", ops.refresh: "refresh", ops.resident: "full", ops.wait: "full",
    ops.grad_buffer: "grads", ops.reduce_scatter: "reduce", ops.all_reduce: "reduce",
    ops.offload: "offload", ops.reload: "reload", ops.reload_shard: "reload",
    ops.refresh_shard: "refresh", ops.read_shard: "read", ops.offload_grad: "offload",
    ops.write_out: "write", ops.read_back: "read",
}  # fmt: skip


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
        if node.target is ops.wait and node.all_input_nodes[0].target in ops.REDUCES:
            return f"reduced_{where.index}"
        if node.target is ops.wait and node.all_input_nodes[0].target in ops.COPIES:
            return copy_stem(node, where)
        if node.target is ops.wait and is_moved(node):
            return move_stem(node)
        if node.target in _STEMS:
            return f"{_STEMS[node.target]}_{where.index}"  # type: ignore[index]
        if node.target is ops.param_view:
            return identifier(where.name)
        if where.role in (Role.INPUT, Role.BUFFER):
            return identifier(where.name) or node.name
        if where.role is Role.TANGENT:
            return f"grad_{identifier(where.name) or node.name}"
        if where.role is Role.SAVED:
            name = identifier(where.name)
            if any(u.target is ops.reload for u in node.users):
                name = f"{name}_on_host"
            if any(u.target is ops.read_back for u in node.users):
                name = f"{name}_on_nvme"
            return f"{identifier(where.unit)}_{name}" if where.unit else name
        base = node.name
        if node.target is operator.getitem:
            base = f"{node.args[0].name}_{node.args[1]}"  # type: ignore[union-attr]
        return f"{identifier(where.unit)}_{base}" if where.unit else identifier(base)
