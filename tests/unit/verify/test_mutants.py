"""The verifier against random mutants, judged harmful or not by the oracle.

None harmful may pass, and at most 5 % of the harmless ones may be refused.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from models import CASES
from mutants import (
    BASES,
    CAPACITY_BASES,
    CONTEXT_BASES,
    CROSSED_BASES,
    EXPERT_BASES,
    MASKED_BASES,
    PLACED_BASES,
    RING_BASES,
    TILED_PARTS,
    Mutant,
    generate,
)
from mutants_drop import drop_update, drop_wait
from mutants_judge import Tally, harm_of, refusal_of
from mutants_kinds import KINDS
from mutants_move import move_update
from mutants_placed import (
    EXPERT_KINDS,
    HARMFUL,
    HARMLESS,
    MASK_KINDS,
    PLACED,
    RING_KINDS,
    drop_conversion,
    reduce_apart,
    reduce_early,
    told,
    useless_conversion,
    wrong_cut,
    wrong_rows,
)

from zerofx.errors import ProgramError
from zerofx.ir.meta import info
from zerofx.ir.spec import Kind, kind_of
from zerofx.ir.verify import verify
from zerofx.policy import ring

FEW = [*BASES[:3], *BASES[15:22], *BASES[-4:]]
SPILLED = BASES[-2:]
BY_CHANCE = 0.01  # a dozen small draws: one in twenty each would make every other run fail
BY_ANY = ("mutants_drop", "mutants_move", "mutants_value")


def tally(count: int, seed: int, bases: list = BASES) -> Tally:
    found = Tally()
    for mutant in generate(count, seed, bases):
        found.add(mutant)
    return found


def check(found: Tally, refused_at_most: float, by_chance: float = 1.0) -> None:
    """Demand that no harm passes, and little that does none is refused.

    by_chance: a draw with more refused is accepted too if one of this size has as many with at
        least this probability; by default no such draw is.
    """
    print(found.table())
    assert not found.accepted_harmful, "\n".join(found.accepted_harmful)
    refused = len(found.refused_harmless)
    harmless = refused + found.total("harmless accepted")
    report = "\n".join(found.refused_harmless)
    share = refused_at_most
    as_many = sum(
        math.comb(harmless, n) * share**n * (1 - share) ** (harmless - n)
        for n in range(refused, harmless + 1)
    )
    is_few = refused <= share * harmless or as_many >= by_chance
    assert is_few, f"{refused} of {harmless} refused:\n{report}"


def test_verify_tells_harm_from_harmless() -> None:
    found = tally(len(KINDS), 1, FEW)
    harmful, harmless = (found.total(f"{h} {r}") for h, r in
                         [("harmful", "refused"), ("harmless", "accepted")])  # fmt: skip
    assert min(harmful, harmless) >= 8, "the draw is one-sided"
    check(found, 0.1, by_chance=BY_CHANCE)  # of some 15 harmless ones, two are no news


def test_of_what_goes_on_to_nvme() -> None:
    """Waits left out, reads before the write, values in each other's places."""
    found = Tally()
    kinds = [k for k in KINDS if k.__module__ == "mutants_copies"] + [drop_wait]
    for mutant in generate(4 * len(kinds), 1, SPILLED, kinds):
        found.add(mutant)
    assert found.total("harmful refused") > 20
    check(found, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 103))
def test_verify_tells_harm_from_harmless_on_many(seed: int) -> None:
    check(tally(4 * len(KINDS), seed), 0.05, by_chance=BY_CHANCE)


def test_of_layers_that_are_cut() -> None:
    """Collectives left out, doubled, over others; summands read as sums; parts of other ranks."""
    found = Tally()
    kinds = [k for k in (*HARMFUL, *HARMLESS) if k not in (reduce_apart, reduce_early, wrong_rows)]
    for mutant in generate(len(kinds), 3, PLACED_BASES[:1], kinds):
        found.add(mutant)
    assert found.total("harmful refused") > 10 and found.total("harmless accepted") > 2
    check(found, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(270, 272))
def test_of_experts_that_are_divided(seed: int) -> None:
    """Rows of other owners, other ends of groups, products of all rows; and all of the above."""
    found = Tally()
    unsuited = ("wrong_joined", "sum_another")  # no sums of this model share a message
    kinds = [*EXPERT_KINDS, *map(told, EXPERT_KINDS)] * 3
    kinds += [k for k in PLACED if not k.__name__.startswith(unsuited)]
    for mutant in generate(len(kinds), seed, EXPERT_BASES, kinds):
        found.add(mutant)
    own = [k.__name__.replace("_", "-") for k in EXPERT_KINDS]
    assert found.total("harmful refused", own) >= 2 * len(own)
    check(found, 0.1, by_chance=BY_CHANCE)


