"""The oracle itself: it agrees with plain PyTorch, and sees each way for a schedule to go wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
from models import CASES
from oracle import Outcome, differences, execute, has_garbage
from oracle_cases import Choice, captured, expected, final, make_state
from oracle_exchange import Delivery
from oracle_memory import OracleError
from torch import fx

from zerofx import ops
from zerofx.ir.program import BACKWARD, FORWARD, Planned

STAGE3 = Choice(3)


def plain_gradients(case: str, world_size: int) -> dict[str, torch.Tensor]:
    """Return the mean of every rank's gradients, from plain PyTorch."""
    mean: dict[str, torch.Tensor] = {}
    state = make_state(case, world_size)
    for rank in range(world_size):
        model = CASES[case].make()
        args, kwargs = CASES[case].batch(rank)
        torch.manual_seed(state.seeds[rank])
        model(*args, **kwargs).backward(state.tangents[rank][0])
        for name, param in model.named_parameters():
            if param.grad is not None:
                before = mean.get(name)
                mean[name] = param.grad / world_size + (0 if before is None else before)
    return mean


@pytest.mark.parametrize("case", ["gpt", "gpt-dropout", "binary", "adapters", "convnet"])
def test_the_captured_program_trains_as_plain_pytorch_does(case: str) -> None:
    want = plain_gradients(case, 2)
    for outcome in expected(case, 2):
        assert set(outcome.gradients) == set(want)
        for name, grad in want.items():
            torch.testing.assert_close(outcome.gradients[name], grad, rtol=1e-5, atol=1e-7)


def test_running_statistics_follow_the_batch() -> None:
    model = CASES["convnet"].make()
    for name, buffer in make_state("convnet", 2).buffers.items():
        model.get_buffer(name).copy_(buffer)
    args, kwargs = CASES["convnet"].batch(0)
    model(*args, **kwargs)
    got = expected("convnet", 2)[0].results
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(got["buffer", name, -1], buffer)


def test_ranks_see_their_own_batches_and_draw_their_own_masks() -> None:
    first, second = expected("gpt-dropout", 2)
    losses = [o.results["output", "output", 0] for o in (first, second)]
    assert not torch.equal(*losses)
    assert first.gradients.keys() == second.gradients.keys()
    assert all(torch.equal(g, second.gradients[n]) for n, g in first.gradients.items())


def test_it_shares_no_code_with_what_it_judges() -> None:
    folder = Path(oracle.__file__).parent
    for name in (p.stem for p in folder.glob("oracle*.py") if p.stem != "oracle_cases"):
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        found = set(re.findall(r"(?m)^\s*(?:from|import) (zerofx[\w.]*)", text))
        assert found <= {"zerofx.ir.meta", "zerofx.ir.program", "zerofx.ir.spec"}, name


# -- what it must see ---------------------------------------------------------------------------
def find(program: Planned, graph: str, target: object, which: int = 0) -> fx.Node:
    return [n for n in program.graph(graph).nodes if n.target is target][which]


def last_gather(program: Planned) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """Return launch, wait, first view and release of the last bucket of forward."""
    release = find(program, FORWARD, ops.release, -1)
    wait = release.args[0]
    view = next(u for u in wait.users if u.target is ops.param_view)  # type: ignore[union-attr]
    return wait.args[0], wait, view, release  # type: ignore[union-attr, return-value]


def release_early(program: Planned) -> None:
    _, _, view, release = last_gather(program)
    view.append(release)


def pack_behind_the_launch(program: Planned) -> None:
    launch = find(program, BACKWARD, ops.reduce_scatter)
    pack = launch.args[0]
    assert isinstance(pack, fx.Node)
    launch.replace_input_with(pack, pack.args[0])  # type: ignore[arg-type]
    launch.append(pack)


def overwrite_while_sending(program: Planned) -> None:
    launch = find(program, BACKWARD, ops.reduce_scatter)
    pack = launch.args[0]
    with program.graph(BACKWARD).inserting_after(launch):
        scaled = program.graph(BACKWARD).call_function(
            torch.ops.aten.zero_.default,
            (pack.args[0],),  # type: ignore[union-attr]
        )
    assert scaled


def change_the_scale(program: Planned) -> None:
    launch = find(program, BACKWARD, ops.reduce_scatter)
    launch.args = (*launch.args[:3], 1.0)


def drop_a_reduction(program: Planned) -> None:
    graph = program.graph(BACKWARD)
    store = find(program, BACKWARD, ops.store_grad)
    shard = program.placeholders(BACKWARD)[0]
    store.replace_all_uses_with(shard)
    graph.erase_node(store)


HARM: list[tuple[Callable[[Planned], None], set[Delivery]]] = [
    (release_early, set(Delivery)),
    (pack_behind_the_launch, {Delivery.EARLY, Delivery.AT_WAIT}),
    (overwrite_while_sending, {Delivery.LATE}),
    (change_the_scale, set(Delivery)),
    (drop_a_reduction, set(Delivery)),
]


