"""hierarchical: gathers across nodes and then within, reductions within nodes and then across."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import TOLERANCE, measure
from mutants import Base
from mutants_judge import check_every_kind
from node_cases import trained
from oracle_cases import BOTH, FINE, Choice, final
from pool import Pool
from test_oracle_passes import check
from torch import fx

import zerofx
from zerofx import ops
from zerofx.analysis.time.traffic import traffic
from zerofx.comm.world import World
from zerofx.errors import ProgramError
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import spec_of
from zerofx.ir.verify import verify
from zerofx.layout.buckets import ACROSS, NODE, Mesh
from zerofx.ops.nodes import reduce_in_steps

STEPS = Choice(3, 4, units=FINE, hierarchical_size=2)
IN_STEPS = (ops.all_gather_by_node, ops.reduce_scatter_by_node)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def found(program: Planned, *targets: Any) -> list[fx.Node]:
    return [n for gm in program.graphs.values() for n in gm.graph.nodes if n.target in targets]


def plain(choice: Choice) -> Planned:
    return final("gpt", replace(choice, hierarchical_size=None))


# -- the program ----------------------------------------------------------------------------------
def test_every_collective_over_the_shard_axis_has_two_steps() -> None:
    program, without = final("gpt", STEPS), plain(STEPS)
    one_step = (ops.all_gather, ops.reduce_scatter)
    assert len(found(program, *IN_STEPS)) == len(found(without, *one_step)) > 0
    assert not found(program, *one_step)


def test_it_is_dumped_scheduled_and_priced() -> None:
    program = final("gpt", STEPS)
    schedule = str(program.schedule())
    assert "AGn" in schedule and "all-gather across nodes, then within" in schedule
    assert "RSn" in schedule and "reduce-scatter within nodes, then across" in schedule
    assert "zfx.all_gather_by_node(shard_" in program.dump()
    assert zerofx.predict(program, hardware="dgx-h100").step_us > 0


def test_the_axes_of_a_mesh() -> None:
    mesh = Mesh.of(replicate=2, shard=8, tensor=2, node=2)
    assert (mesh.along(ACROSS), mesh.stride(ACROSS)) == (4, 4)
    assert [mesh.position(ACROSS, rank) for rank in range(0, 32, 2)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2


@pytest.mark.parametrize(
    "choice",
    [
        STEPS,
        slow(Choice(3, 4, "recompute", hierarchical_size=2, secondary_shard_size=2, prefetch=2)),
        slow(Choice(3, 4, offload=BOTH, hierarchical_size=2, units=FINE)),
        slow(Choice(2, 4, hierarchical_size=2)),
    ],
    ids=str,
)
def test_every_pass_keeps_every_bit(choice: Choice) -> None:
    check("gpt", choice)  # in the oracle sums have one order


def test_across_nodes_it_sends_a_part_as_large_as_a_node_has_ranks() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    captured = zerofx.capture(model, (torch.zeros(4, 64),))
    for ranks, size in ((4, 2), (8, 2), (8, 4), (12, 3)):
        plan = Choice(3).plan()
        plan = replace(plan, persist_below=0, bucket_bytes=0)
        one, two = (
            traffic(zerofx.rewrite(captured, p, ranks).planned(), rank=1, per_node=size)
            for p in (plan, replace(plan, hierarchical_size=size))
        )
        for kind in ("all_gather", "reduce_scatter"):
            assert two.kinds[kind].across_bytes * size == one.kinds[kind].across_bytes > 0
            assert two.kinds[kind].sent_bytes == one.kinds[kind].sent_bytes


def test_its_memory_is_counted() -> None:
    program = final("gpt", STEPS)
    life = program.memory().memory.life
    held = [s for s in life.storages if s.name == "between two steps"]
    nodes = [node for _, node in life.nodes]
    assert len(held) == len(found(program, *IN_STEPS))
    for storage in held:
        launch = nodes[storage.birth]
        bucket = program.layout.buckets[storage.where.index]
        assert launch.target in IN_STEPS and nodes[storage.death].target is ops.wait
        assert storage.nbytes == bucket.full_bytes // 2


def test_one_node_has_one_step() -> None:
    for ranks, size in ((1, 2), (2, 2), (2, 8)):
        choice = Choice(3, ranks, units=FINE, hierarchical_size=size)
        assert (
            final("gpt", choice).dump().partition("\n")[2]
            == (plain(choice).dump().partition("\n")[2])
        )


def test_it_is_emitted_and_read_back(tmp_path: Path) -> None:
    program = final("gpt", STEPS)
    program.emit(tmp_path)
    text = (tmp_path / "schedule.py").read_text()
    assert "rt.all_gather_by_node(shards[" in text and "rt.reduce_scatter_by_node(" in text
    loaded = zerofx.load_program(tmp_path).planned()
    assert loaded.layout.mesh == program.layout.mesh
    for graph in program.graphs:
        both = [
            [n.target for n in p.graph(graph).nodes if spec_of(n) is not None]
            for p in (program, loaded)
        ]
        assert both[0] == both[1]


# -- mutants --------------------------------------------------------------------------------------
def without_nodes(program: Planned) -> None:
    program.layout = replace(program.layout, mesh=replace(program.layout.mesh, node=1))


def of_another_shard(program: Planned) -> None:
    first, second = found(program, ops.all_gather_by_node)[:2]
    first.args = (second.args[0], *first.args[1:])


def reduced_twice(program: Planned) -> None:
    reduction = found(program, ops.reduce_scatter_by_node)[0]
    graph = program.graph(BACKWARD)
    with graph.inserting_after(reduction):
        graph.node_copy(reduction, lambda node: node)


def at_another_scale(program: Planned) -> None:
    reduction = found(program, ops.reduce_scatter_by_node)[0]
    reduction.args = (*reduction.args[:3], 0.5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_nodes, "has a step within nodes, and the plan has none"),
        (of_another_shard, "which is not its shard"),
        (reduced_twice, "reduce"),
        (at_another_scale, "scale"),
    ],
)
def test_wrong_programs_are_refused(change: Callable[[Planned], None], said: str) -> None:
    program = final("gpt", STEPS).clone()
    verify(program)
    change(program)
    with pytest.raises(ProgramError, match=said):
        verify(program)


@pytest.mark.slow
def test_random_mutants_of_it_are_refused() -> None:
    check_every_kind(Base("gpt", STEPS))


# -- on ranks -------------------------------------------------------------------------------------
def summed(ranks: int, size: int, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's slice of a sum in two steps, and that of the stated order."""
    world = World.connect("cpu", node_size=lambda shards: size)
    given = [
        torch.randn(ranks * numel, generator=torch.Generator().manual_seed(r)) for r in range(ranks)
    ]
    out = torch.empty(numel)
    steps = partial(reduce_in_steps, world.axis(NODE), world.axis(ACROSS))
    world.reduce_scatter(out, given[world.rank].clone(), 0.3, over_shards=steps).wait()
    first = world.rank * numel
    slices = [each[first : first + numel] for each in given]
    nodes = []
    for begin in range(0, ranks, size):
        total = slices[begin].clone()
        for each in slices[begin + 1 : begin + size]:
            total += each
        nodes.append(total)
    whole = nodes[0].clone()
    for total in nodes[1:]:
        whole += total
    return out, whole * 0.3