@pytest.mark.slow
def test_of_experts_with_slots() -> None:
    """All-to-alls of slots left out, doubled, over other dimensions; values of other layers."""
    found = Tally()
    unsuited = ("wrong_joined", "sum_another", "reduce_apart", "wrong_rows")
    kinds = [k for k in PLACED if not k.__name__.startswith(unsuited)]
    for mutant in generate(len(kinds), 5, CAPACITY_BASES, kinds):
        found.add(mutant)
    assert found.total("harmful refused") > 10 and found.total("harmless accepted") > 2
    check(found, 0.1)


NO_TENSOR = {"wrong_rows", "wrong_part", "wrong_joined", "sum_another", "reduce_apart"}


def test_of_sequences_that_are_cut() -> None:
    """All-to-alls left out, doubled, along other dimensions and axes; parts of other ranks."""
    found = Tally()
    kinds = [k for k in (*HARMFUL, *HARMLESS) if k.__name__ not in NO_TENSOR | {"reduce_early"}]
    for mutant in generate(len(kinds), 3, CONTEXT_BASES[:1], kinds):
        found.add(mutant)
    assert found.total("harmful refused") > 8 and found.total("harmless accepted") > 2
    check(found, 0.1)


def test_of_layers_and_sequences_that_are_cut() -> None:
    """Collectives over the one axis in the place of the other, too.

    To gather twice what the largest logits are taken of changes nothing, and is refused.
    """
    found = Tally()
    left_out = ("wrong_joined", "sum_another", "reduce_early", "reduce_apart", "double_conversion")
    kinds = [k for k in (*HARMFUL, *HARMLESS) if k.__name__ not in left_out]
    for mutant in generate(len(kinds), 3, CROSSED_BASES[:1], kinds):
        found.add(mutant)
    assert found.total("harmful refused") > 8 and found.total("harmless accepted") > 2
    check(found, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(270, 272))
def test_of_layers_and_sequences_that_are_cut_many(seed: int) -> None:
    found = Tally()
    kinds = [k for k in PLACED if not k.__name__.startswith(("wrong_joined", "sum_another"))]
    for mutant in generate(3 * len(kinds), seed, CROSSED_BASES, kinds):
        found.add(mutant)
    assert found.total("harmful refused") > 20
    check(found, 0.1, by_chance=BY_CHANCE)


def test_of_rings_of_attention() -> None:
    """Other ranks, masks, scales and operands; steps left out; parts in another order."""
    found = Tally()
    kinds = [*RING_KINDS, *map(told, RING_KINDS), wrong_cut, drop_conversion, useless_conversion]
    for mutant in generate(len(kinds), 3, RING_BASES[:1], kinds):
        found.add(mutant)
    assert found.total("harmful refused") > 6
    check(found, 0.1)


@pytest.mark.slow
def test_of_rings_with_masks() -> None:
    """Masks left out, of other queries and of other keys, too; some queries see no key.

    Of the kinds for all rings one is left out: this mask is causal whatever the call says.
    """
    found = Tally()
    kinds = [*MASK_KINDS, *map(told, MASK_KINDS), *RING_KINDS[1:], wrong_cut, drop_conversion]
    for mutant in generate(2 * len(kinds), 4, MASKED_BASES, kinds):
        found.add(mutant)
    own = [k.__name__.replace("_", "-") for k in MASK_KINDS]
    assert found.total("harmful refused", own) >= len(own)
    check(found, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(260, 261))
def test_of_rings_of_attention_many(seed: int) -> None:
    found = Tally()
    kinds = [k for k in PLACED if not k.__name__.startswith((*NO_TENSOR, "reduce_early"))]
    kinds += [*RING_KINDS, *RING_KINDS, *map(told, RING_KINDS)]
    for mutant in generate(3 * len(kinds), seed, RING_BASES, kinds):
        found.add(mutant)
    own = [k.__name__.replace("_", "-") for k in RING_KINDS]
    assert found.total("harmful refused", own) > 10
    check(found, 0.1, by_chance=BY_CHANCE)


