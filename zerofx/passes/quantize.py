"""quantize: gather parameters and reduce gradients as 8-bit blocks, a quarter of fp32's bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zerofx import ops
from zerofx.ir.program import Planned
from zerofx.passes.base import Fact, Pass, Report

_CODED = {"weights": (ops.all_gather, ops.all_gather_blocks),
          "gradients": (ops.reduce_scatter, ops.reduce_scatter_blocks)}  # fmt: skip


@dataclass(frozen=True)
class Quantize(Pass):
    """Let the collectives over the shard axis carry 8-bit blocks instead of full-width values.

    Each value that arrives is within 0.5 / 127 of the largest magnitude among its 128 neighbours,
    which `verify` reports. Shards, optimizer states and sums keep their format. Parameters that
    stay gathered between steps (`persist_below`) and reductions over a replicate axis stay exact.

    Source: ZeRO++ (arXiv 2306.10209): quantized weight communication, and quantized gradients by
    one all-to-all with a single dequantise-and-sum.
    """

    name: ClassVar[str] = "quantize"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED, Fact.GRADS_REDUCED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})

    weights: bool = False
    gradients: bool = False

    def run(self, program: Planned) -> Report:
        if program.layout.shard_size == 1:
            return Report(False, "one rank sends nothing")
        counts = []
        for what, (exact, coded) in _CODED.items():
            found = [
                node
                for gm in program.graphs.values()
                for node in gm.graph.nodes
                if node.target is exact and getattr(self, what)
            ]
            for node in found:
                node.target = coded
            if found:
                counts.append(f"{len(found)} of {what}")
        return Report(bool(counts), ", ".join(counts) or "no collective is coded")
