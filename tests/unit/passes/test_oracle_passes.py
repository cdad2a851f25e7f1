"""Every pass leaves every bit as it was: each intermediate program, run by the oracle.

The reference is the captured program, run by each rank on its own batch, its gradients averaged in
rank order.
"""

from __future__ import annotations

from itertools import product

import pytest
from models import FOREIGN, OWN
from oracle import differences, execute, has_garbage
from oracle_cases import (
    BOTH,
    FINE,
    OPTIMIZER,
    PARAMETERS,
    SPILLED,
    STORED,
    Choice,
    captured,
    captured_inference,
    expected,
    following_rank_0,
    make_state,
    stages,
)
from oracle_exchange import Delivery

PLENTY = 1 << 30
AWAY = (("blocks.0", "recompute"), ("*", "offload"))
HALF = (("optimizer", "cpu"), ("device_fraction", 0.5))

FAST = [
    ("gpt", Choice(3)),
    ("gpt", Choice(3, activations="recompute", budget=PLENTY)),
    ("gpt", Choice(2, activations=0.5)),
    ("gpt", Choice(0, 1)),
    ("gpt-dropout", Choice(3, activations="recompute", prefetch=2)),
    ("lstm", Choice(3, activations=0.5)),
    ("binary", Choice(3, prefetch=0)),
    ("adapters", Choice(3, activations="recompute")),
    ("convnet", Choice(1)),
    ("convnet", Choice(3, 4, shard_axis_size=2)),
    ("branches", Choice(0, activations="recompute")),
    ("stage", Choice(3, activations="recompute")),
    ("hf-llama", Choice(3)),
    ("gpt", Choice(3, update="in-backward")),
    ("convnet", Choice(0, update="in-backward")),
    ("gpt", Choice(3, activations=AWAY, budget=PLENTY)),
    ("convnet", Choice(0, activations=AWAY, prefetch=2)),
    ("gpt", Choice(3, offload=BOTH)),
    ("gpt", Choice(3, 1, offload=BOTH, budget=PLENTY)),
    ("gpt", Choice(3, offload=OPTIMIZER, update="in-backward", units=FINE)),
    ("gpt", Choice(2, 1, offload=HALF)),
    ("gpt", Choice(3, offload=SPILLED, prefetch=2)),
    ("gpt", Choice(3, offload=STORED)),
    ("convnet", Choice(1, offload=OPTIMIZER)),
    ("adapters", Choice(3, 4, offload=PARAMETERS, shard_axis_size=2, prefetch=2)),
]

ACTIVATIONS: list[str | float] = ["keep", "recompute", 0.5]
SLOW = [
    *[
        (case, choice)
        for case in OWN
        for choice in [
            *[Choice(s, 2, a) for s, a in product(range(4), ACTIVATIONS)],
            *[Choice(s, 1, a) for s, a in [(0, "recompute"), (1, "keep"), (3, 0.5)]],
            *[Choice(3, 2, a, PLENTY) for a in ACTIVATIONS],
            *[Choice(s, 2, AWAY) for s in range(4)],
            *[Choice(s, 4, "keep") for s in range(4)],
            *[Choice(s, 4, "recompute", shard_axis_size=2, prefetch=2) for s in (1, 2, 3)],
            *[Choice(s, w, offload=OPTIMIZER) for s, w in product((1, 2, 3), (1, 2))],
            *[Choice(3, w, AWAY, b, offload=BOTH) for w, b in product((1, 2), (None, PLENTY))],
            Choice(3, offload=PARAMETERS, prefetch=0),
            Choice(3, offload=HALF, update="in-backward"),
            *[Choice(3, w, offload=STORED, prefetch=p) for w, p in ((1, 0), (2, 2))],
            *[Choice(s, w, offload=SPILLED) for s, w in product(range(4), (1, 2))],
            *[Choice(3, 2, AWAY, prefetch=p, offload=BOTH + SPILLED) for p in (0, 3)],
        ]
    ],
    *[
        (case, choice)
        for case in FOREIGN
        for choice in [
            Choice(3),
            Choice(2, activations="recompute"),
            Choice(1, 1, 0.5),
            Choice(0),
            Choice(3, 2, "recompute", PLENTY),
            Choice(3, 4, 0.5, shard_axis_size=2),
        ]
    ],
][::4]  # 37 choices for each model of ours, 6 for others: successive models meet other ones


def check(case: str, choice: Choice) -> None:
    """Run what is behind every pass, and what is behind the last one with every delivery."""
    want = expected(case, choice.world_size)
    assert not has_garbage(want)
    state = make_state(case, choice.world_size)
    done = stages(captured(case), choice)
    for made, program in done:
        if made.name == "sync-buffers":
            want = following_rank_0(want)
        deliveries = Delivery if program is done[-1][1] else [Delivery.LATE]
        for delivery in deliveries:
            got = execute([program] * choice.world_size, state, delivery)
            assert not differences(want, got), f"behind {made.spec()}, delivery {delivery.value}"


@pytest.mark.parametrize(("case", "choice"), FAST, ids=str)
def test_every_pass_keeps_every_bit(case: str, choice: Choice) -> None:
    check(case, choice)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "choice"), SLOW, ids=str)
def test_every_pass_keeps_every_bit_in_many_programs(case: str, choice: Choice) -> None:
    check(case, choice)


@pytest.mark.parametrize("case", ["gpt", "convnet"])
def test_inference_programs_too(case: str) -> None:
    state, program = make_state(case, 2), captured_inference(case)
    want = execute([program] * 2, state)
    for made, rewritten in stages(program, Choice(3)):
        assert not differences(want, execute([rewritten] * 2, state)), f"behind {made.spec()}"


def test_the_captured_program_is_left_as_it_was() -> None:
    program = captured("gpt")
    before = str(program.graph("joint")), program.outputs
    stages(program, Choice(3))
    assert (str(program.graph("joint")), program.outputs) == before


def test_cases_cover_what_they_promise() -> None:
    assert {case for case, _ in SLOW} == set(OWN + FOREIGN)
