"""offload-activations: what leaves, when it is copied and waited for, what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import goldens
import op_sets
import pytest
import torch
from oracle_cases import Choice
from passes_compact import before, final, run
from torch import Tensor, fx, nn

from zerofx import ops
from zerofx.analysis.recompute.leaving import leaving
from zerofx.capture import capture
from zerofx.codegen.emit import render
from zerofx.errors import PlanError
from zerofx.hardware import load_hardware
from zerofx.ir.dump import dump_program
from zerofx.ir.graphs import alias_source, regions
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.verify import verify
from zerofx.passes.offload_activations import OffloadActivations
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import run as run_pipeline
from zerofx.plan.plan import Plan
from zerofx.tools.views.schedule import view

NAME = "offload-activations"
PLAIN = Choice(3)
CHAIN_FORWARD = """region 0, region 1, region 2, offload 0, region 3, wait 0, offload 1, region 4,
    wait 1, offload 2, region 5, wait 2, offload 3, region 6, wait 3, offload 4, offload 5, wait 4,
    wait 5"""
CHAIN_BACKWARD = """reload 4, reload 5, reload 3, wait 4, wait 5, region 0, reload 2, wait 3,
    region 1, reload 1, wait 2, region 2, reload 0, wait 1, region 3, wait 0, region 4, region 5"""


def listed(text: str) -> list[str]:
    return [row.strip() for row in text.split(",")]


def given(case: str = "gpt") -> Planned:
    return before(case, PLAIN, NAME)


def rows(program: Planned, graph: str) -> list[str]:
    """Return a graph's copies and regions in order: `offload 3`, `wait 3`, `region 2`."""
    found: list[str] = []
    for node in program.graph(graph).nodes:
        where = info(node)
        if where.region is not None:
            row = f"region {where.region}"
        elif node.target in op_sets.COPIES or node.target is ops.wait:
            row = f"{node.name.split('_')[0]} {where.index}"
        else:
            continue
        if not found or found[-1] != row:
            found.append(row)
    return found


def copies(program: Planned, graph: str = FORWARD) -> list[fx.Node]:
    return [n for n in program.graph(graph).nodes if n.target in op_sets.COPIES]


def saved(program: Planned) -> list[str]:
    return [s.name for s in program.outputs[FORWARD] if s.role is Role.SAVED]


# -- order --------------------------------------------------------------------------------------
def test_copies_stand_between_regions() -> None:
    program = given("chain")
    after = run(program, OffloadActivations(activations={"*": "offload"}, distance=1))
    assert rows(after, FORWARD) == listed(CHAIN_FORWARD)
    assert rows(after, BACKWARD) == listed(CHAIN_BACKWARD)


def test_a_value_leaves_behind_its_last_use_and_is_waited_for_one_launch_later() -> None:
    after = run(given(), OffloadActivations(activations={"*": "offload"}))
    order = {n: i for i, n in enumerate(after.graph(FORWARD).nodes)}
    for launch in copies(after):
        root: Any = launch.args[0]
        region = max(info(u).region or 0 for u in _readers(root))
        assert info(launch.prev).region == region or launch.prev.target in (
            *op_sets.COPIES,
            ops.wait,
        )
        assert all(order[u] < order[launch] for u in _readers(root))
    lasts = [info(n.prev).region for n in copies(after) if info(n.prev).region is not None]
    assert lasts == sorted(set(lasts)), "one group of launches a region"


def _readers(root: fx.Node) -> list[fx.Node]:
    nodes = root.graph.nodes
    return [
        u for n in nodes if alias_source(n) is root
        for u in (n, *n.users) if u.op == "call_function" and info(u).region is not None
    ]  # fmt: skip


@pytest.mark.parametrize("distance", [0, 1, 2, 9])
def test_a_reload_is_launched_some_units_ahead(distance: int) -> None:
    after = run(given(), OffloadActivations(activations={"*": "offload"}, distance=distance))
    nodes = list(after.graph(BACKWARD).nodes)
    first_unit = {r: info(ns[0]).unit for r, ns in regions(after.graph(BACKWARD)).items()}
    for launch in copies(after, BACKWARD):
        (wait,) = launch.users
        between = nodes[nodes.index(launch) : nodes.index(wait)]
        units = [
            first_unit[r] for r in dict.fromkeys(info(n).region for n in between) if r in first_unit
        ]
        turns = [u for i, u in enumerate(units) if i == 0 or units[i - 1] != u]
        is_first = not any(info(n).region is not None for n in nodes[: nodes.index(launch)])
        assert len(turns) == distance or (len(turns) < distance and is_first)
        first = next(n for n in nodes[nodes.index(wait) :] if info(n).region is not None)
        reading = {info(u).region for u in wait.users}
        assert info(first).region == min(r for r in reading if r is not None)


