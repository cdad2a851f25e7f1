"""verify refuses moves of gradients off the device: missing, doubled, early or of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from away_cases import again, away, sent, wait_of
from torch import fx
from verify_cases import Breaks, check_refused, find, program, set_argument

from zerofx import ops
from zerofx.ir.graphs import call
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.plan.parts import Offload

broken = Breaks()


def offloaded(p: Planned, bucket: int = 2) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return the launch that takes a bucket's gradient away, its wait, and the store."""
    launch = find(p, ops.offload_grad, bucket)
    return launch, wait_of(launch), find(p, ops.store_grad, bucket)


@broken(
    r"store_grad\w* reads reduced bucket 2 .*: a reduced slice is for store_grad only, after off"
)
def stored_on_the_device() -> Planned:
    p = away()
    launch, wait, store = offloaded(p)
    store.replace_input_with(wait, launch.args[0])  # type: ignore[arg-type]
    p.graph(BACKWARD).erase_node(wait)
    p.graph(BACKWARD).erase_node(launch)
    return p


@broken(
    r"store_grad\w* stores reduced bucket 2 .* directly from the device\. .* what offload_grad's"
)
def stored_from_where_it_was() -> Planned:
    p = away()
    launch, wait, store = offloaded(p)
    store.replace_input_with(wait, launch.args[0])  # type: ignore[arg-type]
    return p


@broken(
    r"store_grad\w* reads reduced bucket 2 \(blocks.0\) before its wait: only what `wait` returns"
)
def stored_before_it_arrived() -> Planned:
    p = away()
    launch, wait, store = offloaded(p)
    store.replace_input_with(wait, launch)
    return p


@broken(
    r"offload_grad\w* reads reduced bucket 2 .* before its wait: only what `wait` returns may be"
)
def offloaded_while_it_is_reduced() -> Planned:
    p = away()
    launch, _, _ = offloaded(p)
    reduced: Any = launch.args[0]
    launch.replace_input_with(reduced, reduced.args[0])
    return p


@broken(r"offload_grad\w* reads reduced bucket 2 .*: a reduced slice is for store_grad only, after")
def offloaded_twice() -> Planned:
    p = away()
    launch, wait, _ = offloaded(p)
    again(launch, wait.next)
    return p


@broken(
    r"offload_grad\w* reads reduced bucket \d .*: a reduced slice is for store_grad only, after"
)
def offloaded_from_its_home() -> Planned:
    p = program(offload=Offload(optimizer="cpu", device_fraction=0.3))
    assert p.layout is not None
    near = next(b.index for b in p.layout.buckets if not b.is_away)
    store = find(p, ops.store_grad, near)
    with p.graph(BACKWARD).inserting_before(store):
        launch = call(p.graph(BACKWARD), ops.offload_grad, (store.args[0], near), like=store)
        wait = call(p.graph(BACKWARD), ops.wait, (launch,), like=store)
    store.replace_input_with(store.args[0], wait)  # type: ignore[arg-type]
    return p


@broken(r"offload_grad\w* offloads the reduced gradients of bucket 2 as those of bucket 3")
def offloaded_as_anothers() -> Planned:
    p = away()
    set_argument(offloaded(p)[0], 1, 3)
    return p


@broken(r"offload_grad\w* offloads shard\w*, which no reduction delivered|reads shard bucket 2")
def a_shard_offloaded() -> Planned:
    p = away()
    launch, _, _ = offloaded(p)
    launch.args = (find(p, ops.reload_shard, 2).args[0], 2)
    return p


@broken(r"reduced bucket 2 \(blocks.0\) is launched but never waited for")
def gradient_never_arrives() -> Planned:
    p = away()
    _, wait, store = offloaded(p)
    other = next(
        s for s in p.graph(BACKWARD).nodes if s.target is ops.store_grad and s is not store
    )
    for user in list(store.users):
        user.replace_input_with(store, other)
    p.graph(BACKWARD).erase_node(store)
    p.graph(BACKWARD).erase_node(wait)
    return p


@broken(r"reads reduced bucket 2 .*: a reduced slice is for store_grad only, after offload_grad")
def gradient_computed_with() -> Planned:
    p = away()
    _, wait, _ = offloaded(p)
    with p.graph(BACKWARD).inserting_after(wait):
        call(p.graph(BACKWARD), torch.ops.aten.neg.default, (wait,), like=wait)
    return p


@broken(r"offload_grad\w* is a gradient op: those belong into backward only")
def offloaded_in_forward() -> Planned:
    p = away()
    launch = sent(p, 2)[2]
    with p.graph(FORWARD).inserting_before(launch):
        call(p.graph(FORWARD), ops.offload_grad, (p.placeholders(FORWARD)[0], 2), like=launch)
    return p


@pytest.mark.parametrize(("make", "message"), broken.found, ids=broken.names)
def test_refused(make: Any, message: str) -> None:
    check_refused(make(), message)