@pytest.mark.parametrize("wrong", ["source", "dropped", "twice", "masked"])
def test_wrong_steps_of_a_ring_are_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of all ranks together must be attention over the whole sequence."""
    program, right = RING_BASES[0].program, ring.blocks
    verify(program)

    def steps(rank: int, ranks: int, queries: int, keys: int, causal: bool) -> tuple:
        first, *rest = right(rank, ranks, queries, keys, causal)
        other = replace(rest[0], source=rank) if wrong == "source" else rest[0]
        if wrong == "masked":
            other = replace(other, is_causal=True)
        return {"dropped": (first,), "twice": (first, other, other)}.get(wrong, (first, other))

    monkeypatch.setattr(ring, "blocks", steps)
    ring.fault_of.cache_clear()
    with pytest.raises(ProgramError, match="of their chunks queries"):
        verify(program)
    monkeypatch.undo()
    ring.fault_of.cache_clear()
    verify(program)


def test_of_tiles_of_layers_that_are_cut() -> None:
    """Collectives of tiles, and the gathers, waits and packs of tiles."""
    found = Tally()
    left_out = {"reduce_early", "reduce_apart", "wrong_rows", "wrong_joined", "sum_another"}
    kinds = [k for k in HARMFUL if k.__name__ not in left_out]
    kinds += [k for k in KINDS if k.__module__ == "mutants_drop" and k is not drop_update]
    for mutant in generate(len(kinds), 3, TILED_PARTS[:1], kinds):
        found.add(mutant)
    assert found.total("harmful refused") > 8
    check(found, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(280, 281))
def test_of_tiles_of_layers_that_are_cut_many(seed: int) -> None:
    found = Tally()
    kinds = [k for k in PLACED if not k.__name__.startswith((*NO_TENSOR, "reduce_early"))]
    kinds += [k for k in KINDS if k.__module__ in BY_ANY and k not in (drop_update, move_update)]
    for mutant in generate(3 * len(kinds), seed, TILED_PARTS, kinds):
        found.add(mutant)
    assert found.total("harmful refused") > 20
    check(found, 0.1, by_chance=BY_CHANCE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(240, 242))
def test_of_sequences_that_are_cut_many(seed: int) -> None:
    """Of some 20 harmless ones, a few are so by values alone: labels that equal the ids."""
    found = Tally()
    kinds = [k for k in PLACED if not k.__name__.startswith((*NO_TENSOR, "reduce_early"))]
    for mutant in generate(4 * len(kinds), seed, CONTEXT_BASES, kinds):
        found.add(mutant)
    check(found, 0.1, by_chance=BY_CHANCE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(250, 251))
def test_of_schedules_of_sequences_that_are_cut(seed: int) -> None:
    """The changes of any schedule: waits, packs, the scale of a mean over data ranks."""
    found = Tally()
    kinds = [k for k in KINDS if k.__module__ in BY_ANY and k not in (drop_update, move_update)]
    for mutant in generate(4 * len(kinds), seed, CONTEXT_BASES, kinds):
        found.add(mutant)
    check(found, 0.05, by_chance=BY_CHANCE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 203))
def test_of_layers_that_are_cut_many(seed: int) -> None:
    """In half of the harmful ones nodes note what was done."""
    found = Tally()
    for mutant in generate(5 * len(PLACED), seed, PLACED_BASES, PLACED):
        found.add(mutant)
    check(found, 0.05, by_chance=BY_CHANCE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(220, 221))
def test_of_schedules_of_layers_that_are_cut(seed: int) -> None:
    """The changes of any schedule, where layers are cut: waits, packs, scales, saved values."""
    found = Tally()
    kinds = [k for k in KINDS if k.__module__ in BY_ANY and k not in (drop_update, move_update)]
    for mutant in generate(4 * len(kinds), seed, PLACED_BASES, kinds):
        found.add(mutant)
    check(found, 0.05, by_chance=BY_CHANCE)


def test_the_order_of_random_draws_is_part_of_the_program() -> None:
    """Two dropouts of one shape that do not read each other: exchanged, each gets other masks."""
    base = next(b for b in FEW if b.case == "branches")
    program = base.program.clone()
    first, second = [n for n in program.graph("forward").nodes if info(n).is_random]
    first.prepend(second)
    program.graph("forward").lint()
    mutant = Mutant(0, "reorder-random", "", base, program)
    assert (harm_of(mutant) or "").startswith("late: rank 0")
    assert (refusal_of(mutant) or "").startswith("verify: ")


def test_a_wait_for_a_wait_is_refused() -> None:
    base = next(b for b in FEW if b.program.plan.stage == 3)
    program = base.program.clone()
    nodes = program.graph("forward").nodes
    first, second = [n for n in nodes if kind_of(n) is Kind.WAIT and not n.kwargs][:2]
    second.args = (first, *second.args[1:])
    with pytest.raises(ProgramError, match="waits for wait_default, which launches nothing"):
        verify(program)


def test_the_unmutated_programs_pass() -> None:
    for base in FEW:
        verify(base.program)


def test_the_draw_repeats() -> None:
    first, second = ([str(m) for m in generate(len(KINDS), 3, FEW)] for _ in range(2))
    assert first == second
    assert len({text.split()[1] for text in first}) == len(KINDS)


def test_bases_are_cases() -> None:
    assert {base.case for base in BASES} <= set(CASES)