@pytest.mark.parametrize(("harm", "seen"), HARM, ids=lambda v: getattr(v, "__name__", ""))
def test_it_sees(harm: Callable[[Planned], None], seen: set[Delivery]) -> None:
    program = final("gpt", STAGE3).clone()
    harm(program)
    want = execute([final("gpt", STAGE3)] * 2, make_state("gpt", 2))
    for delivery in Delivery:
        got = execute([program] * 2, make_state("gpt", 2), delivery)
        assert bool(differences(want, got)) == (delivery in seen), delivery


def test_it_sees_a_rank_that_launches_in_another_order() -> None:
    program = final("gpt", STAGE3).clone()
    first, second = (find(program, FORWARD, ops.all_gather, i) for i in (0, 1))
    first.prepend(second)
    execute([program] * 2, make_state("gpt", 2))  # the same order on every rank is no fault
    with pytest.raises(OracleError, match=r"collective \d: rank \d launches \('all-gather', "):
        execute([final("gpt", STAGE3), program], make_state("gpt", 2))


def test_it_sees_a_rank_that_launches_less() -> None:
    program = final("gpt", STAGE3).clone()
    store = find(program, BACKWARD, ops.store_grad, -1)
    wait = store.args[0]
    store.replace_all_uses_with(program.placeholders(BACKWARD)[0])
    for node in (store, wait, wait.args[0]):  # type: ignore[union-attr]
        program.graph(BACKWARD).erase_node(node)  # type: ignore[arg-type]
    for delivery in Delivery:
        with pytest.raises(OracleError, match="deadlock"):
            execute([final("gpt", STAGE3), program], make_state("gpt", 2), delivery)


def test_waits_in_another_order_on_one_rank_are_no_deadlock() -> None:
    """A transfer proceeds without its wait: nothing hangs where ranks only wait differently."""
    right = final("gpt", Choice(3, prefetch=2))
    program = right.clone()
    waits = [n for n in program.graph(FORWARD).nodes if n.target is ops.wait]
    gathers = [w for w in waits if w.args[0].target is ops.all_gather]
    gathers[0].prepend(gathers[1])
    want = expected("gpt", 2)
    for delivery in Delivery:
        got = execute([right, program], make_state("gpt", 2), delivery)
        assert not differences(want, got)


def test_a_slot_belongs_to_its_last_tenant() -> None:
    """Put the first two gathered buckets into the largest slot, while both are in use."""
    program = final("gpt", STAGE3).clone()
    sizes = program.slot_bytes
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    for i in (0, 1):
        launch = find(program, FORWARD, ops.all_gather, i)
        wait = next(iter(launch.users))
        release = next(u for u in wait.users if u.target is ops.release)
        launch.args = (*launch.args[:3], largest)
        release.args = (wait, largest)
    with pytest.raises(OracleError, match="belongs to another buffer by now"):
        execute([program] * 2, make_state("gpt", 2))


def test_nothing_is_in_flight_when_a_call_ends() -> None:
    program = final("gpt", STAGE3).clone()
    launch = find(program, FORWARD, ops.refresh)
    with program.graph(FORWARD).inserting_after(launch):
        program.graph(FORWARD).node_copy(launch)
    for delivery in (Delivery.AT_WAIT, Delivery.LATE):
        with pytest.raises(OracleError, match="in flight at the end of its call"):
            execute([program] * 2, make_state("gpt", 2), delivery)


def test_what_was_launched_is_read_through_its_wait() -> None:
    """The emitted module holds a launch as a handle, which no operator takes."""
    program = final("gpt", STAGE3).clone()
    launch, wait, _, _ = last_gather(program)
    wait.replace_all_uses_with(launch)
    program.graph(FORWARD).erase_node(wait)
    with pytest.raises(AttributeError):
        execute([program] * 2, make_state("gpt", 2))


def test_what_crosses_calls_does_not_lie_in_a_slot() -> None:
    program = final("gpt", STAGE3).clone()
    release = find(program, FORWARD, ops.release, -1)
    results = program.results(FORWARD)
    results[0] = release.args[0]
    program.graph(FORWARD).output_node().args = (tuple(results),)
    program.graph(FORWARD).erase_node(release)
    got = execute([program] * 2, make_state("gpt", 2))
    assert has_garbage(got)


def test_differences_name_rank_and_value() -> None:
    a = Outcome(gradients={"w": torch.zeros(3)})
    b = Outcome(gradients={"w": torch.tensor([0.0, 1.0, 0.0])})
    assert differences([a, a], [a, b]) == ["rank 1 gradient w: 2 of 12 bytes differ"]
    assert differences([a], [Outcome()]) == ["rank 0 gradient w: only in the expected run"]
    assert not differences([a], [a])


def test_programs_at_every_stage_run() -> None:
    joint = captured("stage")
    assert execute([joint] * 2, make_state("stage", 2))[0].results
