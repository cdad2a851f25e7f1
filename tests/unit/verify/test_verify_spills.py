"""verify refuses ways to and from NVMe that are missing, doubled, early or of others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import fx
from verify_cases import SMALL, Breaks, captured, check_refused

from zerofx import ops
from zerofx.hardware import load_hardware
from zerofx.ir.graphs import call, set_results
from zerofx.ir.meta import Role, info
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.verify import verify
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import run
from zerofx.plan.plan import Offload, Plan

broken = Breaks()


@cache
def _compiled() -> Planned:
    plan = Plan(**SMALL, offload=Offload(activations="nvme", path="/nowhere"))
    return run(
        captured("gpt"), Setting(plan, 2, replace(load_hardware("cpu-box"), offload_min_bytes=0))
    )


def compiled() -> Planned:
    """Return a copy of a program whose activations wait on NVMe."""
    return _compiled().clone()


def way(p: Planned, target: Any, number: int = 3) -> tuple[fx.Node, fx.Node]:
    """Return the launch and the wait of one value's way."""
    graph = p.graph(FORWARD if target in (ops.offload, ops.write_out) else BACKWARD)
    launch = next(n for n in graph.nodes if n.target is target and info(n).index == number)
    return launch, next(iter(launch.users))


def test_the_compiled_program_is_accepted() -> None:
    verify(compiled())


def test_a_file_may_be_read_twice() -> None:
    p = compiled()
    read, wait = way(p, ops.read_back)
    with p.graph(BACKWARD).inserting_after(wait):
        again = p.graph(BACKWARD).node_copy(read)
    with p.graph(BACKWARD).inserting_after(again):
        call(p.graph(BACKWARD), ops.wait, (again,), like=wait)
    verify(p)


@broken(r"before its wait|is launched but never waited for")
def write_never_waited_for() -> Planned:
    p = compiled()
    launch, wait = way(p, ops.write_out)
    wait.replace_all_uses_with(launch)
    p.graph(FORWARD).erase_node(wait)
    return p


@broken(r"backward: .* before its wait")
def read_never_waited_for() -> Planned:
    p = compiled()
    launch, wait = way(p, ops.read_back)
    wait.replace_all_uses_with(launch)
    p.graph(BACKWARD).erase_node(wait)
    return p


@broken(r"write_out\w* reads hosted \w+ before its wait: only what `wait` returns")
def written_before_it_has_arrived() -> Planned:
    p = compiled()
    launch, wait = way(p, ops.offload)
    write, _ = way(p, ops.write_out)
    write.args = (launch, write.args[1])
    write.append(wait)
    return p


@broken(r"saves \w+, which \w+ takes on to NVMe. Save what its wait returns|has freed its memory")
def the_hosts_place_is_saved() -> Planned:
    p = compiled()
    write, stored = way(p, ops.write_out)
    host = write.args[0]
    results = [host if r is stored else r for r in p.results(FORWARD)]
    set_results(p.graph(FORWARD), results)
    return p


@broken(r"is written twice: by \w+ and \w+|has freed its memory")
def written_twice() -> Planned:
    p = compiled()
    write, wait = way(p, ops.write_out)
    with p.graph(FORWARD).inserting_after(write):
        again = p.graph(FORWARD).node_copy(write)
    with p.graph(FORWARD).inserting_after(wait):
        call(p.graph(FORWARD), ops.wait, (again,), like=wait)
    return p


@broken(r"reloads [\w.]+, which is not on the host|a value on NVMe is for read_back only")
def reloaded_from_nvme() -> Planned:
    p = compiled()
    read, wait = way(p, ops.read_back)
    wait.replace_all_uses_with(read.args[0])
    p.graph(BACKWARD).erase_node(wait)
    p.graph(BACKWARD).erase_node(read)
    return p


@broken(r"a value on the host is for reload or write_out only|which is not on NVMe")
def read_of_what_was_never_written() -> Planned:
    p = compiled()
    write, wait = way(p, ops.write_out)
    wait.replace_all_uses_with(write.args[0])
    p.graph(FORWARD).erase_node(wait)
    p.graph(FORWARD).erase_node(write)
    return p


@broken(r"moves \w+, which \w+ has moved already|has freed its memory")
def reloaded_while_it_is_written() -> Planned:
    p = compiled()
    write, _ = way(p, ops.write_out)
    reload, _ = way(p, ops.reload)
    with p.graph(FORWARD).inserting_after(write):
        back = call(
            p.graph(FORWARD), ops.reload, (write.args[0],), like=write, named=dict(reload.kwargs)
        )
    with p.graph(FORWARD).inserting_after(back):
        call(p.graph(FORWARD), ops.wait, (back,), like=write)
    return p


@broken(r"output .*is \w+, which is on NVMe")
def stored_value_returned() -> Planned:
    p = compiled()
    _, stored = way(p, ops.write_out)
    results = p.results(FORWARD)
    at = next(i for i, s in enumerate(p.outputs[FORWARD]) if s.role is Role.OUTPUT)
    results[at] = stored
    set_results(p.graph(FORWARD), results)
    return p


@broken(r"does not compute what was captured")
def places_exchanged() -> Planned:
    p = compiled()
    found: dict[Any, list[fx.Node]] = {}
    for node in p.graph(BACKWARD).nodes:
        if node.target is ops.read_back:
            val = node.meta["val"]
            found.setdefault((val.shape, val.dtype), []).append(node)
    first, second, *_ = next(reads for reads in found.values() if len(reads) > 1)
    first.args, second.args = second.args, first.args
    return p


@pytest.mark.parametrize(("make", "message"), broken.found, ids=broken.names)
def test_refused(make: Any, message: str) -> None:
    check_refused(make(), message)
