"""Broken gathers, waits, releases and slots are refused; each says what, where, and the way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from verify_cases import (
    Breaks,
    check_refused,
    find,
    find_placeholder,
    gathered,
    program,
    region_reading,
    set_argument,
)

from zerofx import ops
from zerofx.ir.graphs import call
from zerofx.ir.meta import Role, info, set_info
from zerofx.ir.program import BACKWARD, FORWARD, Planned

broken = Breaks()


@broken(r"forward: \w+ reads embed.weight, a parameter of gathered bucket 0 .*after its release")
def read_after_release() -> Planned:
    p = program()
    release = find(p, ops.release, 0, FORWARD)
    view = next(u for u in release.args[0].users if u.target is ops.param_view)  # type: ignore[union-attr]
    region_reading(view)[0].prepend(release)
    return p


@broken(r"reads gathered bucket \d .* before its wait: only what `wait` returns may be read")
def read_of_a_launch() -> Planned:
    p = program()
    launch, wait, _ = gathered(p)
    view = next(u for u in wait.users if u.target is ops.param_view)
    view.replace_input_with(wait, launch)
    return p


@broken(r"wait_\w+ reads all_gather_\w+ before it is computed")
def wait_before_launch() -> Planned:
    p = program()
    launch, wait, _ = gathered(p)
    launch.prepend(wait)
    return p


@broken(r"gathered bucket \d \(.*\) is launched but never waited for")
def launch_without_wait() -> Planned:
    p = program()
    launch, _, _ = gathered(p)
    with p.graph(FORWARD).inserting_before(p.graph(FORWARD).output_node()):
        again = call(p.graph(FORWARD), ops.all_gather, (*launch.args[:3], -1), like=launch)
    set_info(again, index=info(launch).index)
    return p


@broken(r"waits for \w+, which launches nothing")
def wait_for_compute() -> Planned:
    p = program()
    _, wait, _ = gathered(p)
    shard = find_placeholder(p, FORWARD, Role.SHARD)
    wait.replace_input_with(wait.args[0], shard)  # type: ignore[arg-type]
    return p


@broken(r"all_gather\w* of bucket 2 \(blocks.0\) is given shard_3, which is not its shard")
def wrong_shard() -> Planned:
    p = program()
    launch = find(p, ops.all_gather, 2, FORWARD)
    set_argument(launch, 0, find_placeholder(p, FORWARD, Role.SHARD, 3))
    return p


@broken(r"all_gather\w* names bucket 9. The layout has 4")
def bucket_out_of_range() -> Planned:
    p = program()
    set_argument(find(p, ops.all_gather, 2, FORWARD), 1, 9)
    return p


@broken(r"has 64 elements; bucket 2 has 3136")
def wrong_length() -> Planned:
    p = program()
    set_argument(find(p, ops.all_gather, 2, FORWARD), 2, 64)
    return p


@broken(r"shard_2 holds 3136 elements of torch.float32; the shard of bucket 2 has 1568")
def shard_of_another_world() -> Planned:
    p = program()
    shard = find_placeholder(p, FORWARD, Role.SHARD, 2)
    shard.meta["val"] = shard.meta["val"].new_empty(3136)
    return p


@broken(r"param_view\w* at offset 1 with shape \[16\] is no parameter of bucket 1")
def view_at_a_wrong_offset() -> Planned:
    p = program()
    view = next(v for v in p.graph(FORWARD).nodes if info(v).name == "norm.bias")
    set_argument(view, 1, 1)
    return p


@broken(r"gives back slot 1, but gathered bucket 2 \(blocks.0\) is in slot 0")
def release_of_another_slot() -> Planned:
    p = program()
    set_argument(find(p, ops.release, 2, FORWARD), 1, 1)
    return p


@broken(r"releases resident\w*, which is no gathered bucket")
def release_of_the_resident_copy() -> Planned:
    p = program()
    resident = find(p, ops.resident)
    with p.graph(BACKWARD).inserting_before(p.graph(BACKWARD).output_node()):
        call(p.graph(BACKWARD), ops.release, (resident,))
    return p


@broken(r"keeps bucket 2 \(blocks.0\) gathered between calls. At stage 3 only the persistent")
def resident_at_stage_3() -> Planned:
    p = program()
    launch = find(p, ops.all_gather, 2, FORWARD)
    launch.target, launch.args = ops.refresh, launch.args[:3]  # type: ignore[assignment]
    return p


@broken(r"takes bucket 1 as forward left it, but forward did not refresh it")
def resident_without_refresh() -> Planned:
    p = program()
    refresh = find(p, ops.refresh, 1, FORWARD)
    refresh.target, refresh.args = ops.all_gather, (*refresh.args, -1)  # type: ignore[assignment]
    return p


@broken(
    r"slots overlap: all_gather\w* puts gathered bucket 2 .* into slot 2 while gathered bucket 0"
)
def two_in_flight_in_one_slot() -> Planned:
    p = program()
    p.slot_bytes = (1 << 20,) * 4
    launch = find(p, ops.all_gather, 2, FORWARD)
    set_argument(launch, 3, 2)
    set_argument(find(p, ops.release, 2, FORWARD), 1, 2)
    return p


@broken(r"uses .*bucket 2 .*in slot \d after all_gather\w*, which puts another buffer there")
def slot_taken_while_it_is_read() -> Planned:
    p = program(prefetch=0)
    release, launch = find(p, ops.release, 2, FORWARD), find(p, ops.all_gather, 3, FORWARD)
    assert release.args[1] == launch.args[3]
    region_reading(next(u for u in release.args[0].users if u.target is ops.param_view))[  # type: ignore[union-attr]
        0
    ].prepend(launch)
    return p


@broken(r"names slot 7. The program has 4")
def slot_out_of_range() -> Planned:
    p = program()
    set_argument(find(p, ops.all_gather, 2, FORWARD), 3, 7)
    return p


@broken(r"needs 12544 bytes. Slot 1 holds 64")
def slot_too_small() -> Planned:
    p = program()
    p.slot_bytes = (p.slot_bytes[0], 64, p.slot_bytes[2])
    return p


@broken(r"pack\w* uses packed bucket 3 .*in slot \d after grad_buffer\w*")
def gradient_slot_taken_before_its_reduction() -> Planned:
    p = program()
    slot = find(p, ops.grad_buffer, 3).args[4]
    first = find(p, ops.pack, 3)
    with p.graph(BACKWARD).inserting_before(first):
        source = find(p, ops.grad_buffer, 2)
        copy = call(p.graph(BACKWARD), ops.grad_buffer, (*source.args[:4], slot), like=source)
    set_info(copy, index=2)
    return p


@pytest.mark.parametrize(("make", "message"), broken.found, ids=broken.names)
def test_a_broken_program_is_refused(make: Callable[[], Planned], message: str) -> None:
    check_refused(make(), message)