def test_sums_have_the_stated_order(pool: Pool) -> None:
    for mine, stated in pool.run(4, summed, 4, 2, 100_003):
        assert torch.equal(mine, stated)


@pytest.mark.parametrize(
    "plan",
    [
        {"kernels": "aten"},
        slow({"precision": "bf16", "activations": "recompute"}),
        slow({"secondary_shard_size": 2}),
        slow({"stage": 2}),
        slow({"offload": {"optimizer": "cpu", "parameters": "cpu"}}),
    ],
)  # fmt: skip
def test_it_trains_alike_and_sends_what_is_predicted(pool: Pool, plan: dict[str, Any]) -> None:
    without = pool.run(4, trained, "gpt", plan, 1, "SGD")
    in_steps = pool.run(4, trained, "gpt", {**plan, "hierarchical_size": 2}, 1, "SGD")
    tolerance = 1e-3 if "precision" in plan else 1e-6
    for (losses, weights, sent, predicted), (expected, theirs, flat, _) in zip(
        in_steps, without, strict=True
    ):
        assert losses == pytest.approx(expected, rel=tolerance)
        assert sent == predicted
        for name, there in theirs.items():
            torch.testing.assert_close(weights[name], there, rtol=tolerance, atol=tolerance)
        assert sent["reduce_scatter"][1] * 2 == flat["reduce_scatter"][1] > 0
        assert sent["reduce_scatter"][0] == flat["reduce_scatter"][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide", "broad"])
def test_the_predicted_peak_is_the_measured_one(pool: Pool, name: str) -> None:
    plan = {"stage": 3, "kernels": "aten", "hierarchical_size": 2}
    for seen in pool.run(4, measure, name, plan, timeout_s=300.0):
        assert seen.peak_bytes == pytest.approx(seen.predicted_bytes, rel=TOLERANCE)
