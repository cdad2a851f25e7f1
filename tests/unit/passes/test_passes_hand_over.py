"""hand-over: gradients without buckets; what data ranks share is packed as before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle_cases import Choice
from passes_compact import before, order, pass_named, run
from tensor_models import MODELS, batch
from torch import fx
from verify_cases import program, set_argument

import zerofx
from zerofx import ops
from zerofx.errors import ProgramError
from zerofx.ir.order import Crossing, Order
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import gradients_of, is_reduction
from zerofx.ir.verify import verify, verify_stages
from zerofx.layout.buckets import Mesh

NAME = "hand-over"
ALONE = Choice(3, 1, bucket_bytes=0, persist_below=0)
WORDS = ("grads", "pack", "all-reduce", "wait", "store", "hand over")


def after(case: str, choice: Choice) -> Planned:
    return run(before(case, choice, NAME), pass_named(choice, NAME))


def gradients(given: Planned) -> list[str]:
    return [row for row in order(given, BACKWARD) if row.startswith(WORDS)]


def test_a_bucket_is_handed_over_where_it_would_be_reduced() -> None:
    was, now = before("chain", ALONE, NAME), after("chain", ALONE)
    launches = [r.replace("all-reduce", "hand over") for r in order(was, BACKWARD)]
    expected = [row for row in launches if row.startswith(("region", "hand over"))]
    assert [r for r in order(now, BACKWARD) if r.startswith(("region", "hand over"))] == expected
    assert gradients(now) == [f"hand over {bucket}" for bucket in (4, 3, 2, 1, 0)]


@pytest.mark.parametrize(
    "choice",
    [
        Choice(3, 2, bucket_bytes=0, persist_below=0),
        Choice(0, 2),
        Choice(3, 1, update="in-backward"),
        Choice(3, 1, precision="bf16"),
    ],
)
def test_what_needs_a_bucket_keeps_it(choice: Choice) -> None:
    given = before("chain", choice, NAME)
    assert not pass_named(choice, NAME).run(given.clone()).changed


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("gpt2", {"pipeline": 2, "micro_batches": 4}),  # its table is of both stages
        pytest.param(
            "llama",
            {"pipeline": 2, "schedule": "zero-bubble", "micro_batches": 4},
            marks=pytest.mark.slow,
        ),
        ("llama", {"tensor": 2, "sequence": True}),
    ],
)
def test_ranks_that_share_samples_hand_over(name: str, parallel: dict[str, Any]) -> None:
    captured = zerofx.capture(MODELS[name](), (), batch(name), outputs="loss")
    plan = zerofx.Plan(stage=3, kernels="aten", parallel=parallel)
    size = plan.parallel.pipeline
    for num_data in (1, 2):
        world = 2 * num_data
        found = [zerofx.rewrite(captured, plan, world_size=world, position=p) for p in range(size)]
        for each in found:
            assert bool(handed(each)) == (num_data == 1)
            reduced = any(is_reduction(n) for n in each.graph(BACKWARD).nodes)
            assert reduced == (num_data == 2)
        if size > 1:
            verify_stages(found)
        else:
            verify(found[0])


# -- verify -------------------------------------------------------------------------------------
def whole(case: str) -> Planned:
    return program(case, world=1, bucket_bytes=0)


def handed(given: Planned) -> list[fx.Node]:
    return [n for n in given.graph(BACKWARD).nodes if n.target is ops.hand_over]


def test_a_gradient_left_out_is_named() -> None:
    given = whole("chain")
    node = handed(given)[0]
    (_, *grads), (_, *offsets) = zip(*gradients_of(node), strict=True)
    set_argument(node, 0, grads)
    set_argument(node, 1, offsets)
    with pytest.raises(ProgramError, match=r"leaves out the gradient of layers\.3.* Hand over all"):
        verify(given)


def test_memory_of_two_gradients_must_be_copied() -> None:
    given = whole("chain")
    first, second, *_ = handed(given)
    (grad, _), *_ = gradients_of(first)
    set_argument(second, 0, [grad, *(g for g, _ in gradients_of(second)[1:])])
    with pytest.raises(ProgramError, match=r"is not the gradient's alone\. Add 0 to `copied`"):
        verify(given)
    for node in (first, second):
        set_argument(node, 4, [0])
    with pytest.raises(ProgramError, match="does not compute what was captured"):
        verify(given)


def test_a_bucket_is_not_handed_over_twice() -> None:
    given = whole("chain")
    first, second, *_ = handed(given)
    second.args = (*first.args[:-1], [0, 1])
    set_argument(first, 4, [0, 1])
    with pytest.raises(ProgramError, match=r"bucket 4 .* gets its gradients twice"):
        verify(given)


def test_several_ranks_do_not_hand_over() -> None:
    given = whole("chain")
    given.layout = replace(given.layout, mesh=Mesh.of(replicate=2))
    with pytest.raises(ProgramError, match=r"which the plan keeps in one buffer\. Pack and reduce"):
        Order(given, BACKWARD, Crossing()).check()
