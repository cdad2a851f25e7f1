"""spill-activations: what is on the host goes on to NVMe, and is back in time."""

from __future__ import annotations

from typing import Any

import pytest
from oracle_cases import Choice
from passes_compact import before, run
from torch import fx

from zerofx import ops
from zerofx.ir.graphs import regions
from zerofx.ir.meta import info
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.passes.offload_activations import OffloadActivations
from zerofx.passes.spill_activations import SpillActivations

FORWARD_ROWS = """region 0, region 1, region 2, offload 0, region 3, wait offload 0, write 0,
    offload 1, region 4, wait write 0, wait offload 1, write 1, offload 2, region 5, wait write 1,
    wait offload 2, write 2, offload 3, region 6, wait write 2, wait offload 3, write 3, offload 4,
    offload 5, wait write 3, wait offload 4, wait offload 5, write 4, write 5, wait write 4,
    wait write 5"""
BACKWARD_ROWS = """read 4, read 5, read 3, wait read 4, reload 4, wait read 5, reload 5,
    wait read 3,
    reload 3, wait reload 4, wait reload 5, read 2, region 0, wait read 2, reload 2, wait reload 3,
    read 1, region 1, wait read 1, reload 1, wait reload 2, read 0, region 2, wait read 0, reload 0,
    wait reload 1, region 3, wait reload 0, region 4, region 5"""
WORDS: dict[Any, str] = {
    ops.offload: "offload", ops.reload: "reload", ops.write_out: "write", ops.read_back: "read",
}  # fmt: skip


def given(distance: int = 1) -> Planned:
    program = before("chain", Choice(3), OffloadActivations.name)
    return run(program, OffloadActivations(activations={"*": "offload"}, distance=distance))


def rows(program: Planned, graph: str) -> list[str]:
    """Return a graph's copies and regions in order: `write 3`, `wait write 3`, `region 2`."""
    found: list[str] = []
    for node in program.graph(graph).nodes:
        where = info(node)
        if where.region is not None:
            row = f"region {where.region}"
        elif node.target in WORDS:
            row = f"{WORDS[node.target]} {where.index}"
        elif node.target is ops.wait:
            row = f"wait {WORDS[node.args[0].target]} {where.index}"
        else:
            continue
        if not found or found[-1] != row:
            found.append(row)
    return found


def listed(text: str) -> list[str]:
    return [row.strip() for row in text.split(",")]


def test_before_and_behind() -> None:
    after = run(given(), SpillActivations(enabled=True))
    assert rows(after, FORWARD) == listed(FORWARD_ROWS)
    assert rows(after, BACKWARD) == listed(BACKWARD_ROWS)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("distance", [0, 1, 2])
def test_a_read_is_launched_some_units_ahead_of_the_reload(ahead: int, distance: int) -> None:
    after = run(given(ahead), SpillActivations(enabled=True, distance=distance))
    nodes = list(after.graph(BACKWARD).nodes)
    first_unit = {r: info(ns[0]).unit for r, ns in regions(after.graph(BACKWARD)).items()}
    for read in (n for n in nodes if n.target is ops.read_back):
        (wait,) = read.users
        (reload,) = wait.users
        assert reload.target is ops.reload and wait.next is reload
        between = nodes[nodes.index(read) : nodes.index(reload)]
        turns = _turns(first_unit[r] for n in between if (r := info(n).region) is not None)
        is_first = not any(info(n).region is not None for n in nodes[: nodes.index(read)])
        assert len(turns) == distance or (len(turns) < distance and is_first)


def _turns(units: Any) -> list[str]:
    found: list[str] = []
    for unit in units:
        if not found or found[-1] != unit:
            found.append(unit)
    return found


def held_on_host(program: Planned, graph: str) -> int:
    """Return the most values that are on the host at one time, on their way or not."""
    held: set[int] = set()
    most = 0
    for node in program.graph(graph).nodes:
        launch: fx.Node = node.args[0] if node.target is ops.wait else node  # type: ignore[assignment]
        if node.target in (ops.offload, ops.read_back):
            held.add(info(node).index)
        elif node.target is ops.wait and launch.target in (ops.write_out, ops.reload):
            held.discard(info(node).index)
        most = max(most, len(held))
    assert not held
    return most


def test_the_host_holds_two_places_values() -> None:
    after = run(given(), SpillActivations(enabled=True))
    assert held_on_host(after, FORWARD) == 3  # the last two leave together
    assert held_on_host(after, BACKWARD) == 3


def test_without_the_tier_nothing_changes() -> None:
    assert not SpillActivations().run(given()).changed
