"""verify refuses moves of shards that are missing, doubled, early or of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from away_cases import OPTIMIZER, again, away, copied, release_of, sent, wait_of
from verify_cases import Breaks, check_refused, find, program, set_argument

from zerofx import ops
from zerofx.ir.graphs import call
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.verify import verify
from zerofx.plan.parts import Offload

broken = Breaks()


@pytest.mark.parametrize("make", [away, copied, lambda: away(world=1), lambda: away(stage=3)])
def test_the_compiled_programs_are_accepted(make: Any) -> None:
    verify(make())


# -- reloads ------------------------------------------------------------------------------------
@broken(
    r"all_gather\w* reads shard bucket 2 \(blocks.0\): it is kept off the device. Reload it first"
)
def gathered_from_afar() -> Planned:
    p = away()
    gather, _, launch, held = sent(p, 2)
    gather.replace_input_with(held, launch.args[0])
    return p


@broken(r"the view of \S+ reads .*shard bucket \d.*: it is kept off the device. Reload it first")
def looked_into_from_afar() -> Planned:
    p = away(world=1)
    launch = find(p, ops.reload_shard, graph=FORWARD)
    view = next(u for u in wait_of(launch).users if u.target is ops.param_view)
    view.replace_input_with(view.args[0], launch.args[0])  # type: ignore[arg-type]
    return p


@broken(r"all_gather\w* reads reloaded shard bucket 2 .* before its wait: only what `wait` returns")
def sent_without_a_wait() -> Planned:
    p = away()
    gather, _, launch, held = sent(p, 2)
    gather.replace_input_with(held, launch)
    return p


@broken(r"all_gather\w* of bucket 2 \(blocks.0\) sends the reloaded shard of bucket 3")
def another_shard_sent() -> Planned:
    p = away()
    gather, _, _, held = sent(p, 2)
    other = sent(p, 3)[3]
    other.append(gather)
    gather.replace_input_with(held, other)
    return p


@broken(r"reload\w* of bucket 2 \(blocks.0\) is given shard\w*, which is not its shard")
def another_shard_reloaded() -> Planned:
    p = away()
    first, second = (sent(p, i)[2] for i in (2, 3))
    set_argument(first, 0, second.args[0])
    return p


@broken(r"reload\w* reloads bucket \d \(\S+\), whose shard lives on the device")
def reloaded_from_the_device() -> Planned:
    p = program(offload=Offload(optimizer="cpu", parameters="cpu", device_fraction=0.3))
    assert p.layout is not None
    near = next(b for b in p.layout.buckets if not b.is_away)
    shard = next(s for s in p.placeholders(FORWARD, Role.SHARD) if info(s).index == near.index)
    launch = find(p, ops.reload_shard, graph=FORWARD)
    numel = p.layout.shard_numel(near)
    with p.graph(FORWARD).inserting_before(launch):
        call(p.graph(FORWARD), ops.reload_shard, (shard, near.index, numel), like=launch)
    return p


@broken(r"reload\w* has 16 elements; a shard of bucket 2 \(blocks.0\) has \d+")
def part_of_a_shard() -> Planned:
    p = away()
    set_argument(sent(p, 2)[2], 2, 16)
    return p


@broken(r"reload\w* is torch.float64; a reloaded shard of bucket 2 \(blocks.0\) is torch.float32")
def another_format() -> Planned:
    p = away()
    launch = sent(p, 2)[2]
    launch.meta["val"] = value(launch).double()
    return p


@broken(r"bucket 2 \(blocks.0\) is gathered from the host: use rt.reload_shard")
def refreshed_where_nothing_stays() -> Planned:
    p = away()
    launch = sent(p, 2)[2]
    launch.target, launch.args = ops.refresh_shard, launch.args[:3]
    return p


@broken(r"bucket 2 \(blocks.0\) is gathered from the device: use rt.refresh_shard")
def reloaded_where_a_copy_stays() -> Planned:
    p = copied()
    sent(p, 2)[2].target = ops.reload_shard
    return p


@broken(r"bucket \d \(\S+\) is gathered from the device: use rt.refresh.$")
def shard_refreshed_where_it_is_the_bucket() -> Planned:
    p = program(world=1, offload=OPTIMIZER)
    find(p, ops.refresh, graph=FORWARD).target = ops.refresh_shard
    return p


@broken(r"reloaded shard bucket 2 \(blocks.0\) is launched but never waited for")
def never_waited_for() -> Planned:
    p = away()
    launch = sent(p, 2)[2]
    again(launch, launch).args = launch.args[:3]
    return p


@broken(r"reload\w* is waited for twice, the second time by wait\w*")
def waited_for_twice() -> Planned:
    p = away()
    *_, held = sent(p, 2)
    again(held, held.next)
    return p


# -- what becomes of a copy ---------------------------------------------------------------------
@broken(r"reads reloaded shard bucket 2 .*: a reloaded shard is for the all-gather of its bucket")
def reloaded_shard_computed_with() -> Planned:
    p = away()
    *_, held = sent(p, 2)
    with p.graph(FORWARD).inserting_after(held):
        call(p.graph(FORWARD), torch.ops.aten.neg.default, (held,), like=held)
    return p


@broken(
    r"release\w* releases reloaded shard bucket 2 \(blocks.0\) while all_gather\w* still sends it"
)
def released_while_it_is_sent() -> Planned:
    p = away()
    gather, _, _, held = sent(p, 2)
    gather.append(release_of(held))
    return p


@broken(r"all_gather\w* reads reloaded shard bucket 2 \(blocks.0\) after its release")
def released_before_it_is_sent() -> Planned:
    p = away()
    *_, held = sent(p, 2)
    held.append(release_of(held))
    return p


@broken(
    r"release\w* releases reloaded shard bucket 2 .* keeps on the device between calls. Drop the"
)
def copy_that_stays_released() -> Planned:
    p = copied()
    _, arrived, _, held = sent(p, 2)
    with p.graph(FORWARD).inserting_after(arrived):
        call(p.graph(FORWARD), ops.release, (held,), like=held)
    return p


@broken(
    r"wait\w* waits for refresh_shard\w*, which moves nothing: refresh_shard\w*, launched before"
)
def second_refresh_waited_for_first() -> Planned:
    p = copied()
    gather, _, launch, held = sent(p, 2)
    other = again(launch, launch.next)
    copy = again(held, held, other)
    gather.replace_input_with(held, copy)
    return p


@broken(r"wait\w* waits for refresh\w*, which moves nothing: refresh\w*, launched before it, does")
def second_refresh_of_a_resident_bucket() -> Planned:
    p = program(stage=2)
    launch = find(p, ops.refresh, graph=FORWARD)
    other = again(launch, launch.next)
    again(wait_of(launch), wait_of(launch), other)
    return p


@broken(
    r"slots overlap: all_gather\w* puts gathered bucket \d .* while reloaded shard .* in flight"
)
def slot_taken_while_it_arrives() -> Planned:
    p = away()
    launch = sent(p, 3)[2]
    earlier = sent(p, 2)[0]
    assert launch.next is earlier, "the next one's reload is launched just ahead"
    sizes = list(p.slot_bytes)
    sizes[launch.args[3]] = max(sizes)
    p.slot_bytes = tuple(sizes)
    set_argument(earlier, 3, launch.args[3])
    return p


@broken(r"slots overlap: \w+ puts .* into slot \d while reloaded shard .* in flight there")
def slot_taken_while_it_is_sent() -> Planned:
    p = away()
    gather, _, launch, held = sent(p, 2)
    sizes = list(p.slot_bytes)
    sizes[launch.args[3]] = max(sizes)
    p.slot_bytes = tuple(sizes)
    p.graph(FORWARD).erase_node(release_of(held))
    set_argument(gather, 3, launch.args[3])
    after = again(gather, gather.next)
    assert after.args[3] == launch.args[3]
    return p


@broken(r"update\w* overwrites the shard of bucket 2 \(blocks.0\) while reload\w* still sends it")
def updated_while_it_is_read() -> Planned:
    p = away(update="in-backward")
    *_, launch, held = sent(p, 2, BACKWARD)
    update = find(p, ops.update, 2)
    other = again(launch, update)
    other.args = launch.args[:3]
    again(held, update.next, other)
    return p


@pytest.mark.parametrize(("make", "message"), broken.found, ids=broken.names)
def test_refused(make: Any, message: str) -> None:
    check_refused(make(), message)
