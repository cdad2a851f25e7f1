"""shard-gradients: every bucket reduced once, after its last contribution."""

from __future__ import annotations

import op_sets
import pytest
from models import OWN
from oracle_cases import Choice, captured_inference
from passes_compact import before, order, pass_named, run

from zerofx import ops
from zerofx.ir.meta import Role, info
from zerofx.ir.program import Planned

NAME = "shard-gradients"
FINE = Choice(3, bucket_bytes=0, persist_below=0)


def reduce(case: str, choice: Choice) -> Planned:
    return run(before(case, choice, NAME), pass_named(choice, NAME))


def communication(program: Planned) -> list[str]:
    words = ("grads", "pack", "reduce", "all-reduce", "wait reduce", "wait all-reduce", "store")
    return [row for row in order(program, "backward") if row.startswith(words)]


def test_each_layer_is_reduced_behind_its_region() -> None:
    program = before("chain", FINE, NAME)
    assert communication(program) == []

    after = run(program, pass_named(FINE, NAME))

    rows = [r for r in order(after, "backward") if "gather" not in r]
    assert rows[:9] == [
        "region 0",
        "region 1 layers.3",
        "grads 4",
        "pack 4: layers.3.linear.weight, layers.3.linear.bias",
        "reduce 4",
        "wait reduce 4",
        "store 4",
        "region 2 layers.2",
        "grads 3",
    ]
    assert rows[-6:] == [
        "region 5 code",
        "grads 0",
        "pack 0: code.weight",
        "reduce 0",
        "wait reduce 0",
        "store 0",
    ]


def test_a_merged_bucket_is_packed_in_parts_and_reduced_at_the_end() -> None:
    assert communication(reduce("chain", Choice(3, bucket_bytes=1500, persist_below=0))) == [
        "grads 2",
        "pack 2: layers.3.linear.weight, layers.3.linear.bias",
        "reduce 2", "wait reduce 2", "store 2",
        "grads 1",
        "pack 1: layers.2.linear.weight, layers.2.linear.bias, layers.1.linear.weight, "
        "layers.1.linear.bias",  # together: its buffer is made when more activations are gone
        "reduce 1", "wait reduce 1", "store 1",
        "grads 0",
        "pack 0: layers.0.linear.weight, layers.0.linear.bias",
        "pack 0: code.weight",
        "reduce 0", "wait reduce 0", "store 0",
    ]  # fmt: skip


def test_stage_0_reduces_to_all() -> None:
    rows = communication(reduce("chain", Choice(0)))
    assert "all-reduce 0" in rows and "reduce 0" not in rows


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_scale_is_one_over_the_world(world_size: int) -> None:
    after = reduce("chain", Choice(3, world_size))
    launches = [n for n in after.graph("backward").nodes if n.target in op_sets.REDUCES]
    assert launches
    assert {n.args[3] for n in launches} == {1.0 / world_size}


@pytest.mark.parametrize("case", OWN)
def test_every_gradient_is_packed_once_and_every_bucket_reduced_once(case: str) -> None:
    for stage in (0, 2, 3):
        choice = Choice(stage)
        program = before(case, choice, NAME)
        wanted = {
            s.name
            for s, n in zip(program.outputs["backward"], program.results("backward"), strict=True)
            if s.role is Role.GRAD and n is not None
        }
        rows = communication(run(program, pass_named(choice, NAME)))
        packed = [n for r in rows if r.startswith("pack") for n in r.split(": ")[1].split(", ")]
        assert sorted(packed) == sorted(wanted)
        reduced = [r for r in rows if r.startswith(("reduce", "all-reduce"))]
        assert len(reduced) == len(set(reduced))


def test_frozen_buckets_are_not_reduced() -> None:
    after = reduce("adapters", Choice(3))
    assert after.layout is not None
    reduced = {info(n).index for n in after.graph("backward").nodes if n.target in op_sets.REDUCES}
    assert reduced == {b.index for b in after.layout.buckets if b.trainable}


def test_a_bucket_with_an_unused_parameter_starts_from_zero() -> None:
    choice = Choice(2, bucket_bytes=1 << 20)
    buffers = [
        n for n in reduce("convnet", choice).graph("backward").nodes if n.target is ops.grad_buffer
    ]
    assert [n.args[3] for n in buffers] == [True]
    buffers = [
        n for n in reduce("chain", choice).graph("backward").nodes if n.target is ops.grad_buffer
    ]
    assert [n.args[3] for n in buffers] == [False], "all of it is packed"


def test_gradients_of_inputs_stay_results() -> None:
    specs = reduce("stage", Choice(3)).outputs["backward"]
    assert [s.index for s in specs if s.role is Role.INPUT_GRAD] == [0]
    assert all(s.role in (Role.INPUT_GRAD, Role.SHARD_GRAD) for s in specs)


def test_inference_has_no_gradients() -> None:
    program = captured_inference("chain").planned().clone()
    assert not pass_named(Choice(3), NAME).run(program).changed
