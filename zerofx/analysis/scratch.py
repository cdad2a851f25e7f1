"""What reductions receive into: buffers that the collectives lend and keep for the next time."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.meta import nbytes, value
from zerofx.ir.program import Program
from zerofx.machine import Machine, preset

Size = tuple[int, torch.dtype]


def scratch_bytes(program: Program) -> int:
    """Return the bytes of receive buffers that a rank ends up with.

    One is made whenever no free one has the wanted size, so what counts is how many of a size are
    lent at once: from a reduction's launch to its wait. NCCL sums in the network and needs none.
    """
    layout, machine = program.layout, program.machine or preset("cpu-gloo")
    if layout is None or machine.backend != "gloo":
        return 0
    total = 0
    for gm in program.graphs.values():
        lent: Counter[Size] = Counter()
        most: Counter[Size] = Counter()
        for node in gm.graph.nodes:
            if node.target in ops.REDUCES and layout.shard_size > 1:
                lent.update(_sharded(node, layout.shard_size, machine))
            elif node.target in ops.REDUCES and layout.replicate_size > 1:
                lent.update(_replicated(node, layout.replicate_size))
            elif node.target is ops.wait and node.args[0].target in ops.REDUCES:
                launch = node.args[0]
                if layout.shard_size > 1:
                    lent.subtract(_sharded(launch, layout.shard_size, machine))
                    if layout.replicate_size > 1:  # begins when the first has ended
                        most |= lent + _replicated(launch, layout.replicate_size)
                elif layout.replicate_size > 1:
                    lent.subtract(_replicated(launch, layout.replicate_size))
            most |= lent
        total += sum(n * numel * dtype.itemsize for (numel, dtype), n in most.items())
    return total


def _sharded(launch: fx.Node, ranks: int, machine: Machine) -> Counter[Size]:
    """Return the buffers of a reduce-scatter over `ranks`."""
    out = value(launch)
    algorithm = machine.algorithm("reduce", "gloo", nbytes(out) * ranks, ranks)
    if algorithm == "direct":
        return Counter({(out.numel(), out.dtype): ranks - 1})
    return Counter({(out.numel() * ranks, out.dtype): 1})


def _replicated(launch: fx.Node, ranks: int) -> Counter[Size]:
    """Return the buffers of an all-reduce over `ranks`: whole, or by slices and their sum."""
    out = value(launch)
    if ranks == 2:
        return Counter({(out.numel(), out.dtype): 1})
    return Counter({(-(-out.numel() // ranks), out.dtype): ranks})
