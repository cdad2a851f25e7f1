"""The proof of a program, with the number of nodes, values and slots that each invariant covers."""

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
from zerofx.tools.words import counted

_COUNTED: dict[str, Callable[[OpSpec], bool]] = {
    "gathers": lambda op: op.is_gather,
    "copies between tiers": lambda op: op.is_copy or op.is_move,
    "reductions": lambda op: op.is_reduction,
    "updates": lambda op: op.kind is Kind.UPDATE,
    "releases": lambda op: op.kind is Kind.RELEASE,
}


@dataclass(frozen=True)
class ProofView:
    """The proof of a program, for each of its ranks, since all run the same one.

    counts: operations that were followed from launch to end. nodes: of all graphs. values: those
    whose expressions were compared, up to the `outputs`, which must equal the captured ones.
    bounds: the error bound of each op that is not exact.
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
        """Verify a program, and count what was verified.

        Raises:
            ProgramError: the program breaks an invariant.
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
        followed = ", ".join(_counted(n, what) for what, n in self.counts.items() if n)
        lines = [
            f"{self.model}: proved for {ranks}",
            f"  order     {counted(self.nodes, 'node')}: {followed or 'no transfers'}; "
            "every read lies between the wait and the release, every launch has one wait",
            f"  dataflow  {counted(self.values, 'value')}: {self.outputs} outputs, gradients and "
            "buffers equal the captured expressions",
        ]
        for name, rule in self.bounds.items():
            lines.append(f"  values    except for {name}: each value is {rule}")
        if self.slots:
            lines.append(
                f"  memory    {counted(len(self.slots), 'slot')} "
                f"({format_bytes(sum(self.slots))}): never two buffers in one slot"
            )
        return as_text(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "model": self.model, "world": self.world, "nodes": self.nodes, "values": self.values,
            "outputs": self.outputs, "counts": self.counts, "slot_bytes": list(self.slots),
            "bounds": self.bounds,
        }  # fmt: skip


def _counted(number: int, plural: str) -> str:
    """Return a number with one of the names of `_COUNTED`."""
    singular = "copy between tiers" if plural == "copies between tiers" else plural[:-1]
    return counted(number, singular, plural)
