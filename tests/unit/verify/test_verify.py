"""Correct programs are accepted, after every pass; what is broken is reported with its pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from verify_cases import captured, find, gathered, program, set_argument

from zerofx import ops
from zerofx.errors import ProgramError
from zerofx.hardware import hardware_for
from zerofx.ir.graphs import call
from zerofx.ir.meta import Role, info, set_info
from zerofx.ir.program import BACKWARD, FORWARD, Reference
from zerofx.ir.verify import verify, verify_ranks
from zerofx.passes.assign_slots import AssignSlots
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import run, run_pass
from zerofx.plan.plan import Plan

aten = torch.ops.aten


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["gpt", "adapters", "convnet", "branches"])
def test_correct_programs_are_accepted(case: str, stage: int) -> None:
    """The pipeline verifies after every pass, so that building one is the test."""
    choices: list[tuple[int, Any]] = [(2, 0.5 if stage % 2 else "recompute"), (4, "keep")]
    if case == "gpt":
        choices = [(1, "keep"), (2, "keep"), (2, "recompute"), (2, 0.5), (4, "keep")]
    for world, activations in choices:
        p = program(case, world, stage=stage, activations=activations)
        assert p.reference is not None and p.reference.outputs
        verify(p)
    verify(program(case, 2, is_training=False, stage=stage))


@pytest.mark.parametrize(
    "plan",
    [{"memory_budget": 1 << 30}, {"prefetch": 0}, {"prefetch": 3}, {"shard_axis_size": 2}],
    ids=str,
)
def test_correct_programs_of_other_plans_are_accepted(plan: dict[str, Any]) -> None:
    verify(program("gpt", 4, **plan))


def test_harmless_freedoms() -> None:
    """What changes no result is no fault: a second wait, a dropped release, a recomputed node."""
    p = program()
    launch, wait, _release = gathered(p)
    with p.graph(FORWARD).inserting_after(wait):
        call(p.graph(FORWARD), ops.wait, (launch,), like=wait)
    node = next(n for n in p.graph(FORWARD).nodes if info(n).region == 1)
    with p.graph(FORWARD).inserting_after(node):
        p.graph(FORWARD).node_copy(node)
    verify(p)
    p.graph(FORWARD).erase_node(find(p, ops.release, 3, FORWARD))
    verify(p)


def test_kept_gathered_buckets_are_legal() -> None:
    p = program(memory_budget=1 << 30)
    saved = [n for n in p.placeholders(BACKWARD, Role.SAVED) if "gathered" in info(n).name]
    assert saved, "the budget keeps nothing"
    verify(p)


def test_the_pass_is_named() -> None:
    """An invariant broken by a pass is reported with the pass's name."""
    p = captured("gpt")
    setting = Setting(Plan(stage=3, prefetch=1), 2, hardware_for("cpu"))
    done = run(p, setting)
    assert isinstance(done.reference, Reference)
    node = find(done, ops.reduce_scatter)
    set_argument(node, 3, 0.25)
    with pytest.raises(ProgramError, match=r"^assign-slots: backward: bucket .* at scale 0.25"):
        run_pass(done, AssignSlots())


def test_ranks_must_launch_the_same_collectives() -> None:
    left, right = program(), program()
    verify_ranks([left, right])
    launch = find(right, ops.all_gather, 3, FORWARD)
    before = find(right, ops.all_gather, 0, FORWARD)
    before.prepend(launch)
    verify(right)
    with pytest.raises(ProgramError, match=r"rank 1 would launch all_gather\(3, .*collective 1,"):
        verify_ranks([left, right])


def test_a_signature_names_the_call_not_the_plan() -> None:
    """Programs of one call are interchangeable over stages and worlds; other calls are others."""
    one = program(stage=3).signature
    assert one == program(stage=1).signature == program(world=4, stage=0).signature
    assert one != program(is_training=False).signature
    assert one != program("gpt-dropout").signature


def test_rows_that_attention_cannot_read_are_refused() -> None:
    """torch's kernel for CPUs would take other elements, and give a result."""
    p = program("gpt", 2)
    graph, target = p.graph(FORWARD), aten._scaled_dot_product_flash_attention_for_cpu.default
    attention = next(iter(graph.find_nodes(op="call_function", target=target)))
    keys = attention.args[1]
    with graph.inserting_before(attention):
        across = call(graph, aten.transpose.int, (keys, -2, -1), like=attention)
        dense = call(
            graph, aten.clone.default, (across,), like=attention,
            named={"memory_format": torch.contiguous_format},
        )  # fmt: skip
        back = call(graph, aten.transpose.int, (dense, -2, -1), like=attention)
    for node in (across, dense, back):
        set_info(node, region=info(attention).region)
    attention.replace_input_with(keys, back)
    with pytest.raises(ProgramError, match=r"rows are not consecutive in memory: .* contiguous"):
        verify(p)
