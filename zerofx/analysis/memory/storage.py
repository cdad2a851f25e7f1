"""Storages: single allocations, each held from one time to another, for some purpose.

Time is a number over the nodes of forward, then backward, in execution order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import fx

from zerofx.compat.wrapper import RegionTrace
from zerofx.ir.graphs import is_alias
from zerofx.ir.meta import Info, info
from zerofx.ir.program import FORWARD, Planned
from zerofx.ir.spec import OpSpec, slot_of, spec_of, takes_slot
from zerofx.layout.buckets import Bucket
from zerofx.layout.tiers import Tier
from zerofx.policy import reduction, shard_copies
from zerofx.policy.shard_copies import SentAs


class Category(str, Enum):
    """The purpose of memory."""

    PARAMETERS = "parameters"  # shards; full parameters before they are sharded
    GATHERED = "gathered"  # resident and kept copies of full parameters
    GRADIENTS = "gradients"  # p.grad, and full gradients that are not packed yet
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"  # forward values that backward reads
    TEMPORARIES = "temporaries"
    COMMUNICATION = "communication"  # slots, and receive buffers of reductions
    INPUTS = "inputs"
    OUTPUTS = "outputs"
    BUFFERS = "buffers"
    HOST = "host"  # in host memory: not counted for the device
    NVME = "nvme"  # in files


CATEGORY_OF = {Tier.HOST: Category.HOST, Tier.NVME: Category.NVME}  # values off the device


@dataclass(eq=False)
class Storage:
    """One allocation: `nbytes` held from time `birth` to time `death`, both inclusive.

    slot: the slot that it occupies, whose bytes are held at all times; -1 for memory of its own.
    is_lent: it occupies a place of the host, which others borrow before and after.
    """

    category: Category
    nbytes: int
    name: str
    birth: int
    death: int
    where: Info
    slot: int = -1
    is_lent: bool = False


@dataclass(frozen=True)
class Lifetimes:
    """All storages of a step, and the node that runs at each time."""

    storages: tuple[Storage, ...]
    nodes: tuple[tuple[str, fx.Node], ...]

    @property
    def end(self) -> int:
        return max(len(self.nodes) - 1, 0)

    @cached_property
    def ops(self) -> tuple[tuple[int, fx.Node, OpSpec], ...]:
        """The time, the node and the spec of each call of an op of zerofx, in order."""
        specs = ((time, node, spec_of(node)) for time, (_, node) in enumerate(self.nodes))
        return tuple((time, node, spec) for time, node, spec in specs if spec is not None)

    def times_of(self, test: Callable[[OpSpec], bool]) -> dict[int, int]:
        """Return bucket or value -> the last time at which an op that passes a test runs."""
        return {info(node).index: time for time, node, spec in self.ops if test(spec)}


@dataclass(frozen=True)
class CompiledRegion:
    """One call of a region compiled by Inductor: its inputs, results and allocations."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    trace: RegionTrace


Compiled = Mapping[fx.Node, CompiledRegion]  # by the region's first node


def landing_dtype(program: Planned, bucket: Bucket) -> torch.dtype:
    """Return the format in which a bucket's gradient is offloaded to the host."""
    return reduction.leaves_as(bucket, is_scaled(program))


def is_scaled(program: Planned) -> bool:
    """Return whether zerofx itself scales the loss of this program."""
    return program.plan.precision.is_scaled


def sent_as(program: Planned, bucket: Bucket) -> SentAs:
    """Return the form in which a bucket that is off the device is sent to it."""
    return shard_copies.sent_as(bucket, program.plan.offload.delayed)


def forward_slots(program: Planned) -> frozenset[int]:
    """Return the slots that forward gathers into, which persist between calls."""
    if FORWARD not in program.graphs:
        return frozenset()
    found = (slot_of(n) for n in program.graph(FORWARD).nodes if takes_slot(n))
    return frozenset(slot for slot in found if slot >= 0)


def is_view(node: fx.Node) -> bool:
    """Return whether a node's value is in the storage of its argument."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return node.op == "call_function" and _is_view_op(node)


_VIEW_OPS: dict[Any, bool] = {}


def _is_view_op(node: fx.Node) -> bool:
    known = _VIEW_OPS.get(node.target)
    if known is None:
        known = _VIEW_OPS[node.target] = is_alias(node)
    return known


def span_bytes(val: torch.Tensor) -> int:
    """Return the bytes of a fresh tensor's storage, from its shape and strides."""
    return _span_bytes(val.shape, val.stride(), val.dtype)


@lru_cache(maxsize=8192)
def _span_bytes(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> int:
    if 0 in shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return (last + 1) * dtype.itemsize
