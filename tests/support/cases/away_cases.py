"""Programs whose shards and optimizer live off the device, to be broken, and their nodes."""

from __future__ import annotations

from typing import Any

from torch import fx
from verify_cases import find, program

from zerofx import ops
from zerofx.ir.program import FORWARD, Planned
from zerofx.plan.parts import Offload

BOTH = Offload(optimizer="cpu", parameters="cpu")
OPTIMIZER = Offload(optimizer="cpu")


def away(**plan: Any) -> Planned:
    """Return a program whose shards and optimizer live on the host."""
    return program(offload=BOTH, **plan)


def copied() -> Planned:
    """Return one whose optimizer alone does: copies of the shards stay on the device."""
    return program(offload=OPTIMIZER)


def sent(p: Planned, bucket: int, graph: str = FORWARD) -> tuple[Any, Any, Any, Any]:
    """Return a bucket's gather, its wait, and the launch and wait of the shard it sends."""
    gather = find(p, ops.all_gather, bucket, graph)
    held: Any = gather.args[0]
    return gather, wait_of(gather), held.args[0], held


def wait_of(launch: fx.Node) -> fx.Node:
    return next(u for u in launch.users if u.target is ops.wait)


def release_of(held: fx.Node) -> fx.Node:
    return next(u for u in held.users if u.target is ops.release)


def again(node: fx.Node, before: fx.Node, *args: Any) -> fx.Node:
    """Repeat a node before another, with other leading arguments."""
    with node.graph.inserting_before(before):
        copy = node.graph.node_copy(node)
    copy.args = (*args, *copy.args[len(args) :])
    return copy
