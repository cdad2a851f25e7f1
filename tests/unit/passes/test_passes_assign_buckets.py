"""assign-buckets: which parameters travel together."""

from __future__ import annotations

import pytest
import torch
from oracle_cases import Choice
from passes_compact import before, pass_named, run

from zerofx.api import make_layout
from zerofx.hardware import load_hardware
from zerofx.layout.buckets import Layout
from zerofx.plan.plan import as_plan

WHOLE = 1 << 30


def layout(case: str, choice: Choice) -> Layout:
    name = "assign-buckets"
    program = run(before(case, choice, name), pass_named(choice, name))
    return program.layout


def units(found: Layout) -> list[tuple[str, ...]]:
    return [b.units for b in found.buckets]


def test_a_bucket_a_unit_without_merging() -> None:
    found = layout("chain", Choice(3, bucket_bytes=0, persist_below=0))
    assert units(found) == [("code",), *((f"layers.{i}",) for i in range(4))]
    assert not any(b.persistent for b in found.buckets)


def test_small_neighbours_merge_up_to_the_limit() -> None:
    found = layout("chain", Choice(3, bucket_bytes=1500, persist_below=0))
    assert units(found) == [("code", "layers.0"), ("layers.1", "layers.2"), ("layers.3",)]
    assert all(b.full_bytes <= 1500 for b in found.buckets)
    assert len(layout("chain", Choice(3, bucket_bytes=WHOLE, persist_below=0)).buckets) == 1


def test_under_a_budget_no_bucket_is_larger_than_the_largest_unit() -> None:
    """Its buffers are there anyway, so that larger ones would cost memory."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, n) for n in (2, 2, 4, 2)))
    sizes = []
    for plan in ({}, {"memory_budget": "1GiB"}, {"memory_budget": "1GiB", "bucket_bytes": WHOLE}):
        found = make_layout(model, as_plan(plan), 2, load_hardware("cpu-gloo"))
        sizes.append([b.full_bytes for b in found.buckets])
    assert len(sizes[0]) == len(sizes[2]) == 1
    alone = make_layout(model, as_plan({"bucket_bytes": 0}), 2, load_hardware("cpu-gloo"))
    assert max(sizes[1]) == max(b.full_bytes for b in alone.buckets)
    assert 1 < len(sizes[1]) < len(alone.buckets)


def test_small_parameters_share_a_persistent_bucket() -> None:
    found = layout("chain", Choice(3, bucket_bytes=0, persist_below=100))
    persistent = [b for b in found.buckets if b.persistent]
    assert [b.names for b in persistent] == [tuple(f"layers.{i}.linear.bias" for i in range(4))]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_only_stage_3_has_persistent_parameters(stage: int) -> None:
    found = layout("chain", Choice(stage, bucket_bytes=0, persist_below=WHOLE))
    assert not any(b.persistent for b in found.buckets)


def test_frozen_and_trained_parameters_do_not_mix() -> None:
    choice = Choice(3, bucket_bytes=WHOLE)
    name = "assign-buckets"
    program = run(before("adapters", choice, name), pass_named(choice, name))
    for bucket in program.layout.buckets:
        assert {program.params[n].requires_grad for n in bucket.names} == {bucket.trainable}


@pytest.mark.parametrize(
    ("choice", "sizes"),
    [
        (Choice(0, 4), (1, 4)),
        (Choice(1, 4), (4, 1)),
        (Choice(3, 4), (4, 1)),
        (Choice(3, 4, shard_axis_size=2), (2, 2)),
        (Choice(3, 1), (1, 1)),
    ],
    ids=str,
)
def test_shard_and_replicate_sizes(choice: Choice, sizes: tuple[int, int]) -> None:
    found = layout("chain", choice)
    assert (found.shard_size, found.replicate_size) == sizes


def test_a_running_models_layout_is_taken_as_it_is() -> None:
    from dataclasses import replace

    choice = Choice(3)
    made = pass_named(choice, "assign-buckets")
    other = layout("chain", Choice(3, bucket_bytes=0))
    program = before("chain", choice, "assign-buckets")
    assert run(program, replace(made, layout=other)).layout is other  # type: ignore[arg-type]