def test_golden_texts() -> None:
    """A pipeline of layers whose values leave: each copy has the compute of a layer to itself."""
    choice = Choice(3, activations=(("*", "offload"),), bucket_bytes=0, persist_below=0)
    program = final("chain", choice)
    goldens.check("schedule_offload", str(view(program)))
    goldens.check("dump_offload", dump_program(program))
    rows = render(program)["schedule.py"].split("def ", 1)[1].splitlines()
    copies = [r for r in rows if "rt.offload" in r or "rt.reload" in r or "rt.wait(offl" in r]
    goldens.check("emitted_offload", "\n".join(copies))


# -- what leaves --------------------------------------------------------------------------------
def test_patterns_choose_by_unit() -> None:
    after = run(given(), OffloadActivations(activations={"blocks.1": "offload"}))
    assert {info(n).unit for n in copies(after)} == {"blocks.1"}


def test_names_choose_whatever_the_plan_says() -> None:
    program = given()
    name = next(g.names[0] for g in leaving(program) if len(g.names) == 1)
    after = run(program, OffloadActivations(values=(name,), least_bytes=1 << 30))
    assert [info(n).name for n in copies(after)] == [name]
    assert sorted(saved(after)) == sorted(saved(program))


def test_small_values_stay() -> None:
    sizes = [g.nbytes for g in leaving(given())]
    least = sorted(sizes)[len(sizes) // 2]
    after = run(given(), OffloadActivations(activations={"*": "offload"}, least_bytes=least))
    assert len(copies(after)) == sum(size >= least for size in sizes) > 0


def test_the_tier_leaves_what_would_come_straight_back() -> None:
    every = run(given(), OffloadActivations(activations={"*": "offload"}))
    tier = run(given(), OffloadActivations(everything=True))
    kept = {info(n).name for n in copies(every)} - {info(n).name for n in copies(tier)}
    assert kept and len(copies(tier)) > 5
    first = next(n for n in tier.graph(BACKWARD).nodes if info(n).region is not None)
    assert not [n for n in copies(tier, BACKWARD) if n.next is first or n.prev.op == "placeholder"]


def test_patterns_speak_before_the_tier() -> None:
    choices = {"blocks.0": "keep"}
    after = run(given(), OffloadActivations(activations=choices, everything=True))
    assert {info(n).unit for n in copies(after)} == {"", "blocks.1"}


def test_what_is_given_or_handed_out_stays() -> None:
    for case in ("gpt", "convnet", "stage", "branches"):
        program = given(case)
        handed = {
            alias_source(r) for s, r in zip(program.outputs[FORWARD], program.results(FORWARD),
                                            strict=True)
            if s.role is not Role.SAVED
        }  # fmt: skip
        for group in leaving(program):
            assert group.root.op == "call_function" and group.root not in handed
            assert alias_source(group.root) is group.root


def test_without_a_choice_nothing_changes() -> None:
    assert not OffloadActivations().run(given()).changed


def test_a_host_budget_is_checked() -> None:
    size = sum(g.nbytes for g in leaving(given()))
    OffloadActivations(activations={"*": "offload"}, host_budget_bytes=size).run(given())
    with pytest.raises(PlanError, match=rf"host_budget: GPT would hold .*\({size} bytes\)"):
        OffloadActivations(activations={"*": "offload"}, host_budget_bytes=size - 1).run(given())


# -- views --------------------------------------------------------------------------------------
class Views(nn.Module):
    """Saves parts and transposes of one product, and of a convolution in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).split(8, dim=-1)
        h = self.second((q @ k.t()).softmax(-1) @ v)
        return (h * h.t().contiguous().t()).square().mean()


def views_program(plan: dict[str, Any]) -> Planned:
    torch.manual_seed(0)
    setting = Setting(
        Plan(kernels="aten", **plan), 1, replace(load_hardware("cpu-box"), offload_min_bytes=0)
    )
    return run_pipeline(capture(Views(), (torch.randn(8, 8),)), setting)


def test_a_storage_leaves_once_and_is_looked_into_again() -> None:
    plain, after = (views_program(p) for p in ({}, {"activations": {"*": "offload"}}))
    verify(after)
    roots = [n.args[0] for n in copies(after)]
    assert len(roots) == len(set(roots))
    product = next(r for r in roots if value(r).shape == (8, 24))
    assert sum(value(r).shape == (8, 24) for r in roots) == 1 and "mm" in str(product.target)
    views = [n for n in after.graph(BACKWARD).nodes if info(n).recomputed]
    assert {value(n).shape for n in views if isinstance(value(n), Tensor)} >= {(8, 8)}
    num_saved = [sum(s.role is Role.SAVED for s in p.outputs[FORWARD]) for p in (plain, after)]
    assert num_saved[1] < num_saved[0], "three parts were saved, one storage is"
