"""Changes of order: statements swapped and moved as far as the graph stays legal."""

from __future__ import annotations

from itertools import pairwise

import op_sets
from mutants import Editor, label
from torch import fx

from zerofx import ops
from zerofx.ir.meta import info


def swap(edit: Editor) -> str | None:
    """Exchange two neighbouring statements that do not read each other."""
    pairs = []
    statements = edit.statements()
    for first, second in pairwise(statements):
        reads = {a for n in second for a in n.all_input_nodes}
        if not reads & set(first) and first[-1].next is second[0]:
            pairs.append((first, second))
    if not pairs:
        return None
    first, second = edit.rng.choice(pairs)
    edit.move(second, first[0])
    return f"{label(first[0])} and {label(second[0])}"


def swap_two(edit: Editor) -> str | None:
    """Let two ops of one kind take each other's places in the schedule."""
    return _swap_two(edit, edit.rng.choice(sorted(op_sets.ALL, key=str)))


def swap_launches(edit: Editor) -> str | None:
    targets = sorted(op_sets.LAUNCHES, key=str)
    edit.rng.shuffle(targets)
    return next(filter(None, (_swap_two(edit, target) for target in targets)), None)


def _swap_two(edit: Editor, target: object) -> str | None:
    nodes = edit.find(target)
    pairs = [(a, b) for i, a in enumerate(nodes) for b in nodes[i + 1 :]]
    edit.rng.shuffle(pairs)
    for a, b in pairs:
        after_a, after_b = a.next, b.next
        if after_a is b or after_b not in edit.gaps([a]) or after_a not in edit.gaps([b]):
            continue
        after_b.prepend(a)
        after_a.prepend(b)
        return f"{label(a)} and {label(b)}"
    return None


def move_op(edit: Editor) -> str | None:
    """Let a zerofx op stand elsewhere between regions."""
    node = edit.any_of(edit.find(*op_sets.ALL))
    return None if node is None else _move(edit, [node])


def move_launch(edit: Editor) -> str | None:
    node = edit.any_of(edit.find(*op_sets.LAUNCHES))
    return None if node is None else _move(edit, [node])


def move_wait(edit: Editor) -> str | None:
    node = edit.any_of(edit.find(ops.wait))
    return None if node is None else _move(edit, [node])


def wait_late(edit: Editor) -> str | None:
    """Wait for a reduction, and store its result, later: its buffer must live until then."""
    waits = [n for n in edit.find(ops.wait) if n.args[0].target in op_sets.REDUCES]  # type: ignore[union-attr]
    if (wait := edit.any_of(waits)) is None:
        return None
    moved = [wait, *[u for u in wait.users if u.target is ops.store_grad]]
    late = [g for g in edit.gaps(moved) if edit.is_behind(g, moved[-1])]
    if not late:
        return None
    anchor = edit.rng.choice(late)
    edit.move(moved, anchor)
    return f"{label(wait)} before {label(anchor)}"


def move_pack(edit: Editor) -> str | None:
    node = edit.any_of(edit.find(ops.pack, ops.grad_buffer, ops.store_grad))
    return None if node is None else _move(edit, [node])


def move_update(edit: Editor) -> str | None:
    node = edit.any_of(edit.find(ops.update))
    return None if node is None else _move(edit, [node])


def move_region(edit: Editor) -> str | None:
    regions = [s for s in edit.statements() if info(s[0]).region is not None]
    return _move(edit, edit.rng.choice(regions)) if regions else None


def release_early(edit: Editor) -> str | None:
    if (node := edit.any_of(edit.find(ops.release))) is None:
        return None
    early = [g for g in edit.gaps([node]) if not edit.is_behind(g, node)]
    if not early:
        return None
    anchor = edit.rng.choice(early)
    edit.move([node], anchor)
    return f"{label(node)} before {label(anchor)}"


def release_late(edit: Editor) -> str | None:
    if (node := edit.any_of(edit.find(ops.release))) is None:
        return None
    late = [g for g in edit.gaps([node]) if edit.is_behind(g, node)]
    if not late:
        return None
    anchor = edit.rng.choice(late)
    edit.move([node], anchor)
    return f"{label(node)} before {label(anchor)}"


def reorder_compute(edit: Editor) -> str | None:
    """Exchange two neighbours in a region, or two nodes that draw at random."""
    nodes = edit.compute()
    drawn = [n for n in nodes if info(n).is_random]
    if len(drawn) > 1 and edit.rng.random() < 0.5:
        first, second = sorted(edit.rng.sample(drawn, 2), key=edit.positions().__getitem__)
        inputs = second.all_input_nodes
        if all(not edit.is_behind(a, first) and a is not first for a in inputs):
            first.prepend(second)
            return f"{second.name} before {first.name}"
    pairs = [
        (n, n.next)
        for n in nodes
        if info(n).region == info(n.next).region and n not in n.next.all_input_nodes
    ]
    if not pairs:
        return None
    first, second = edit.rng.choice(pairs)
    first.prepend(second)
    return f"{second.name} before {first.name}"


def _move(edit: Editor, moved: list[fx.Node]) -> str | None:
    anchor = edit.any_of(edit.gaps(moved))
    if anchor is None:
        return None
    edit.move(moved, anchor)
    return f"{label(moved[0])} before {label(anchor)}"
