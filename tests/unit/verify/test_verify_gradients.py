"""Each gradient is packed once, each bucket reduced once and complete, each slice stored once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from verify_cases import (
    Breaks,
    check_refused,
    find,
    find_placeholder,
    program,
    set_argument,
)

from zerofx import ops
from zerofx.ir.graphs import call, set_results
from zerofx.ir.meta import Role
from zerofx.ir.program import BACKWARD, FORWARD, Planned

broken = Breaks()


@broken(r"reduces bucket 2 before the gradient of blocks.0.\S+ is packed. Move it after the last")
def reduced_too_early() -> Planned:
    p = program()
    launch = find(p, ops.reduce_scatter, 2)
    buffer = find(p, ops.grad_buffer, 2)
    set_argument(launch, 0, buffer)
    buffer.append(launch)
    return p


@broken(r"packs into bucket 1 .*after reduce_scatter\w* has reduced it")
def packed_after_the_reduction() -> Planned:
    p = program()
    launch = find(p, ops.reduce_scatter, 1)
    last: Any = launch.args[0]
    with p.graph(BACKWARD).inserting_before(p.graph(BACKWARD).output_node()):
        call(p.graph(BACKWARD), ops.pack, last.args, like=last)
    return p


@broken(r"the gradient of norm.bias is packed twice: \w+, then \w+ \(gpt.py:\d+\)")
def packed_twice() -> Planned:
    p = program()
    first = find(p, ops.pack, 1)
    later: Any = find(p, ops.reduce_scatter, 1).args[0]
    other = next(g for g in later.args[1] if g.meta["val"].shape == (16,))
    later.args = (later.args[0], [*later.args[1], other], [*later.args[2], first.args[2][1]])  # type: ignore[index]
    return p


@broken(r"packs \w+ at offset 3, where bucket 1 \(.*\) has no parameter")
def packed_at_a_wrong_offset() -> Planned:
    p = program()
    pack = find(p, ops.pack, 1)
    set_argument(pack, 2, [3, *pack.args[2][1:]])  # type: ignore[index]
    return p


@broken(
    r"the gradient packed for blocks.0.attn.qkv.weight is torch.float32\[16, 64\]. The parameter"
)
def packed_with_a_wrong_shape() -> Planned:
    p = program()
    pack = find(p, ops.pack, 2)
    grads, offsets = pack.args[1], pack.args[2]
    set_argument(pack, 1, [grads[-1], *grads[1:-1], grads[0]])  # type: ignore[index, misc]
    set_argument(pack, 2, list(offsets))  # type: ignore[arg-type]
    return p


@broken(r"bucket 2 \(blocks.0\) is reduced at scale 1.0. The mean over 2 ranks is 1/2 = 0.5")
def wrong_scale() -> Planned:
    p = program()
    set_argument(find(p, ops.reduce_scatter, 2), 3, 1.0)
    return p


@broken(r"is sharded over 2 ranks: its reduction is reduce_scatter, not all_reduce")
def wrong_reduction() -> Planned:
    p = program()
    find(p, ops.reduce_scatter, 2).target = ops.all_reduce
    return p


@broken(r"bucket 2 \(blocks.0\) is reduced twice: by \w+ and by \w+")
def reduced_twice() -> Planned:
    p = program()
    launch = find(p, ops.reduce_scatter, 2)
    with p.graph(BACKWARD).inserting_after(launch):
        call(p.graph(BACKWARD), ops.reduce_scatter, launch.args, like=launch)
    return p


@broken(r"the gradient of blocks.0.\S+ is never reduced: backward has no reduction of bucket 2")
def never_reduced() -> Planned:
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
def never_stored() -> Planned:
    p = program()
    store = find(p, ops.store_grad, 2)
    store.replace_all_uses_with(find(p, ops.store_grad, 3))
    p.graph(BACKWARD).erase_node(store)
    return p


@broken(r"reduced bucket 2 \(blocks.0\) is stored twice")
def stored_twice() -> Planned:
    p = program()
    store = find(p, ops.store_grad, 2)
    with p.graph(BACKWARD).inserting_after(store):
        call(p.graph(BACKWARD), ops.store_grad, store.args, like=store)
    return p


@broken(r"stores the reduced gradients of bucket 2 as those of bucket 3 \(blocks.1\)")
def stored_in_another_bucket() -> Planned:
    p = program()
    set_argument(find(p, ops.store_grad, 2), 1, 3)
    return p


@broken(r"store_grad\w* reads reduced bucket 2 .* before its wait")
def stored_before_its_wait() -> Planned:
    p = program()
    store = find(p, ops.store_grad, 2)
    set_argument(store, 0, store.args[0].args[0])  # type: ignore[union-attr]
    return p


@broken(r"reduces bucket \d+, where nothing was packed for \S+: make grad_buffer\w* with zero=True")
def garbage_reduced() -> Planned:
    p = program("convnet", bucket_bytes=1 << 20)
    buffer = next(
        n for n in p.graph(BACKWARD).nodes if n.target is ops.grad_buffer and n.args[3] is True
    )
    set_argument(buffer, 3, False)
    return p


@broken(r"all_reduce\w* is a gradient op: those belong into backward only")
def reduction_in_forward() -> Planned:
    p = program()
    graph = p.graph(FORWARD)
    shard = find_placeholder(p, FORWARD, Role.SHARD, 2)
    with graph.inserting_before(graph.output_node()):
        call(graph, ops.all_reduce, (shard, 2, 1568, 0.5))
    return p


@broken(r"mul\w* reads packed bucket 2 .*: a gradient buffer is for pack and reduce only")
def gradient_buffer_read_by_compute() -> Planned:
    p = program()
    pack = find(p, ops.pack, 2)
    with p.graph(BACKWARD).inserting_after(pack):
        call(p.graph(BACKWARD), torch.ops.aten.mul.Tensor, (pack, 2), like=pack)
    return p


@pytest.mark.parametrize(("make", "message"), broken.found, ids=broken.names)
def test_a_broken_program_is_refused(make: Callable[[], Planned], message: str) -> None:
    check_refused(make(), message)
