"""Is a mutant harmful, and does anything refuse it? The oracle and the verifier, asked apart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mutants import Base, Mutant, mutate
from mutants_kinds import KINDS
from oracle import Outcome, differences, execute, far_off
from oracle_cases import expected, make_state
from oracle_exchange import Delivery

from zerofx.codegen.emit import fingerprint, render
from zerofx.errors import ProgramError
from zerofx.ir.verify import verify


@cache
def right_outcome(base: Base) -> list[Outcome]:
    """Return what the unmutated program gives; where layers are cut, what the whole graph does."""
    world, team = base.choice.world_size, base.choice.team
    if base.is_placed:
        groups = world // team
        if base.choice.numerics == "bitwise":
            whole = expected(base.case, groups)
        else:  # the captured graph computes something else: no token is dropped, for example
            whole = execute([base.reference] * groups, make_state(base.case, groups))
        return [whole[rank // team] for rank in range(world)]
    return execute([base.program] * world, make_state(base.case, world))


def harm_of(mutant: Mutant) -> str | None:
    """Return what goes wrong when it runs, None if every rank's bits are as they should be.

    Where layers are cut, results are compared with the whole graph's, but for rounding.

    Early and late delivery together see all there is: each of source and destination is touched
    as soon, and as late, as a transfer may.
    """
    base = mutant.base
    state = make_state(base.case, base.choice.world_size, base.choice.team)
    for delivery in (Delivery.LATE, Delivery.EARLY):
        try:
            got = execute(mutant.programs(), state, delivery)
        except Exception as error:  # an operator may raise anything on what a mutant feeds it
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        right = right_outcome(base)
        if base.is_placed:
            found = far_off(right, got)
        else:
            found = differences(right, got, with_shards=True)
        if found:
            return f"{delivery.value}: {found[0]}"
    return None


def refusal_of(mutant: Mutant) -> str | None:
    """Return why it would not run (the verifier's reason, or ranks that disagree), else None."""
    try:
        verify(mutant.program)
    except ProgramError as error:
        return f"verify: {str(error).splitlines()[0]}"
    if mutant.rank is None:
        return None
    mine, theirs = (fingerprint(render(p)) for p in (mutant.program, mutant.base.program))
    return None if mine == theirs else "agreement: the ranks' programs differ"


@dataclass
class Tally:
    """Counts of (harmful?, refused?) by kind, and the mutants on which the two disagree."""

    counts: dict[str, Counter] = field(default_factory=dict)
    accepted_harmful: list[str] = field(default_factory=list)
    refused_harmless: list[str] = field(default_factory=list)

    def add(self, mutant: Mutant) -> None:
        self.note(mutant, harm_of(mutant), refusal_of(mutant))

    def note(self, mutant: Any, harm: str | None, refusal: str | None) -> None:
        """Count a mutant, of which the oracle and the verifier say this."""
        cell = ("harmful" if harm else "harmless") + (" refused" if refusal else " accepted")
        self.counts.setdefault(mutant.kind, Counter())[cell] += 1
        if harm and not refusal:
            self.accepted_harmful.append(f"{mutant}\n    harm: {harm}")
        if refusal and not harm:
            self.refused_harmless.append(f"{mutant}\n    {refusal}")

    def total(self, cell: str, kinds: Iterable[str] | None = None) -> int:
        return sum(c[cell] for k, c in self.counts.items() if kinds is None or k in kinds)

    def table(self) -> str:
        """Return the counts as text, one kind a line."""
        cells = ["harmful refused", "harmful accepted", "harmless accepted", "harmless refused"]
        rows = [f"{'kind':20s}" + "".join(f"{c:>20s}" for c in cells)]
        rows += [
            f"{kind:20s}" + "".join(f"{count[c]:20d}" for c in cells)
            for kind, count in self.counts.items()
        ]
        rows.append(f"{'all':20s}" + "".join(f"{self.total(c):20d}" for c in cells))
        return "\n".join(rows)


def check_every_kind(base: Base) -> None:
    """Demand that two changes of each kind to one program are told apart; some find no place."""
    found = Tally()
    for number in range(2 * len(KINDS)):
        mutant = mutate(number, KINDS[number % len(KINDS)], base, random.Random(number))
        if mutant is not None:
            found.add(mutant)
    assert not found.accepted_harmful, "\n".join(found.accepted_harmful)
    assert found.total("harmful refused") >= 30, found.table()
    assert len(found.refused_harmless) <= 5, "\n".join(found.refused_harmless)
