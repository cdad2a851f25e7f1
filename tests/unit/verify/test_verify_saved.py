"""What may not be saved for backward or handed out is refused, and so are broken regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from verify_cases import (
    Breaks,
    check_refused,
    find,
    gathered,
    program,
    region_reading,
)

from zerofx import ops
from zerofx.ir.graphs import add_placeholder, set_results
from zerofx.ir.meta import OutputInfo, Role, info, set_info
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.plan.plan import Plan

broken = Breaks()


def save(p: Planned, node: fx.Node) -> None:
    """Let forward save one more value, and backward take it."""
    position = sum(s.role is Role.SAVED for s in p.outputs[FORWARD])
    set_results(p.graph(FORWARD), [*p.results(FORWARD), node])
    p.outputs[FORWARD] += (OutputInfo(Role.SAVED, node.name, position),)
    val = node.meta["val"]
    add_placeholder(p.graph(BACKWARD), node.name, val, Role.SAVED, name=node.name, index=position)


@broken(
    r"forward: the result reads \S+weight, a parameter of gathered bucket 2 .* after its release"
)
def saved_view_of_a_released_bucket() -> Planned:
    p = program()
    save(p, next(u for u in gathered(p)[1].users if u.target is ops.param_view))
    return p


@broken(r"saves gathered bucket 2 \(blocks.0\) for backward, but it is in slot 0")
def saved_slot() -> Planned:
    p = program()
    release = find(p, ops.release, 2, FORWARD)
    full: Any = release.args[0]
    p.graph(FORWARD).erase_node(release)
    save(p, full)
    return p


@broken(r"saves norm.weight for backward, a view of norm.weight, a parameter of resident bucket")
def saved_view_of_the_resident_copy() -> Planned:
    p = program()
    save(p, next(n for n in p.graph(FORWARD).nodes if info(n).name == "norm.weight"))
    return p


@broken(r"saves t\w* for backward, a view of blocks.0.attn.qkv.weight, a parameter of gathered")
def saved_chain_of_views() -> Planned:
    p = program(memory_budget=1 << 20)
    view = next(n for n in p.graph(FORWARD).nodes if info(n).name == "blocks.0.attn.qkv.weight")
    save(p, next(u for u in view.users if u.target is torch.ops.aten.t.default))
    return p


@broken(r"saves norm.running_mean for backward, which is updated after forward. Save a clone")
def saved_buffer_that_is_updated() -> Planned:
    p = program("convnet")
    mean = next(n for n in p.placeholders(FORWARD, Role.BUFFER) if "running_mean" in info(n).name)
    save(p, mean)
    return p


@broken(r"output 0 looks into .*norm.weight, a parameter of resident bucket .*. Clone it")
def handed_out_parameter() -> Planned:
    p = program()
    view = next(n for n in p.graph(FORWARD).nodes if info(n).name == "norm.weight")
    specs = p.outputs[FORWARD]
    p.outputs[FORWARD] = (OutputInfo(Role.OUTPUT, "0", 1), *specs)
    set_results(p.graph(FORWARD), [view, *p.results(FORWARD)])
    return p


@broken(r"forward saves \d+ values, backward takes \d+")
def saved_value_that_backward_does_not_take() -> Planned:
    p = program()
    position = sum(s.role is Role.SAVED for s in p.outputs[FORWARD])
    extra = next(n for n in p.graph(FORWARD).nodes if info(n).region == 1)
    set_results(p.graph(FORWARD), [*p.results(FORWARD), extra])
    p.outputs[FORWARD] += (OutputInfo(Role.SAVED, "extra", position),)
    return p


@broken(r"region \d+ is interrupted before \w+: communication is allowed only between regions")
def communication_inside_a_region() -> Planned:
    p = program()
    _, wait, _release = gathered(p)
    view = next(u for u in wait.users if u.target is ops.param_view)
    nodes = region_reading(view)
    later = find(p, ops.all_gather, 3, FORWARD)
    nodes[-1].prepend(later)
    return p


@broken(r"\w+ is compute outside any region")
def compute_outside_any_region() -> Planned:
    p = program()
    node = next(n for n in p.graph(FORWARD).nodes if info(n).region == 0)
    set_info(node, region=None)
    return p


@broken(r"norm.running_mean does not follow rank 0: its new value passes no sync_buffers")
def statistics_not_synced() -> Planned:
    p = program("convnet")
    graph = p.graph(FORWARD)
    sync = find(p, ops.sync_buffers, graph=FORWARD)
    for item in list(sync.users):
        item.replace_all_uses_with(sync.args[0][item.args[1]])  # type: ignore[index]
        graph.erase_node(item)
    graph.erase_node(sync)
    return p


@broken(r"norm.running_mean follows rank 0, but the plan says buffers='local'")
def statistics_synced_against_the_plan() -> Planned:
    p = program("convnet")
    p.plan = Plan(buffers="local")
    return p


@pytest.mark.parametrize(("make", "message"), broken.found, ids=broken.names)
def test_a_broken_program_is_refused(make: Callable[[], Planned], message: str) -> None:
    check_refused(make(), message)
