"""secondary-shards: backward gathers within the node, the same bits, from what forward has kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from measure import TOLERANCE, measure
from models import CASES
from mutants import OURS, SEQUENCE, Base
from mutants_judge import check_every_kind
from node_cases import trained
from oracle import differences, execute
from oracle_cases import BOTH, FINE, OPTIMIZER, Choice, final, make_state
from pool import Pool
from test_oracle_passes import check
from torch import fx, nn

import zerofx
from zerofx import ops
from zerofx.comm import hosts
from zerofx.errors import ProgramError
from zerofx.ir.graphs import call
from zerofx.ir.meta import info, set_info
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.spec import spec_of
from zerofx.ir.verify import verify
from zerofx.layout.buckets import NODE, Mesh
from zerofx.plan.plan import Plan

NODES = Choice(3, 4, units=FINE, secondary_shard_size=2)
PLENTY = 1 << 30


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def found(program: Planned, graph: str, target: Any) -> list[fx.Node]:
    return [n for n in program.graph(graph).nodes if n.target is target]


def plain(choice: Choice) -> Planned:
    return final("gpt", replace(choice, secondary_shard_size=None))


# -- the program ----------------------------------------------------------------------------------
def test_only_forward_gathers_across_nodes() -> None:
    program, without = final("gpt", NODES), plain(NODES)
    gathers = found(without, BACKWARD, ops.all_gather)
    assert gathers and not found(program, BACKWARD, ops.all_gather)
    again = found(program, BACKWARD, ops.gather_secondary)
    assert [info(n).index for n in again] == [info(n).index for n in gathers]
    kept = found(program, FORWARD, ops.secondary_shard)
    assert {info(n).index for n in kept} == {info(n).index for n in again}
    for node in kept:
        bucket = program.layout.buckets[info(node).index]
        assert node.meta["val"].numel() == bucket.numel // 2
    assert found(program, FORWARD, ops.all_gather) != []


def test_it_is_dumped_scheduled_and_priced() -> None:
    program = final("gpt", NODES)
    dump, schedule = program.dump(), str(program.schedule())
    assert "zfx.secondary_shard(full_" in dump and "zfx.gather_secondary(secondary_" in dump
    assert "AGs" in schedule and "all-gather of secondary shards, within the node" in schedule
    forecast = zerofx.predict(program, hardware="dgx-h100")
    assert forecast.step_us > 0


def test_a_slow_network_makes_it_faster() -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
    captured = zerofx.capture(model, (torch.zeros(4, 2048),))
    plan = Plan(bucket_bytes=0, persist_below=0)
    nodes = replace(plan, secondary_shard_size=8)
    times = [
        zerofx.predict(zerofx.rewrite(captured, p, 16), hardware="dgx-h100").step_us
        for p in (plan, nodes)
    ]
    assert times[1] < 0.95 * times[0]


def test_the_node_axis_of_a_mesh() -> None:
    mesh = Mesh.of(replicate=2, shard=4, tensor=2, node=2)
    assert (mesh.along(NODE), mesh.stride(NODE), mesh.num_ranks) == (2, 2, 16)
    assert [mesh.position(NODE, rank) for rank in range(0, 16, 2)] == [0, 1] * 4


@pytest.mark.parametrize(
    "choice",
    [
        NODES,
        slow(Choice(3, 4, "recompute", secondary_shard_size=2, prefetch=2)),
        slow(Choice(3, 4, 0.5, budget=PLENTY, secondary_shard_size=2)),
        slow(Choice(3, 4, offload=BOTH, secondary_shard_size=2, units=FINE)),
        slow(Choice(3, 4, offload=OPTIMIZER, update="in-backward", secondary_shard_size=2)),
    ],
    ids=str,
)
def test_every_pass_keeps_every_bit(choice: Choice) -> None:
    check("gpt", choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [
        Choice(3, 4, tiling=(("blocks.1.mlp", 4),), secondary_shard_size=2, hierarchical_size=2),
        # a node has 4 ranks, of which 2 have the same layers
        Choice(3, 8, parallel=SEQUENCE + OURS, secondary_shard_size=4, hierarchical_size=4),
    ],
    ids=str,
)
def test_tiles_and_layers_that_are_cut_keep_their_bits(choice: Choice) -> None:
    without = plain(replace(choice, hierarchical_size=None))
    program, state = final("gpt", choice), make_state("gpt", choice.world_size, choice.team)
    assert found(program, BACKWARD, ops.gather_secondary)
    ran = [execute([each] * choice.world_size, state) for each in (without, program)]
    assert not differences(*ran)


def test_gathered_values_and_their_secondary_shards_are_not_both_kept() -> None:
    choice = replace(NODES, budget=PLENTY)
    program, without = final("gpt", choice), plain(choice)
    assert not found(program, FORWARD, ops.secondary_shard)
    assert program.memory().peak_bytes == without.memory().peak_bytes
    dear = final("gpt", NODES).memory().peak_bytes
    budget = without.memory().peak_bytes - 1  # all of them do not fit
    between = final("gpt", replace(NODES, budget=budget))
    kept, all_ = (found(p, FORWARD, ops.secondary_shard) for p in (between, final("gpt", NODES)))
    assert 0 < len(kept) < len(all_)
    assert dear < between.memory().peak_bytes <= budget


def test_its_memory_is_counted() -> None:
    program = final("gpt", NODES)
    life = program.memory().memory.life
    held = [s for s in life.storages if s.name == "secondary shard"]
    nodes = [node for _, node in life.nodes]
    for storage in held:
        bucket = program.layout.buckets[storage.where.index]
        assert storage.nbytes == bucket.full_bytes // 2
        assert nodes[storage.birth].target is ops.secondary_shard
        last = nodes[storage.death]
        assert last.target is ops.wait and info(last).index == bucket.index
    assert len(held) == len(found(program, FORWARD, ops.secondary_shard))


def test_one_node_needs_no_second_copy() -> None:
    for ranks, size in ((1, 2), (2, 2), (2, 8)):
        choice = Choice(3, ranks, units=FINE, secondary_shard_size=size)
        assert final("gpt", choice).dump() == plain(choice).dump()


def test_it_is_emitted_and_read_back(tmp_path: Path) -> None:
    program = final("gpt", NODES)
    program.emit(tmp_path)
    text = (tmp_path / "schedule.py").read_text()
    assert "= rt.secondary_shard(full_0, bucket=0)" in text
    assert "= rt.gather_secondary(embed_position_secondary_0, bucket=0, slot=" in text
    loaded = zerofx.load_program(tmp_path)
    assert loaded.planned().layout.mesh == program.layout.mesh
    for graph in program.graphs:
        both = [
            [n.target for n in p.graph(graph).nodes if spec_of(n) is not None]
            for p in (program, loaded.planned())
        ]
        assert both[0] == both[1]


# -- mutants --------------------------------------------------------------------------------------
def copied_before_the_wait(program: Planned) -> None:
    copy = found(program, FORWARD, ops.secondary_shard)[-1]
    copy.all_input_nodes[0].prepend(copy)
    copy.args = (copy.all_input_nodes[0].all_input_nodes[0], *copy.args[1:])


def copied_after_the_release(program: Planned) -> None:
    copy = found(program, FORWARD, ops.secondary_shard)[0]
    release = next(u for u in copy.all_input_nodes[0].users if u.target is ops.release)
    release.append(copy)


def copied_when_its_slot_has_the_next_bucket(program: Planned) -> None:
    copy = found(program, FORWARD, ops.secondary_shard)[1]
    full = copy.all_input_nodes[0]
    next(u for u in full.users if u.target is ops.release).append(copy)
    program.graph(FORWARD).output_node().prepend(copy)


def _swapped(program: Planned) -> tuple[fx.Node, fx.Node]:
    """Return two gathers of equally large buckets in backward."""
    gathers = found(program, BACKWARD, ops.gather_secondary)
    for a in gathers:
        for b in gathers:
            if a is not b and a.meta["val"].shape == b.meta["val"].shape:
                return a, b
    raise AssertionError("all buckets differ")


def gathered_from_another_bucket(program: Planned) -> None:
    a, b = _swapped(program)
    a.args = (b.args[0], *a.args[1:])


def kept_of_another_bucket(program: Planned) -> None:
    a, b = _swapped(program)
    kept = {info(n).index: n for n in found(program, FORWARD, ops.secondary_shard)}
    mine, other = kept[info(a).index], kept[info(b).index]
    mine.args, other.args = (mine.args[0], *other.args[1:]), (other.args[0], *mine.args[1:])


def gathered_over_all_ranks(program: Planned) -> None:
    """Gather the secondary shards over the shard axis, as if they were shards."""
    gather = found(program, BACKWARD, ops.gather_secondary)[0]
    gather.target = ops.all_gather


def gathered_from_the_shard(program: Planned) -> None:
    """Gather the shards over the node axis, as if they were secondary shards."""
    gather = found(program, BACKWARD, ops.gather_secondary)[0]
    graph = program.graph(BACKWARD)
    shard = next(
        n for n in graph.nodes if n.op == "placeholder" and n.name == f"shard_{info(gather).index}"
    )
    gather.args = (shard, *gather.args[1:])


def gathered_across_nodes_again(program: Planned) -> None:
    gather = found(program, BACKWARD, ops.gather_secondary)[0]
    gathered_from_the_shard(program)
    gather.target = ops.all_gather


def for_nodes_of_another_size(program: Planned) -> None:
    program.layout = replace(program.layout, mesh=replace(program.layout.mesh, node=4))


def without_nodes(program: Planned) -> None:
    program.layout = replace(program.layout, mesh=replace(program.layout.mesh, node=1))


def read_in_backward(program: Planned) -> None:
    """Copy a secondary shard, where only the gather may read it."""
    graph = program.graph(BACKWARD)
    gather = found(program, BACKWARD, ops.gather_secondary)[0]
    with graph.inserting_before(gather):
        made = call(graph, torch.ops.aten.clone.default, (gather.args[0],))
    set_info(made, phase=info(gather).phase)
    gather.args = (made, *gather.args[1:])


def returned_to_the_user(program: Planned) -> None:
    graph = program.graph(FORWARD)
    kept = found(program, FORWARD, ops.secondary_shard)[0]
    results = list(program.results(FORWARD))
    results[0] = kept
    graph.output_node().args = (tuple(results),)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (copied_before_the_wait, "before its wait"),
        (copied_after_the_release, "after its release"),
        (copied_when_its_slot_has_the_next_bucket, "after its release|which puts another buffer"),
        (gathered_from_another_bucket, "is given secondary shard bucket"),
        (kept_of_another_bucket, "is given gathered bucket"),
        (gathered_over_all_ranks, "which is not its shard|secondary shard is for"),
        (gathered_from_the_shard, "is given shard bucket"),
        (gathered_across_nodes_again, "across nodes again"),
        (for_nodes_of_another_size, "elements; a secondary shard"),
        (without_nodes, "the plan has none"),
        (read_in_backward, "secondary shard is for"),
        (returned_to_the_user, "secondary shard"),
    ],
)
def test_wrong_programs_are_refused(change: Callable[[Planned], None], said: str) -> None:
    program = final("gpt", NODES).clone()
    verify(program)
    change(program)
    with pytest.raises(ProgramError, match=said):
        verify(program)


@pytest.mark.slow
def test_random_mutants_of_it_are_refused() -> None:
    check_every_kind(Base("gpt", NODES))


# -- on ranks ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("case", "plan", "micro_batches"),
    [
        ("gpt", {}, 1),
        slow("gpt", {"activations": "recompute", "precision": "bf16"}, 1),
        slow("gpt", {}, 3),
        slow("gpt", {"numerics": "fast", "quantized_weights": True}, 2),
        slow("gpt", {"offload": {"optimizer": "cpu", "parameters": "cpu"}}, 1),
        slow("gpt", {"update": "in-backward"}, 1),
        slow("gpt", {"kernels": "inductor"}, 1),
        slow("gpt", {"memory_budget": "1GiB"}, 1),
        slow("convnet", {"prefetch": 2}, 1),
        slow("gpt-dropout", {"activations": 0.5}, 1),
    ],
)
def test_it_trains_to_the_same_bits(
    pool: Pool, case: str, plan: dict[str, Any], micro_batches: int
) -> None:
    without = pool.run(4, trained, case, plan, micro_batches)
    nodes = pool.run(4, trained, case, {**plan, "secondary_shard_size": 2}, micro_batches)
    for (losses, weights, sent, predicted), (expected, theirs, flat, of_flat) in zip(
        nodes, without, strict=True
    ):
        assert losses == expected
        assert all(torch.equal(weights[name], theirs[name]) for name in theirs)
        if micro_batches == 1:  # the program is of one
            assert (sent, flat) == (predicted, of_flat)
        if (case, plan) == ("gpt", {}):
            # Of 4 ranks on 2 nodes, each sends a quarter of a bucket to 1 rank here and to 2 there.
            # With secondary shards, it sends a half to 1 rank here.
            part = micro_batches * gathered_again() * 4 // 4  # bytes of fp32, over 4 ranks
            assert sent["reduce_scatter"] == flat["reduce_scatter"]
            assert flat["all_gather"][1] - sent["all_gather"][1] == 2 * part
            assert flat["all_gather"][0] - sent["all_gather"][0] == 3 * part - 2 * part


def gathered_again() -> int:
    """Return the elements of the buckets that backward gathers again, under the plan of above."""
    captured = zerofx.capture(CASES["gpt"].make(), *CASES["gpt"].batch(0))
    program = zerofx.rewrite(captured, Plan(persist_below=100, secondary_shard_size=2), 4).planned()
    numbers: Any = [n.args[2] for n in found(program, BACKWARD, ops.gather_secondary)]
    return sum(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide", "broad"])
def test_the_predicted_peak_is_the_measured_one(pool: Pool, name: str) -> None:
    plan = {"stage": 3, "kernels": "aten", "secondary_shard_size": 2}
    for seen in pool.run(4, measure, name, plan, timeout_s=300.0):
        assert seen.peak_bytes == pytest.approx(seen.predicted_bytes, rel=TOLERANCE)


def warned(size: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerofx").addHandler(handler)
    rank = int(os.environ["RANK"])
    with mock.patch.object(hosts, "host_key", lambda: f"node{rank % 2}"):  # not neighbours
        zerofx.compile(CASES["gpt"].make(), {"secondary_shard_size": size})
    logging.getLogger("zerofx").removeHandler(handler)
    return [text for text in said if "secondary_shard_size" in text]


@pytest.mark.parametrize(
    ("size", "told"), [(2, "go across hosts"), (8, "the setting changes nothing")]
)
def test_nodes_that_are_no_hosts_are_warned_of(pool: Pool, size: int, told: str) -> None:
    for said in pool.run(4, warned, size):
        assert len(said) == 1 and told in said[0]
