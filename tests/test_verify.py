"""Every invariant: a broken program is refused, and says what, where and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from verify_cases import captured, find, program, region_reading, set_argument

from zerofx.errors import ProgramError
from zerofx.ir import ops
from zerofx.ir.graphs import add_placeholder, call, set_results
from zerofx.ir.meta import OutputInfo, Role, info, set_info
from zerofx.ir.program import BACKWARD, FORWARD, Program
from zerofx.ir.verify import verify, verify_ranks
from zerofx.machine import machine_for
from zerofx.passes.assign_slots import AssignSlots
from zerofx.passes.pipeline import Setting, run, run_pass
from zerofx.plan import Plan

BREAKS: list[tuple[Callable[[], Program], str]] = []


def broken(message: str) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Register a function that returns a broken program, with what its refusal says."""

    def register(make: Callable[[], Program]) -> Callable[[], Program]:
        BREAKS.append((make, message))
        return make

    return register


def gathered(p: Program, graph: str = FORWARD) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return (launch, wait, release) of the first bucket gathered into a slot."""
    release = find(p, ops.release, graph=graph)
    wait: Any = release.args[0]
    return wait.args[0], wait, release


# -- gathered parameters ------------------------------------------------------------------------
@broken(r"forward: \w+ reads embed.weight, a parameter of gathered bucket 0 .*after its release")
def read_after_release() -> Program:
    p = program()
    release = find(p, ops.release, 0, FORWARD)
    view = next(u for u in release.args[0].users if u.target is ops.param_view)  # type: ignore[union-attr]
    region_reading(view)[0].prepend(release)
    return p


@broken(r"reads gathered bucket \d .* before its wait: only what `wait` returns may be read")
def read_of_a_launch() -> Program:
    p = program()
    launch, wait, _ = gathered(p)
    view = next(u for u in wait.users if u.target is ops.param_view)
    view.replace_input_with(wait, launch)
    return p


@broken(r"wait_\w+ reads all_gather_\w+ before it is computed")
def wait_before_launch() -> Program:
    p = program()
    launch, wait, _ = gathered(p)
    launch.prepend(wait)
    return p


@broken(r"gathered bucket \d \(.*\) is launched but never waited for")
def launch_without_wait() -> Program:
    p = program()
    launch, _, _ = gathered(p)
    with p.graph(FORWARD).inserting_before(p.graph(FORWARD).output_node()):
        again = call(p.graph(FORWARD), ops.all_gather, (*launch.args[:3], -1), like=launch)
    set_info(again, index=info(launch).index)
    return p


@broken(r"waits for \w+, which launches nothing")
def wait_for_compute() -> Program:
    p = program()
    _, wait, _ = gathered(p)
    shard = find_placeholder(p, FORWARD, Role.SHARD)
    wait.replace_input_with(wait.args[0], shard)  # type: ignore[arg-type]
    return p


@broken(r"all_gather\w* of bucket 2 \(blocks.0\) is given shard_3, which is not its shard")
def wrong_shard() -> Program:
    p = program()
    launch = find(p, ops.all_gather, 2, FORWARD)
    set_argument(launch, 0, find_placeholder(p, FORWARD, Role.SHARD, 3))
    return p


@broken(r"all_gather\w* names bucket 9; the layout has 4")
def bucket_out_of_range() -> Program:
    p = program()
    set_argument(find(p, ops.all_gather, 2, FORWARD), 1, 9)
    return p


@broken(r"has 64 elements; bucket 2 has 3136")
def wrong_length() -> Program:
    p = program()
    set_argument(find(p, ops.all_gather, 2, FORWARD), 2, 64)
    return p


@broken(r"shard_2 holds 3136 elements of torch.float32; the shard of bucket 2 has 1568")
def shard_of_another_world() -> Program:
    p = program()
    shard = find_placeholder(p, FORWARD, Role.SHARD, 2)
    shard.meta["val"] = shard.meta["val"].new_empty(3136)
    return p


@broken(r"param_view\w* at offset 1 with shape \[16\] is no parameter of bucket 1")
def view_at_a_wrong_offset() -> Program:
    p = program()
    view = next(v for v in p.graph(FORWARD).nodes if info(v).name == "norm.bias")
    set_argument(view, 1, 1)
    return p


@broken(r"gives back slot 2, but gathered bucket 2 \(blocks.0\) lies in slot 1")
def release_of_another_slot() -> Program:
    p = program()
    set_argument(find(p, ops.release, 2, FORWARD), 1, 2)
    return p


@broken(r"releases resident\w*, which is no gathered bucket")
def release_of_the_resident_copy() -> Program:
    p = program()
    resident = find(p, ops.resident)
    with p.graph(BACKWARD).inserting_before(p.graph(BACKWARD).output_node()):
        call(p.graph(BACKWARD), ops.release, (resident,))
    return p


@broken(r"keeps bucket 2 \(blocks.0\) gathered between calls; at stage 3 only the persistent")
def resident_at_stage_3() -> Program:
    p = program()
    launch = find(p, ops.all_gather, 2, FORWARD)
    launch.target, launch.args = ops.refresh, launch.args[:3]  # type: ignore[assignment]
    return p


@broken(r"takes bucket 1 as forward left it, but forward did not refresh it")
def resident_without_refresh() -> Program:
    p = program()
    refresh = find(p, ops.refresh, 1, FORWARD)
    refresh.target, refresh.args = ops.all_gather, (*refresh.args, -1)  # type: ignore[assignment]
    return p


# -- slots --------------------------------------------------------------------------------------
@broken(
    r"slots overlap: all_gather\w* puts gathered bucket 2 .* into slot 0 while gathered bucket 0"
)
def two_in_flight_in_one_slot() -> Program:
    p = program()
    p.slots = {"bytes": [1 << 20] * 3}
    launch = find(p, ops.all_gather, 2, FORWARD)
    set_argument(launch, 3, 0)
    set_argument(find(p, ops.release, 2, FORWARD), 1, 0)
    return p


@broken(r"uses .*bucket 2 .*in slot \d behind all_gather\w*, which puts another buffer there")
def slot_taken_while_it_is_read() -> Program:
    p = program(prefetch=0)
    release, launch = find(p, ops.release, 2, FORWARD), find(p, ops.all_gather, 3, FORWARD)
    assert release.args[1] == launch.args[3]
    region_reading(next(u for u in release.args[0].users if u.target is ops.param_view))[  # type: ignore[union-attr]
        0
    ].prepend(launch)
    return p


@broken(r"names slot 7; the program has 3")
def slot_out_of_range() -> Program:
    p = program()
    set_argument(find(p, ops.all_gather, 2, FORWARD), 3, 7)
    return p


@broken(r"needs 12544 bytes; slot 1 holds 64")
def slot_too_small() -> Program:
    p = program()
    p.slots = {"bytes": [p.slots["bytes"][0], 64, p.slots["bytes"][2]]}
    return p


@broken(r"pack\w* uses packed bucket 3 .*in slot 1 behind grad_buffer\w*")
def gradient_slot_taken_before_its_reduction() -> Program:
    p = program()
    set_argument(find(p, ops.grad_buffer, 3), 4, 1)
    first = find(p, ops.pack, 3)
    with p.graph(BACKWARD).inserting_before(first):
        source = find(p, ops.grad_buffer, 2)
        copy = call(p.graph(BACKWARD), ops.grad_buffer, (*source.args[:4], 1), like=source)
    set_info(copy, index=2)
    return p


# -- what is saved ------------------------------------------------------------------------------
def save(p: Program, node: fx.Node) -> None:
    """Let forward save one more value, and backward take it."""
    position = sum(s.role is Role.SAVED for s in p.outputs[FORWARD])
    set_results(p.graph(FORWARD), [*p.results(FORWARD), node])
    p.outputs[FORWARD] += (OutputInfo(Role.SAVED, node.name, position),)
    val = node.meta["val"]
    add_placeholder(p.graph(BACKWARD), node.name, val, Role.SAVED, name=node.name, index=position)


@broken(
    r"forward: the result reads \S+weight, a parameter of gathered bucket 2 .* after its release"
)
def saved_view_of_a_released_bucket() -> Program:
    p = program()
    save(p, next(u for u in gathered(p)[1].users if u.target is ops.param_view))
    return p


@broken(r"saves gathered bucket 2 \(blocks.0\) for backward, but it lies in slot 1")
def saved_slot() -> Program:
    p = program()
    release = find(p, ops.release, 2, FORWARD)
    full: Any = release.args[0]
    p.graph(FORWARD).erase_node(release)
    save(p, full)
    return p


@broken(r"saves norm.weight for backward, a view of norm.weight, a parameter of resident bucket")
def saved_view_of_the_resident_copy() -> Program:
    p = program()
    save(p, next(n for n in p.graph(FORWARD).nodes if info(n).name == "norm.weight"))
    return p


@broken(r"saves t\w* for backward, a view of blocks.0.attn.qkv.weight, a parameter of gathered")
def saved_chain_of_views() -> Program:
    p = program(memory_budget=1 << 20)
    view = next(n for n in p.graph(FORWARD).nodes if info(n).name == "blocks.0.attn.qkv.weight")
    save(p, next(u for u in view.users if u.target is torch.ops.aten.t.default))
    return p


@broken(r"saves norm.running_mean for backward, which is updated after forward; save a clone")
def saved_buffer_that_is_updated() -> Program:
    p = program("convnet")
    mean = next(n for n in p.placeholders(FORWARD, Role.BUFFER) if "running_mean" in info(n).name)
    save(p, mean)
    return p


@broken(r"output 0 looks into .*norm.weight, a parameter of resident bucket .*; clone it")
def handed_out_parameter() -> Program:
    p = program()
    view = next(n for n in p.graph(FORWARD).nodes if info(n).name == "norm.weight")
    specs = p.outputs[FORWARD]
    p.outputs[FORWARD] = (OutputInfo(Role.OUTPUT, "0", 1), *specs)
    set_results(p.graph(FORWARD), [view, *p.results(FORWARD)])
    return p


@broken(r"forward saves \d+ values, backward takes \d+")
def saved_value_that_backward_does_not_take() -> Program:
    p = program()
    position = sum(s.role is Role.SAVED for s in p.outputs[FORWARD])
    extra = next(n for n in p.graph(FORWARD).nodes if info(n).region == 1)
    set_results(p.graph(FORWARD), [*p.results(FORWARD), extra])
    p.outputs[FORWARD] += (OutputInfo(Role.SAVED, "extra", position),)
    return p


# -- gradients ----------------------------------------------------------------------------------
@broken(r"reduces bucket 2 before the gradient of blocks.0.\S+ is packed; move it behind the last")
def reduced_too_early() -> Program:
    p = program()
    launch = find(p, ops.reduce_scatter, 2)
    buffer = find(p, ops.grad_buffer, 2)
    set_argument(launch, 0, buffer)
    buffer.append(launch)
    return p


@broken(r"packs into bucket 1 .*after reduce_scatter\w* has reduced it")
def packed_after_the_reduction() -> Program:
    p = program()
    launch = find(p, ops.reduce_scatter, 1)
    last: Any = launch.args[0]
    with p.graph(BACKWARD).inserting_before(p.graph(BACKWARD).output_node()):
        call(p.graph(BACKWARD), ops.pack, last.args, like=last)
    return p


@broken(r"the gradient of norm.bias is packed twice: \w+, then \w+ \(gpt.py:\d+\)")
def packed_twice() -> Program:
    p = program()
    first = find(p, ops.pack, 1)
    later: Any = find(p, ops.reduce_scatter, 1).args[0]
    other = next(g for g in later.args[1] if g.meta["val"].shape == (16,))
    later.args = (later.args[0], [*later.args[1], other], [*later.args[2], first.args[2][1]])  # type: ignore[index]
    return p


@broken(r"packs \w+ at offset 3, where bucket 1 \(.*\) has no parameter")
def packed_at_a_wrong_offset() -> Program:
    p = program()
    pack = find(p, ops.pack, 1)
    set_argument(pack, 2, [3, *pack.args[2][1:]])  # type: ignore[index]
    return p


@broken(
    r"the gradient packed for blocks.0.attn.qkv.weight is torch.float32\[16, 64\]; the parameter"
)
def packed_with_a_wrong_shape() -> Program:
    p = program()
    pack = find(p, ops.pack, 2)
    grads, offsets = pack.args[1], pack.args[2]
    set_argument(pack, 1, [grads[-1], *grads[1:-1], grads[0]])  # type: ignore[index, misc]
    set_argument(pack, 2, list(offsets))  # type: ignore[arg-type]
    return p


@broken(r"bucket 2 \(blocks.0\) is reduced at scale 1.0; the mean over 2 ranks is 1/2 = 0.5")
def wrong_scale() -> Program:
    p = program()
    set_argument(find(p, ops.reduce_scatter, 2), 3, 1.0)
    return p


@broken(r"is sharded over 2 ranks: its reduction is reduce_scatter, not all_reduce")
def wrong_reduction() -> Program:
    p = program()
    find(p, ops.reduce_scatter, 2).target = ops.all_reduce
    return p


@broken(r"bucket 2 \(blocks.0\) is reduced twice: by \w+ and by \w+")
def reduced_twice() -> Program:
    p = program()
    launch = find(p, ops.reduce_scatter, 2)
    with p.graph(BACKWARD).inserting_after(launch):
        call(p.graph(BACKWARD), ops.reduce_scatter, launch.args, like=launch)
    return p


@broken(r"the gradient of blocks.0.\S+ is never reduced: backward has no reduction of bucket 2")
def never_reduced() -> Program:
    p = program()
    graph, launch = p.graph(BACKWARD), find(p, ops.reduce_scatter, 2)
    wait = next(iter(launch.users))
    store = next(iter(wait.users))
    at = [s.index for s in p.outputs[BACKWARD] if s.role is Role.SHARD_GRAD].index(2)
    specs, results = list(p.outputs[BACKWARD]), p.results(BACKWARD)
    del specs[at], results[at]
    p.outputs[BACKWARD] = tuple(specs)
    set_results(graph, results)
    for node in (store, wait, launch):
        graph.erase_node(node)
    return p


@broken(r"reduced bucket 2 \(blocks.0\) is never stored")
def never_stored() -> Program:
    p = program()
    store = find(p, ops.store_grad, 2)
    store.replace_all_uses_with(find(p, ops.store_grad, 3))
    p.graph(BACKWARD).erase_node(store)
    return p


@broken(r"reduced bucket 2 \(blocks.0\) is stored twice")
def stored_twice() -> Program:
    p = program()
    store = find(p, ops.store_grad, 2)
    with p.graph(BACKWARD).inserting_after(store):
        call(p.graph(BACKWARD), ops.store_grad, store.args, like=store)
    return p


@broken(r"stores the reduced gradients of bucket 2 as those of bucket 3 \(blocks.1\)")
def stored_in_another_bucket() -> Program:
    p = program()
    set_argument(find(p, ops.store_grad, 2), 1, 3)
    return p


@broken(r"store_grad\w* reads reduced bucket 2 .* before its wait")
def stored_before_its_wait() -> Program:
    p = program()
    store = find(p, ops.store_grad, 2)
    set_argument(store, 0, store.args[0].args[0])  # type: ignore[union-attr]
    return p


@broken(r"reduces bucket \d+, where nothing was packed for \S+: make grad_buffer\w* with zero=True")
def garbage_reduced() -> Program:
    p = program("convnet", bucket_bytes=1 << 20)
    buffer = next(
        n for n in p.graph(BACKWARD).nodes if n.target is ops.grad_buffer and n.args[3] is True
    )
    set_argument(buffer, 3, False)
    return p


@broken(r"all_reduce\w* is a gradient op: those belong into backward only")
def reduction_in_forward() -> Program:
    p = program()
    graph = p.graph(FORWARD)
    shard = find_placeholder(p, FORWARD, Role.SHARD, 2)
    with graph.inserting_before(graph.output_node()):
        call(graph, ops.all_reduce, (shard, 2, 1568, 0.5))
    return p


@broken(r"mul\w* reads packed bucket 2 .*: a gradient buffer is for pack and reduce only")
def gradient_buffer_read_by_compute() -> Program:
    p = program()
    pack = find(p, ops.pack, 2)
    with p.graph(BACKWARD).inserting_after(pack):
        call(p.graph(BACKWARD), torch.ops.aten.mul.Tensor, (pack, 2), like=pack)
    return p


# -- regions, buffers ---------------------------------------------------------------------------
@broken(r"region \d+ is interrupted before \w+: communication may stand between regions only")
def communication_inside_a_region() -> Program:
    p = program()
    _, wait, _release = gathered(p)
    view = next(u for u in wait.users if u.target is ops.param_view)
    nodes = region_reading(view)
    later = find(p, ops.all_gather, 3, FORWARD)
    nodes[-1].prepend(later)
    return p


@broken(r"\w+ is compute outside any region")
def compute_outside_any_region() -> Program:
    p = program()
    node = next(n for n in p.graph(FORWARD).nodes if info(n).region == 0)
    set_info(node, region=None)
    return p


@broken(r"norm.running_mean does not follow rank 0: its new value passes no sync_buffers")
def statistics_not_synced() -> Program:
    p = program("convnet")
    graph = p.graph(FORWARD)
    sync = find(p, ops.sync_buffers, graph=FORWARD)
    for item in list(sync.users):
        item.replace_all_uses_with(sync.args[0][item.args[1]])  # type: ignore[index]
        graph.erase_node(item)
    graph.erase_node(sync)
    return p


@broken(r"norm.running_mean follows rank 0, but the plan says buffers='local'")
def statistics_synced_against_the_plan() -> Program:
    p = program("convnet")
    p.plan = Plan(buffers="local")
    return p


# -- dataflow -----------------------------------------------------------------------------------
@broken(r"does not compute what was captured: output 0 .*differ; the first value .*lacks is gelu")
def changed_math() -> Program:
    p = program()
    gelu = next(n for n in p.graph(FORWARD).nodes if n.target is torch.ops.aten.gelu.default)
    gelu.kwargs = {"approximate": "tanh"}
    return p


@broken(r"grad norm.bias.* differ; each value is a captured one, but in the wrong place")
def gradients_exchanged() -> Program:
    p = program()
    pack = find(p, ops.pack, 1)
    set_argument(pack, 1, list(reversed(pack.args[1])))  # type: ignore[call-overload]
    return p


@broken(r"does not compute what was captured")
def another_parameter_of_the_same_shape() -> Program:
    p = program()
    nodes = {info(n).name: n for n in p.graph(FORWARD).nodes if n.target is ops.param_view}
    first = nodes["blocks.0.attn_norm.weight"]
    user = next(iter(first.users))
    user.replace_input_with(first, nodes["blocks.0.mlp_norm.weight"])
    return p


@broken(r"does not compute what was captured")
def dropout_drawn_anew() -> Program:
    p = program("gpt-dropout")
    graph = p.graph(FORWARD)
    draw = next(n for n in graph.nodes if info(n).is_random)
    with graph.inserting_after(draw):
        graph.node_copy(draw)
    return p


@broken(r"does not compute what was captured")
def saved_values_exchanged() -> Program:
    p = program()
    saved = {info(n).name: n for n in p.placeholders(BACKWARD, Role.SAVED)}
    forms: dict[Any, fx.Node] = {}
    for node in saved.values():
        form = (node.meta["val"].shape, node.meta["val"].stride(), node.meta["val"].dtype)
        if form in forms:
            other = forms[form]
            first, second = info(node).index, info(other).index
            set_info(node, index=second)
            set_info(other, index=first)
            return p
        forms[form] = node
    raise AssertionError("no two saved values of one form")


def find_placeholder(p: Program, graph: str, role: Role, index: int | None = None) -> fx.Node:
    return next(n for n in p.placeholders(graph, role) if index in (None, info(n).index))


@pytest.mark.parametrize(("make", "message"), BREAKS, ids=[m.__name__ for m, _ in BREAKS])
def test_a_broken_program_is_refused(make: Callable[[], Program], message: str) -> None:
    p = make()
    with pytest.raises(ProgramError) as caught:
        verify(p)
    first, *context = str(caught.value).split("\n")
    assert re.search(message, first), first
    assert any(line.startswith(">") for line in context), "no line is marked"
    assert 5 <= len(context) <= 24


# -- what is right is accepted ------------------------------------------------------------------
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["gpt", "adapters", "convnet", "branches"])
def test_correct_programs_are_accepted(case: str, stage: int) -> None:
    """The pipeline verifies after every pass, so that building one is the test."""
    choices: list[tuple[int, Any]] = [(2, 0.5 if stage % 2 else "recompute"), (4, "keep")]
    if case == "gpt":
        choices = [(1, "keep"), (2, "keep"), (2, "recompute"), (2, 0.5), (4, "keep")]
    for world, activations in choices:
        p = program(case, world, stage=stage, activations=activations)
        assert p.reference is not None and p.reference.outputs
        verify(p)
    verify(program(case, 2, is_training=False, stage=stage))


@pytest.mark.parametrize(
    "plan",
    [{"memory_budget": 1 << 30}, {"prefetch": 0}, {"prefetch": 3}, {"shard_axis_size": 2}],
    ids=str,
)
def test_correct_programs_of_other_plans_are_accepted(plan: dict[str, Any]) -> None:
    verify(program("gpt", 4, **plan))


def test_harmless_freedoms() -> None:
    """What changes no result is no fault: a second wait, a dropped release, a recomputed node."""
    p = program()
    launch, wait, _release = gathered(p)
    with p.graph(FORWARD).inserting_after(wait):
        call(p.graph(FORWARD), ops.wait, (launch,), like=wait)
    node = next(n for n in p.graph(FORWARD).nodes if info(n).region == 1)
    with p.graph(FORWARD).inserting_after(node):
        p.graph(FORWARD).node_copy(node)
    verify(p)
    p.graph(FORWARD).erase_node(find(p, ops.release, 3, FORWARD))
    verify(p)


def test_kept_gathered_buckets_are_legal() -> None:
    p = program(memory_budget=1 << 30)
    saved = [n for n in p.placeholders(BACKWARD, Role.SAVED) if "gathered" in info(n).name]
    assert saved, "the budget keeps nothing"
    verify(p)


def test_the_pass_is_named() -> None:
    """An invariant broken by a pass is reported with the pass's name."""
    p = captured("gpt").clone()
    setting = Setting(Plan(stage=3, prefetch=1), 2, machine_for("cpu"))
    done = run(p, setting)
    assert done.reference is not None
    node = find(done, ops.reduce_scatter)
    set_argument(node, 3, 0.25)
    with pytest.raises(ProgramError, match=r"^assign-slots: backward: bucket .* at scale 0.25"):
        run_pass(done, AssignSlots())


def test_ranks_must_launch_the_same_collectives() -> None:
    left, right = program(), program()
    verify_ranks([left, right])
    launch = find(right, ops.all_gather, 3, FORWARD)
    before = find(right, ops.all_gather, 0, FORWARD)
    before.prepend(launch)
    verify(right)
    with pytest.raises(ProgramError, match=r"rank 1 would launch all_gather\(3, .*collective 1,"):
        verify_ranks([left, right])


def test_a_signature_names_the_call_not_the_plan() -> None:
    """Programs of one call are interchangeable over stages and worlds; other calls are others."""
    one = program(stage=3).signature
    assert one == program(stage=1).signature == program(world=4, stage=0).signature
    assert one != program(is_training=False).signature
    assert one != program("gpt-dropout").signature
