"""The tasks of a step: what they need, in every stage and with every tier, and what they weigh."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import networkx as nx
import op_sets
import pytest
from oracle_cases import BOTH, OPTIMIZER, SPILLED, STORED, Choice
from passes_compact import final
from task_cases import FlatPrices

from zerofx import ops
from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.tasks import Task, tasks
from zerofx.analysis.time.timeline import timeline
from zerofx.analysis.time.traffic import traffic
from zerofx.ir.graphs import users_after_views
from zerofx.ir.meta import info
from zerofx.ir.program import BACKWARD, FORWARD, Loop, Planned
from zerofx.policy import staging
from zerofx.runtime.tiers.host_tier import D2H, H2D, NVME_READ, NVME_WRITE

FINE: dict[str, Any] = {"bucket_bytes": 0, "persist_below": 0}
CHOICES = {
    "stage 0": Choice(0, **FINE),
    "stage 1": Choice(1, **FINE),
    "stage 2": Choice(2, **FINE),
    "stage 3": Choice(3, **FINE),
    "states on the host": Choice(3, offload=OPTIMIZER, **FINE),
    "all on the host": Choice(3, offload=BOTH, **FINE),
    "all on nvme": Choice(3, offload=STORED, **FINE),
    "activations on nvme": Choice(3, offload=SPILLED, **FINE),
}


def order_of(found: tuple[Task, ...]) -> nx.DiGraph:
    """Return what must have ended before what: needs, and the order of each lane."""
    graph = nx.DiGraph()
    last: dict[Lane, int] = {}
    for task in found:
        graph.add_node(task.index)
        graph.add_edges_from((n, task.index) for n in task.needs)
        if task.lane in last:
            graph.add_edge(last[task.lane], task.index)
        last[task.lane] = task.index
    return nx.transitive_closure_dag(graph)


def reading(program: Planned, graph: str, found: tuple[Task, ...]) -> list[tuple[int, int]]:
    """Return (gather, region that reads it), as indices of tasks."""
    regions = {t.region: t.index for t in found if t.kind == "region" and t.graph == graph}
    gathers = iter([t.index for t in found if t.name.startswith(f"{graph} AG")])
    pairs = []
    for node in program.graph(graph).nodes:
        if node.target is not ops.all_gather:
            continue
        task = next(gathers)
        readers = {info(u).region for w in node.users for u in users_after_views(w)}
        pairs += [(task, regions[r]) for r in readers if r is not None]
    return pairs


@pytest.mark.parametrize("name", ["stage 3", "all on the host", "all on nvme"])
@pytest.mark.parametrize("is_inline", [False, True])
def test_compute_comes_behind_its_gathers_and_gathers_behind_the_slots_last_use(
    name: str, is_inline: bool
) -> None:
    program = final("chain", CHOICES[name])
    found = tasks(program, FlatPrices(is_inline))
    before = order_of(found)
    for graph in (FORWARD, BACKWARD):
        pairs = reading(program, graph, found)
        assert pairs
        assert all(before.has_edge(gather, region) for gather, region in pairs)
        filled: dict[int, list[int]] = {}
        gathers = [n for n in program.graph(graph).nodes if n.target is ops.all_gather]
        starts = [t.index for t in found if t.name.startswith(f"{graph} AG")]
        for node, gather in zip(gathers, starts, strict=True):
            slot = node.args[3]
            assert all(before.has_edge(region, gather) for region in filled.get(slot, []))
            filled[slot] = [region for g, region in pairs if g == gather]


@pytest.mark.parametrize("name", list(CHOICES))
def test_every_transfer_is_there_with_its_bytes(name: str) -> None:
    """What tasks move is what `traffic` counts, in which the updates on NVMe are several copies."""
    program = final("chain", CHOICES[name])
    found = tasks(program, FlatPrices())
    moved = traffic(program).moved
    lanes = {Lane.D2H: D2H, Lane.H2D: H2D, Lane.NVME: NVME_READ, Lane.TO_NVME: NVME_WRITE}
    for lane, kind in lanes.items():
        sent = sum(t.nbytes for t in found if t.lane is lane)
        assert sent == moved[kind].sent_bytes, lane
    launched = Counter(
        n.target
        for gm in program.graphs.values()
        for n in gm.graph.nodes
        if n.target in op_sets.GATHERS
    )
    assert sum(t.lane is Lane.GATHER for t in found) == sum(launched.values())
    assert len({t.name for t in found}) == len(found)


def test_updates_stand_behind_their_gradients() -> None:
    for name, choice in CHOICES.items():
        found = tasks(final("chain", choice), FlatPrices())
        before = order_of(found)
        updates = {t.bucket: t for t in found if t.kind == "update"}
        reduced = {t.bucket: t for t in found if t.lane is Lane.REDUCE}
        assert updates.keys() == reduced.keys(), name
        assert all(before.has_edge(reduced[b].index, t.index) for b, t in updates.items()), name
        assert {t.graph for t in updates.values()} == {"step"}


@pytest.mark.parametrize("name", ["stage 3", "all on the host", "all on nvme"])
def test_updates_inside_backward_run_beside_it(name: str) -> None:
    choice = replace(CHOICES[name], update="in-backward")
    found = tasks(final("chain", choice), FlatPrices())
    updates = [t for t in found if t.kind == "update"]
    assert {t.graph for t in updates} == {"backward"}
    lane = Lane.COMPUTE if name == "stage 3" else Lane.UPDATE
    assert {t.lane for t in updates} == {lane}
    later = [t for t in found if t.kind == "region" and t.index > updates[0].index]
    assert later


def test_accumulation_runs_the_graphs_again_and_the_optimizer_once() -> None:
    program = final("chain", CHOICES["stage 1"])
    once = Counter(t.kind for t in tasks(program, FlatPrices()))
    program.loop = Loop(3)
    thrice = tasks(program, FlatPrices())
    kinds = Counter(t.kind for t in thrice)
    assert kinds["region"] == 3 * once["region"]
    assert kinds["update"] == once["update"]
    assert sum(t.lane is Lane.REDUCE for t in thrice) == 3 * once["update"]
    gathers = [t for t in thrice if t.lane is Lane.GATHER]
    assert len(gathers) == once["update"]  # current until the next update
    program.loop = Loop(3, no_sync=True)
    unsynced = tasks(program, FlatPrices())
    assert sum(t.lane is Lane.REDUCE for t in unsynced) == once["update"]
    assert timeline(unsynced).step_us < timeline(thrice).step_us


def test_copies_in_line_are_never_hidden() -> None:
    program = final("chain", CHOICES["all on the host"])
    beside, inline = (
        timeline(tasks(program, FlatPrices(is_inline))) for is_inline in (False, True)
    )
    copies = [s for s in inline.spans if s.task.lane in (Lane.H2D, Lane.D2H)]
    work = [s for s in inline.spans if s.task.lane is Lane.COMPUTE]
    assert copies
    assert not any(c.start_us < w.end_us and w.start_us < c.end_us for c in copies for w in work)
    assert beside.exposed_us[Lane.H2D] < inline.exposed_us[Lane.H2D]


def test_what_a_collective_takes_from_compute_beside_it() -> None:
    program = final("chain", CHOICES["stage 3"])
    free, taking = (
        timeline(tasks(program, FlatPrices(is_inline=True, beside_us=us))) for us in (0.0, 4.0)
    )
    sent = sum(s.task.lane in (Lane.GATHER, Lane.REDUCE) for s in free.spans)
    assert taking.busy_us[Lane.COMPUTE] == pytest.approx(free.busy_us[Lane.COMPUTE] + 4.0 * sent)


def test_clipping_waits_for_every_gradient() -> None:
    found = tasks(final("chain", CHOICES["stage 3"]), FlatPrices(), clips=True)
    before = order_of(found)
    norm = next(t for t in found if t.name == "step AR norm")
    assert all(
        before.has_edge(t.index, norm.index) for t in found if t.name.startswith("backward RS")
    )
    assert all(before.has_edge(norm.index, t.index) for t in found if t.kind == "update")


def test_updates_over_nvme_follow_the_order_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for ahead in (1, 2):
        monkeypatch.setattr(staging, "READS_AHEAD", ahead)
        found = [
            t
            for t in tasks(final("chain", CHOICES["all on nvme"]), FlatPrices())
            if t.graph == "step"
        ]
        updates = {t.index for t in found if t.kind == "update"}
        assert len(updates) > ahead
        at_once = [t for t in found if t.lane is Lane.NVME and not updates & {*t.needs}]
        assert len(at_once) == ahead + 1


def test_identical_layers_are_numbered() -> None:
    found = tasks(final("chain", CHOICES["stage 3"]), FlatPrices())
    layers = {t.layer for t in found if t.unit.startswith("layers.")}
    assert layers == {0, 1, 2, 3}
    assert {t.layer for t in found if t.unit == "code"} == {None}
