"""assign-slots: fixed places that never overlap, and no more of them than needed."""

from __future__ import annotations

from dataclasses import replace

import op_sets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_cases import Choice
from passes_compact import before, run
from torch import fx

from zerofx import ops
from zerofx.analysis.memory.memory import memory
from zerofx.errors import ProgramError
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.program import Planned
from zerofx.ir.verify import verify
from zerofx.layout import buckets
from zerofx.passes.assign_slots import AssignSlots
from zerofx.passes.keep_gathered import KeepGathered
from zerofx.passes.prefetch import PrefetchGathers
from zerofx.passes.sink_waits import SinkWaits

FINE = Choice(3, bucket_bytes=0, persist_below=0)
Use = tuple[int, int, int, int]  # slot, first position, last position, bytes


def slot_of(node: fx.Node) -> int:
    at = {ops.all_gather: 3, ops.grad_buffer: 4}[node.target]  # type: ignore[index]
    return node.args[at] if len(node.args) > at else -1  # type: ignore[return-value]


def uses(program: Planned, graph: str) -> list[Use]:
    """Return from where to where each slot is taken, found from readers alone."""
    nodes = list(program.graph(graph).nodes)
    position = {n: i for i, n in enumerate(nodes)}
    found = []
    for node in nodes:
        if node.target in (ops.all_gather, ops.grad_buffer) and slot_of(node) >= 0:
            last = max(position[n] for n in _touching(node))
            found.append((slot_of(node), position[node], last, nbytes(value(node))))
    return found


def _touching(node: fx.Node) -> list[fx.Node]:
    """Return everything that reads or writes a buffer's memory: through views, until it is sent."""
    found = [node]
    for user in node.users:
        found.append(user)
        if user.target in (ops.wait, ops.param_view, ops.pack):
            found += _touching(user)
        elif user.target in op_sets.REDUCES:
            found += [w for w in user.users if w.target is ops.wait]
        elif user.target not in (ops.release,) and info(user).region is not None:
            schema = getattr(user.target, "_schema", None)
            if schema is not None and any(r.alias_info for r in schema.returns):
                found += _touching(user)
    return found


def check(program: Planned) -> None:
    sizes = program.slot_bytes
    needed_bytes = 0
    for name in program.graphs:
        taken = uses(program, name)
        for slot, first, last, size in taken:
            assert size <= sizes[slot]
            assert sizes[slot] in {u[3] for n in program.graphs for u in uses(program, n)}
            others = [u for u in taken if u[0] == slot and u[1] != first]
            assert not [u for u in others if u[1] <= last and first <= u[2]], f"slot {slot}"
        at_once = [
            sum(size for _, first, last, size in taken if first <= event <= last)
            for _, event, _, _ in taken
        ]
        needed_bytes = max([needed_bytes, *at_once])
    # what is held at once is the least there can be; a large buffer's place may idle beside it
    assert needed_bytes <= sum(sizes) <= 1.5 * needed_bytes


def test_two_places_take_turns_when_nothing_is_ahead() -> None:
    choice = Choice(3, bucket_bytes=0, persist_below=0, prefetch=0)
    program = before("chain", choice, "assign-slots")
    after = run(program, AssignSlots())
    gathers = [n for n in after.graph("forward").nodes if n.target is ops.all_gather]
    assert [slot_of(n) for n in gathers] == [0, 1, 1, 1, 1], "the code is read at both ends"
    check(after)


def test_releases_name_the_slot_they_give_back() -> None:
    after = run(before("chain", FINE, "assign-slots"), AssignSlots())
    for gm in after.graphs.values():
        for node in gm.graph.nodes:
            if node.target is ops.release:
                assert node.args[1] == slot_of(node.args[0].args[0])


def test_resident_parameters_take_no_slot() -> None:
    after = run(before("chain", Choice(2), "assign-slots"), AssignSlots())
    slotted = {n.target for n in after.graph("backward").nodes if n.target is ops.grad_buffer}
    assert slotted == {ops.grad_buffer}
    assert not uses(after, "forward")


def test_what_is_kept_for_backward_takes_no_slot() -> None:
    program = run(before("chain", FINE, "keep-gathered"), KeepGathered(budget_bytes=1 << 30))
    after = run(program, AssignSlots())
    gathers = [n for n in after.graph("forward").nodes if n.target is ops.all_gather]
    assert {slot_of(n) for n in gathers} == {-1}
    check(after)


@settings(max_examples=16)
@given(
    st.sampled_from(["chain", "gpt", "adapters", "convnet"]),
    st.builds(
        Choice,
        stage=st.sampled_from([0, 2, 3]),
        bucket_bytes=st.sampled_from([0, 1500, 6000]),
        persist_below=st.sampled_from([0, 100]),
    ),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from([None, 1 << 30, 100_000]),
)
def test_slots_never_overlap(
    case: str, choice: Choice, distance: int, in_flight: int, budget: int | None
) -> None:
    program = before(case, choice, "prefetch-gathers")
    for made in (
        PrefetchGathers(distance=distance),
        SinkWaits(in_flight=in_flight),
        KeepGathered(budget_bytes=budget),
        AssignSlots(),
    ):
        program = run(program, made)
    check(program)


def freed(monkeypatch: pytest.MonkeyPatch) -> Planned:
    monkeypatch.setattr(buckets, "REST_BYTES", 1)
    return run(before("gpt", replace(FINE, prefetch=0), "assign-slots"), AssignSlots())


def test_slots_that_only_backward_uses_are_freed_after_their_last_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = freed(monkeypatch)
    kept = {slot for slot, *_ in uses(program, "forward")}
    nodes = list(program.graph("backward").nodes)
    frees = {n.args[0]: nodes.index(n) for n in nodes if n.target is ops.free_slot}
    assert frees and not kept & frees.keys()
    for slot, at in frees.items():
        assert at == 1 + max(last for s, _, last, _ in uses(program, "backward") if s == slot)
    storages = {s.name: s for s in memory(program).storages if s.name.startswith("slot ")}
    first = len(program.graph("forward").nodes)
    assert {slot: first + at for slot, at in frees.items()} == {
        slot: storages[f"slot {slot}"].death for slot in frees
    }


def test_a_slot_in_use_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = freed(monkeypatch)
    free = next(n for n in program.graph("backward").nodes if n.target is ops.free_slot)
    (slot,) = free.args
    made = [n for n in program.graph("backward").nodes if n.target in (ops.all_gather,)]
    gather = next(n for n in reversed(made) if slot_of(n) == slot)
    gather.append(free)
    with pytest.raises(ProgramError, match=f"frees slot {slot} while"):
        verify(program)
