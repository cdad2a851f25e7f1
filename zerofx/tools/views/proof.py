"""What was proved of a program: how much of each invariant's matter there was to look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerofx.ir.program import Planned, Reference
from zerofx.ir.spec import Kind, OpSpec, spec_of
from zerofx.ir.text import as_text
from zerofx.ir.verify import bounds, verify
from zerofx.ir.verify_values import Numbering
from zerofx.plan.sizes import format_bytes

_COUNTED: dict[str, Callable[[OpSpec], bool]] = {
    "gathers": lambda op: op.is_gather,
    "copies between tiers": lambda op: op.is_copy or op.is_move,
    "reductions": lambda op: op.is_reduction,
    "updates": lambda op: op.kind is Kind.UPDATE,
    "releases": lambda op: op.kind is Kind.RELEASE,
}


@dataclass(frozen=True)
class ProofView:
    """A program that holds, on every one of its ranks: all run this same one.

    counts: what was followed from its launch to its end. nodes: of all graphs. values: those whose
    expressions were compared, down to `outputs` that must be what was captured. bounds: ops that
    are not exact, and within what.
    """

    model: str
    world: int
    nodes: int
    values: int
    outputs: int
    counts: dict[str, int]
    slots: tuple[int, ...]
    bounds: dict[str, str]

    @classmethod
    def of(cls, program: Planned) -> ProofView:
        """Verify a program, and say what there was to verify.

        Raises:
            ProgramError: it breaks an invariant.
        """
        verify(program)
        nodes = [n for gm in program.graphs.values() for n in gm.graph.nodes]
        numbering = Numbering(program)
        called = [spec for n in nodes if (spec := spec_of(n)) is not None]
        counts = {what: sum(map(counts_it, called)) for what, counts_it in _COUNTED.items()}
        return cls(
            program.model_name, program.world_size, len(nodes), len(numbering.of),
            len(numbering.outputs) if isinstance(program.reference, Reference) else 0,
            counts, program.slot_bytes,
            {name: str(rule) for name, rule in bounds(program).items()},
        )  # fmt: skip

    def __str__(self) -> str:
        ranks = f"each of {self.world} ranks" if self.world > 1 else "its one rank"
        followed = ", ".join(f"{n} {what}" for what, n in self.counts.items() if n)
        lines = [
            f"{self.model}: proved for {ranks}",
            f"  order     {self.nodes} nodes: {followed or 'nothing is moved'}; each read between "
            "its wait and its release, each launch waited for once",
            f"  dataflow  {self.values} values: {self.outputs} outputs, gradients and buffers are "
            "the expressions that were captured",
        ]
        for name, rule in self.bounds.items():
            lines.append(f"  values    but for {name}: each value is {rule}")
        if self.slots:
            lines.append(
                f"  memory    {len(self.slots)} slots ({format_bytes(sum(self.slots))}): no two "
                "buffers in one at a time"
            )
        return as_text(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return {
            "model": self.model, "world": self.world, "nodes": self.nodes, "values": self.values,
            "outputs": self.outputs, "counts": self.counts, "slot_bytes": list(self.slots),
            "bounds": self.bounds,
        }  # fmt: skip
