"""verify refuses copies to and from the host that are missing, doubled, early or of others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx
from verify_cases import SMALL, Breaks, captured, check_refused

from zerofx import ops
from zerofx.hardware import load_hardware
from zerofx.ir.graphs import call
from zerofx.ir.meta import OutputInfo, Role, info
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.verify import verify
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import run
from zerofx.plan.plan import Plan

broken = Breaks()


@cache
def _compiled() -> Planned:
    plan = Plan(**SMALL, activations={"blocks.*": "offload"})
    return run(
        captured("gpt"), Setting(plan, 2, replace(load_hardware("cpu-box"), offload_min_bytes=0))
    )


def compiled() -> Planned:
    """Return a copy of a program whose blocks' activations wait on the host."""
    return _compiled().clone()


def away(p: Planned, number: int = 3) -> tuple[fx.Node, fx.Node]:
    """Return a value's offload and its wait."""
    return _copy(p, FORWARD, ops.offload, number)


def back(p: Planned, number: int = 3) -> tuple[fx.Node, fx.Node]:
    """Return its reload, and the wait of that."""
    return _copy(p, BACKWARD, ops.reload, number)


def _copy(p: Planned, graph: str, target: Any, number: int) -> tuple[fx.Node, fx.Node]:
    launch = next(n for n in p.graph(graph).nodes if n.target is target and info(n).index == number)
    return launch, next(iter(launch.users))


def shared(p: Planned) -> tuple[fx.Node, fx.Node]:
    """Return an offload, and the first node of the last region that reads its value."""
    nodes = list(p.graph(FORWARD).nodes)
    for launch in (n for n in nodes if n.target is ops.offload):
        reads = [u for u in launch.args[0].users if info(u).region is not None]
        reads = [u for u in reads if info(u).region != info(launch.args[0]).region]
        if reads:
            region = info(max(reads, key=nodes.index)).region
            return launch, next(n for n in nodes if info(n).region == region)
    raise AssertionError("no value is read outside the region that makes it")


def test_the_compiled_program_is_accepted() -> None:
    verify(compiled())


@broken(r"offload\w* reads .* before|reads hosted \w+ before its wait|is launched but never waited")
def offload_never_waited_for() -> Planned:
    p = compiled()
    launch, wait = away(p)
    wait.replace_all_uses_with(launch)
    p.graph(FORWARD).erase_node(wait)
    return p


@broken(r"backward: hosted|backward: .* reads reloaded \w+ before its wait")
def reload_never_waited_for() -> Planned:
    p = compiled()
    launch, wait = back(p)
    wait.replace_all_uses_with(launch)
    p.graph(BACKWARD).erase_node(wait)
    return p


@broken(r"is waited for twice, the second time by \w+")
def waited_for_twice() -> Planned:
    p = compiled()
    launch, wait = away(p)
    with p.graph(FORWARD).inserting_after(wait):
        call(p.graph(FORWARD), ops.wait, (launch,), like=wait)
    return p


@broken(r"reads offloaded \w+ after \w+ has freed its memory. Move the offload after the last")
def read_after_it_left() -> Planned:
    p = compiled()
    launch, reader = shared(p)
    reader.prepend(launch)
    reader.prepend(next(iter(launch.users)))
    return p


@broken(r"offloads \w+ a second time")
def offloaded_twice() -> Planned:
    p = compiled()
    launch, _ = away(p)
    with p.graph(FORWARD).inserting_after(launch):
        call(p.graph(FORWARD), ops.offload, launch.args, like=launch)
    return p


@broken(r"is reloaded twice: by \w+ and \w+")
def reloaded_twice() -> Planned:
    p = compiled()
    launch, wait = back(p)
    with p.graph(BACKWARD).inserting_after(wait):
        again = p.graph(BACKWARD).node_copy(launch)
    with p.graph(BACKWARD).inserting_after(again):
        call(p.graph(BACKWARD), ops.wait, (again,), like=wait)
    return p


@broken(r"reads hosted [\w.]+: a value on the host is for reload or write_out only")
def read_on_the_host() -> Planned:
    p = compiled()
    launch, wait = back(p)
    wait.replace_all_uses_with(launch.args[0])
    p.graph(BACKWARD).erase_node(wait)
    p.graph(BACKWARD).erase_node(launch)
    return p


@broken(r"reloads [\w.]+, which is not on the host")
def reload_of_what_never_left() -> Planned:
    p = compiled()
    launch, wait = away(p)
    wait.replace_all_uses_with(launch.args[0])
    p.graph(FORWARD).erase_node(wait)
    p.graph(FORWARD).erase_node(launch)
    return p


@broken(r"offloads [\w.]+, given: only a value of forward's own may leave")
def input_offloaded() -> Planned:
    p = compiled()
    launch, _ = away(p)
    launch.args = (p.placeholders(FORWARD, Role.INPUT)[0],)
    return p


@broken(r"offloads .*a parameter of gathered bucket \d.*: only a value of forward's own may leave")
def parameter_offloaded() -> Planned:
    p = compiled()
    launch, _ = away(p)
    view = next(n for n in p.graph(FORWARD).nodes if n.target is ops.param_view)
    view.append(launch)
    launch.args = (view,)
    return p


@broken(r"offloads \w+, a view. Offload \w+ whole")
def view_offloaded() -> Planned:
    p = compiled()
    launch, _ = away(p)
    root = launch.args[0]
    region = info(root).region
    with p.graph(FORWARD).inserting_after(root):
        view = p.graph(FORWARD).call_function(torch.ops.aten.alias.default, (root,))
    view.meta = dict(root.meta)
    assert info(view).region == region
    launch.args = (view,)
    return p


@broken(r"output loss is \w+, which is on the host|output .* is \w+, which is on the host")
def host_value_returned() -> Planned:
    p = compiled()
    _, wait = away(p)
    results = p.results(FORWARD)
    at = next(i for i, s in enumerate(p.outputs[FORWARD]) if s.role is Role.OUTPUT)
    results[at] = wait
    p.graph(FORWARD).output_node().args = (tuple(results),)
    return p


@broken(r"does not compute what was captured")
def host_values_exchanged() -> Planned:
    p = compiled()
    found: dict[Any, list[fx.Node]] = {}
    for node in p.graph(FORWARD).nodes:
        if node.target is ops.offload:
            val = node.meta["val"]
            found.setdefault((val.shape, val.dtype), []).append(next(iter(node.users)))
    first, second, *_ = next(ws for ws in found.values() if len(ws) > 1)
    results = [second if r is first else first if r is second else r for r in p.results(FORWARD)]
    p.graph(FORWARD).output_node().args = (tuple(results),)
    return p


@pytest.mark.parametrize(("make", "message"), broken.found, ids=broken.names)
def test_refused(make: Any, message: str) -> None:
    check_refused(make(), message)


def test_saved_host_values_keep_their_form() -> None:
    p = compiled()
    specs = p.outputs[FORWARD]
    assert all(isinstance(s, OutputInfo) for s in specs)
    for held in p.placeholders(BACKWARD, Role.SAVED):
        for user in held.users:
            if user.target is ops.reload:
                assert user.meta["val"].stride() == held.meta["val"].stride()
