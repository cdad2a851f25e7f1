"""Pipelines against random mutants, judged by simulated ranks that run the moves on values.

None harmful may pass, and at most 5 % of the harmless ones may be refused.
"""

from __future__ import annotations

import math

import pytest
from mutants_judge import Tally
from mutants_pipeline import (
    BASES,
    KINDS,
    PipelineBase,
    generate,
    harm_of,
    refusal_of,
    right_outcome,
    wrong,
)

from zerofx.ir.verify import verify_stages

OWN = [base for base in BASES if base.name == "tied"]
MODELS = [base for base in BASES if base.name != "tied"]


def tally(count: int, seed: int, bases: list[PipelineBase]) -> Tally:
    found = Tally()
    for mutant in generate(count, seed, bases):
        found.note(mutant, harm_of(mutant), refusal_of(mutant))
    return found


def check(found: Tally, refused_at_most: float = 0.05) -> None:
    print(found.table())
    assert not found.accepted_harmful, "\n".join(found.accepted_harmful)
    refused = len(found.refused_harmless)
    harmless = refused + found.total("harmless accepted")
    chance = 1.65 * math.sqrt(refused_at_most * (1 - refused_at_most) * harmless)
    report = "\n".join(found.refused_harmless)
    assert refused <= refused_at_most * harmless + chance, f"{refused} of {harmless}:\n{report}"


@pytest.mark.parametrize("base", OWN, ids=str)
def test_the_oracle_trains_as_the_whole_model_does(base: PipelineBase) -> None:
    verify_stages(base.programs)
    assert wrong(base, right_outcome(base)) is None


@pytest.mark.slow
@pytest.mark.parametrize("base", MODELS, ids=str)
def test_the_oracle_trains_as_whole_models_do(base: PipelineBase) -> None:
    verify_stages(base.programs)
    assert wrong(base, right_outcome(base)) is None


def test_what_does_harm_is_refused() -> None:
    """Of every kind something does, so that every kind tests something."""
    found = tally(3 * len(KINDS), 1, OWN)
    check(found)
    harmful = {kind for kind, count in found.counts.items() if count["harmful refused"]}
    assert {kind.__name__.replace("_", "-") for kind in KINDS} - harmful <= SOMETIMES
    assert found.total("harmless accepted") > 5


SOMETIMES = {"early-receive", "late-send", "swap-neighbours", "move-any", "swap-micro-batches"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300, 303))
def test_of_a_small_model(seed: int) -> None:
    check(tally(8 * len(KINDS), seed, OWN))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(310, 313))
def test_of_models(seed: int) -> None:
    check(tally(4 * len(KINDS), seed, MODELS))
