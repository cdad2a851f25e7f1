"""update-in-backward: each bucket's update behind its gradient and the last read of its shard."""

from __future__ import annotations

import re
from typing import Any

import pytest
from oracle_cases import Choice
from passes_compact import before, order, pass_named, run
from verify_cases import find, program, set_argument

from zerofx import ops
from zerofx.analysis.memory.memory import memory
from zerofx.analysis.memory.storage import Category
from zerofx.errors import ProgramError
from zerofx.ir.graphs import call
from zerofx.ir.meta import Role, info
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.verify import verify

NAME = "update-in-backward"
SHARDED = Choice(3, bucket_bytes=0, persist_below=0, update="in-backward")
WHOLE = Choice(0, bucket_bytes=0, persist_below=0, update="in-backward")


def placed(case: str, choice: Choice) -> tuple[list[str], list[str]]:
    """Return backward's statements before and after the pass."""
    given = before(case, choice, NAME)
    return order(given, BACKWARD), order(run(given, pass_named(choice, NAME)), BACKWARD)


def test_each_update_stands_behind_its_gradient() -> None:
    was, now = placed("chain", SHARDED)
    assert [row for row in now if not row.startswith("update")] == was
    stores = [i for i, row in enumerate(now) if row.startswith("store")]
    assert len(stores) == 5
    assert [now[i + 1] for i in stores] == [now[i].replace("store", "update") for i in stores]


def test_an_update_waits_for_the_last_read_of_its_shard() -> None:
    """`code` is used by the first layer and by the last: its shard is read again at the end."""
    given = before("chain", WHOLE, NAME)
    after = run(given, pass_named(WHOLE, NAME))
    nodes = list(after.graph(BACKWARD).nodes)
    for shard in after.placeholders(BACKWARD, Role.SHARD):
        mine = {shard}
        for node in nodes:
            if node.target is ops.param_view and node.args[0] is shard:
                mine.add(node)
        update = next(n for n in nodes if n.target is ops.update and n.args[1] is shard)
        last = max(nodes.index(u) for n in mine for u in n.users if u is not update)
        assert nodes.index(update) > last


def test_without_the_plan_nothing_changes() -> None:
    choice = Choice(3)
    given = before("chain", choice, NAME)
    assert not pass_named(choice, NAME).run(given.clone()).changed


def test_gradients_are_no_result_any_more() -> None:
    given = before("chain", SHARDED, NAME)
    after = run(given, pass_named(SHARDED, NAME))
    assert any(s.role is Role.SHARD_GRAD for s in given.outputs[BACKWARD])
    assert not any(s.role is Role.SHARD_GRAD for s in after.outputs[BACKWARD])


def test_memory_knows_that_gradients_are_freed() -> None:
    plans = ({"update": "step"}, {"update": "in-backward"})
    step, early = (memory(program(stage=0, bucket_bytes=0, **plan)) for plan in plans)
    at_end = [m.by_category(m.life.end)[Category.GRADIENTS] for m in (step, early)]
    assert at_end[0] == sum(4 * b.numel for b in program(stage=0, bucket_bytes=0).layout.buckets)
    assert at_end[1] < 0.5 * at_end[0]
    assert early.peak_bytes < step.peak_bytes


# -- verify -------------------------------------------------------------------------------------
def compiled() -> Planned:
    return program(update="in-backward")


def check_refused(broken: Planned, pattern: str) -> None:
    with pytest.raises(ProgramError, match=pattern) as caught:
        verify(broken)
    assert re.search(pattern, str(caught.value).splitlines()[0])


def test_the_compiled_program_is_accepted() -> None:
    verify(compiled())


def test_an_update_before_its_gradient_is_refused() -> None:
    p = compiled()
    update = find(p, ops.update, 2)
    set_argument(update, 0, find(p, ops.store_grad, 3))
    check_refused(p, r"update\w* updates bucket 2 \(blocks.0\) with \w+, which is not its gradient")


def test_a_wrong_shard_is_refused() -> None:
    p = compiled()
    set_argument(find(p, ops.update, 3), 1, find(p, ops.update, 2).args[1])
    check_refused(p, r"updates bucket 3 \(blocks.1\), but is given shard\w* as its shard")


def test_a_second_update_is_refused() -> None:
    p = compiled()
    update = find(p, ops.update, 2)
    with p.graph(BACKWARD).inserting_before(p.graph(BACKWARD).output_node()):
        call(p.graph(BACKWARD), ops.update, update.args, like=update)
    check_refused(p, r"bucket 2 \(blocks.0\) is updated twice|reads shard bucket 2 .* after update")


def test_a_missing_update_is_refused() -> None:
    p = compiled()
    p.graph(BACKWARD).erase_node(find(p, ops.update, 2))
    check_refused(p, r"reduced bucket 2 \(blocks.0\) is never updated. Its gradient is lost")


def test_a_read_behind_the_update_is_refused() -> None:
    p = program(stage=0, update="in-backward")
    views = [n for n in p.graph(BACKWARD).nodes if n.target is ops.param_view]
    shard: Any = views[-1].args[0]
    update = find(p, ops.update, info(shard).index)
    reader = max(views[-1].users, key=list(p.graph(BACKWARD).nodes).index)
    store = find(p, ops.store_grad, info(shard).index)
    late = reader if _is_before(p, store, reader) else None
    if late is None:  # no reader stands behind the gradient here: let one
        with p.graph(BACKWARD).inserting_after(update):
            late = p.graph(BACKWARD).node_copy(views[-1])
    else:
        late.prepend(update)
    check_refused(p, r"reads .*bucket \d+ .* after update\w* has put the optimizer's new values")


def _is_before(p: Planned, first: Any, second: Any) -> bool:
    nodes = list(p.graph(BACKWARD).nodes)
    return nodes.index(first) < nodes.index(second)


def test_an_update_while_its_shard_is_being_sent_is_refused() -> None:
    p = compiled()
    update = find(p, ops.update, 2)
    gather = find(p, ops.all_gather, 2)
    wait = next(u for u in gather.users if u.target is ops.wait)
    with p.graph(BACKWARD).inserting_before(update):
        again = p.graph(BACKWARD).node_copy(gather)
    with p.graph(BACKWARD).inserting_after(update):
        p.graph(BACKWARD).node_copy(wait).replace_input_with(gather, again)
    check_refused(p, r"overwrites the shard of bucket 2 .* while \w+ still sends it|slots overlap")


def test_an_update_that_the_plan_does_not_ask_for_is_refused() -> None:
    p = program()
    store = find(p, ops.store_grad, 2)
    shard = next(n for n in p.placeholders(BACKWARD, Role.SHARD) if info(n).index == 2)
    with p.graph(BACKWARD).inserting_after(store):
        made = call(p.graph(BACKWARD), ops.update, (store, shard, 2), like=store)
    made.meta["zfx"] = info(store)
    check_refused(p, r"updates parameters, but the plan's update is 'step'")
