"""The oracle on shards that live off the device: what it keeps out of reach, and what it sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import differences, execute, has_garbage
from oracle_cases import BOTH, OPTIMIZER, Choice, final, make_state
from oracle_exchange import Delivery
from oracle_memory import OracleError
from torch import fx

from zerofx import ops
from zerofx.ir.program import BACKWARD, FORWARD, Planned

RELOADED = Choice(3, offload=BOTH)
REFRESHED = Choice(3, offload=OPTIMIZER)


def run(program: Planned, delivery: Delivery = Delivery.LATE) -> list[Any]:
    return execute([program] * 2, make_state("gpt", 2), delivery)


def find(program: Planned, graph: str, target: object, which: int = 0) -> Any:
    return [n for n in program.graph(graph).nodes if n.target is target][which]


def sent(program: Planned, graph: str = FORWARD, which: int = 0) -> tuple[Any, ...]:
    """Return a gather that sends a reloaded shard, its own wait, the reload's launch and wait."""
    gather = [
        n for n in program.graph(graph).nodes
        if n.target is ops.all_gather and n.args[0].target is ops.wait
    ][which]  # fmt: skip
    held = gather.args[0]
    return gather, next(iter(gather.users)), held.args[0], held


def drop(program: Planned, *nodes: fx.Node) -> None:
    for node in nodes:
        node.graph.erase_node(node)


@pytest.mark.parametrize(
    ("stage", "offload"), [(3, BOTH), pytest.param(1, OPTIMIZER, marks=pytest.mark.slow)]
)
def test_what_is_cast_on_its_way_is_as_on_the_device(stage: int, offload: Any) -> None:
    """Formats have no captured reference, as gradients are summed in another: this is theirs."""
    near, far = (final("gpt", Choice(stage, offload=o, precision="bf16")) for o in ((), offload))
    want = run(near)
    for delivery in Delivery:
        got = run(far, delivery)
        assert not differences(want, got, with_shards=True) and not has_garbage(got)


def test_a_shard_cannot_be_gathered_from_afar() -> None:
    p = final("gpt", RELOADED).clone()
    gather, _, launch, held = sent(p)
    gather.replace_input_with(held, launch.args[0])
    with pytest.raises(OracleError, match="all-gather of bucket 0, whose shard was not reloaded"):
        run(p)


def test_a_shard_cannot_be_computed_with_from_afar() -> None:
    p = final("gpt", Choice(3, 1, offload=BOTH)).clone()
    launch = find(p, FORWARD, ops.reload_shard)
    next(iter(launch.users)).replace_all_uses_with(launch.args[0])
    with pytest.raises((TypeError, AttributeError)):
        execute([p], make_state("gpt", 1))


def gradient_stays(p: Planned) -> None:
    launch = find(p, BACKWARD, ops.offload_grad)
    wait = next(iter(launch.users))
    wait.replace_all_uses_with(launch.args[0])
    drop(p, wait, launch)


def gradient_of_another(p: Planned) -> None:
    first, second = (find(p, BACKWARD, ops.store_grad, i) for i in (0, 1))
    second.append(first)
    held = first.args[0], second.args[0]
    first.args, second.args = (held[1], *first.args[1:]), (held[0], *second.args[1:])
    first.append(second)


def shard_of_another(p: Planned) -> None:
    launch = sent(p)[2]
    launch.args = (launch.args[0], launch.args[1] + 1, *launch.args[2:])


def never_waited_for(p: Planned) -> None:
    launch = find(p, BACKWARD, ops.reload_shard)
    with p.graph(BACKWARD).inserting_after(launch):
        again = p.graph(BACKWARD).node_copy(launch)
    again.args = again.args[:3]  # beside the slot


def waited_for_twice(p: Planned) -> None:
    launch, wait = sent(p)[2:]
    with p.graph(FORWARD).inserting_after(wait):
        p.graph(FORWARD).node_copy(wait)
    assert len(launch.users) == 2


REFUSED = [
    (gradient_stays, r"bucket \d is off the device, the gradient stored is not"),
    (gradient_of_another, r"stored as bucket \d's: what is no gradient of it"),
    (shard_of_another, r"reload of bucket 1 is given something else than its shard"),
    (never_waited_for, "a copy of a shard is never waited for"),
    (waited_for_twice, "a copy of a shard is waited for twice"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_it_refuses(change: Callable[[Planned], None], message: str) -> None:
    p = final("gpt", RELOADED).clone()
    change(p)
    with pytest.raises(OracleError, match=message):
        run(p)


def released_before_it_is_sent(p: Planned) -> None:
    gather, _, _, held = sent(p)
    gather.prepend(next(u for u in held.users if u.target is ops.release))


def released_while_it_is_sent(p: Planned) -> None:
    gather, _, _, held = sent(p)
    gather.append(next(u for u in held.users if u.target is ops.release))


def updated_before_it_is_read(p: Planned) -> None:
    """Overwrite the shard on the host while its reload is under way."""
    _, _, launch, held = sent(p, BACKWARD)
    with p.graph(BACKWARD).inserting_before(held):
        p.graph(BACKWARD).call_function(_Halve(launch.args[1]), (launch.args[0],))


class _Halve:
    """Halve a shard in place wherever it lies: an update that comes too early."""

    __name__ = "halve"

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket

    def __call__(self, shard: Any) -> None:
        shard.content.mul_(0.5)


def gradient_read_behind_its_copy(p: Planned) -> None:
    """Offload one gradient twice as long: reduce into what has left by then."""
    launch = find(p, BACKWARD, ops.offload_grad)
    wait = next(iter(launch.users))
    with p.graph(BACKWARD).inserting_after(launch):
        p.graph(BACKWARD).call_function(torch.ops.aten.zero_.default, (launch.args[0],))
    assert wait


HARM: list[tuple[Callable[[Planned], None], set[Delivery]]] = [
    (released_before_it_is_sent, set(Delivery)),
    (released_while_it_is_sent, {Delivery.LATE}),
    (updated_before_it_is_read, {Delivery.LATE}),
    (gradient_read_behind_its_copy, {Delivery.LATE}),
]


@pytest.mark.parametrize(("harm", "seen"), HARM, ids=lambda v: getattr(v, "__name__", ""))
def test_it_sees(harm: Callable[[Planned], None], seen: set[Delivery]) -> None:
    right = final("gpt", RELOADED)
    p = right.clone()
    harm(p)
    for delivery in Delivery:
        found = differences(run(right), run(p, delivery))
        assert bool(found) == (delivery in seen), delivery


def test_a_copy_that_stays_is_not_released() -> None:
    """Without an update, no later call brings it back."""
    p = final("gpt", REFRESHED).clone()
    _, arrived, _, held = sent(p, FORWARD, -1)
    with p.graph(FORWARD).inserting_after(arrived):
        p.graph(FORWARD).call_function(ops.release, (held,))
    with pytest.raises(OracleError, match="a release of a copy that stays on the device"):
        run(p)


def test_a_second_refresh_brings_nothing() -> None:
    """It takes the first one to have arrived, whose wait may come later."""
    right = final("gpt", REFRESHED)
    p = right.clone()
    gather, _, launch, held = sent(p, FORWARD, 0)
    with p.graph(FORWARD).inserting_after(launch):
        again = p.graph(FORWARD).node_copy(launch)
    with p.graph(FORWARD).inserting_before(gather):
        copy = p.graph(FORWARD).call_function(ops.wait, (again,))
    gather.replace_input_with(held, copy)
    assert not differences(run(right), run(p))
    gather.append(held)
    assert has_garbage(run(p, Delivery.AT_WAIT))
