"""fuse: replace patterns that have a zerofx kernel by one node each, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx.errors import PlanError
from zerofx.ir.program import Planned
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.patterns.layer_norm import find_layer_norms
from zerofx.passes.patterns.loss import find_losses
from zerofx.passes.patterns.match import Fusion, Match
from zerofx.passes.patterns.pointwise import find_gated, find_rotary
from zerofx.passes.patterns.rms_norm import find_rms_norms
from zerofx.plan.fields import nearest

PATTERNS: dict[str, Callable[[fx.Graph], Iterator[Match]]] = {
    "linear-cross-entropy": find_losses,
    "rms-norm": find_rms_norms,
    "layer-norm": find_layer_norms,
    "gated-activation": find_gated,
    "rotary-embedding": find_rotary,
}


@dataclass(frozen=True)
class Fuse(Pass):
    """Replace loss heads, norms, gated activations and rotary embeddings by fused nodes.

    Each pattern is matched in forward and backward together, in the joint graph, and only if
    nothing outside reads a value inside it. `patterns` names the patterns to look for, joined by
    "+"; "all" selects every one and "none" selects none.

    Raises:
        PlanError: no pattern has that name.
    """

    name: ClassVar[str] = "fuse"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CAPTURED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED, Fact.SPLIT})

    patterns: str = "all"

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in PATTERNS:
                raise PlanError(f"fuse: no pattern is named {name!r}{nearest(name, PATTERNS)}")

    @property
    def names(self) -> tuple[str, ...]:
        if self.patterns == "none":
            return ()
        return tuple(PATTERNS) if self.patterns == "all" else tuple(self.patterns.split("+"))

    def run(self, program: Planned) -> Report:
        counts = dict.fromkeys(self.names, 0)
        for gm in program.graphs.values():
            for name in self.names:
                fusion = Fusion(gm.graph)
                counts[name] += sum(fusion.put(m) for m in list(PATTERNS[name](gm.graph)))
        found = [f"{count} {name}" for name, count in counts.items() if count]
        return Report(bool(found), ", ".join(found) or "no pattern found")
