"""Changes that leave something out of a program, or do it twice."""

from __future__ import annotations

import op_sets
from mutants import Editor, is_same_kind, label, set_argument
from torch import fx

from zerofx import ops
from zerofx.ir.graphs import alias_source
from zerofx.ir.meta import value


def _drop_any(edit: Editor, target: object, *, passes_on: bool = False) -> str | None:
    """Erase any call of `target`; where it `passes_on`, its readers read its first argument."""
    if (node := edit.any_of(edit.find(target))) is None:
        return None
    what = label(node)
    edit.erase(node, node.args[0] if passes_on else None)  # type: ignore[arg-type]
    return what


def drop_wait(edit: Editor) -> str | None:
    """Read a launch without waiting for it."""
    return _drop_any(edit, ops.wait, passes_on=True)


def drop_release(edit: Editor) -> str | None:
    return _drop_any(edit, ops.release)


def drop_pack(edit: Editor) -> str | None:
    return _drop_any(edit, ops.pack, passes_on=True)


def drop_part_of_pack(edit: Editor) -> str | None:
    """Leave one gradient out of a pack."""
    packs = [n for n in edit.find(ops.pack) if len(n.args[1]) > 1]  # type: ignore[arg-type]
    if (node := edit.any_of(packs)) is None:
        return None
    at = edit.rng.randrange(len(node.args[1]))  # type: ignore[arg-type]
    for index in (1, 2):
        parts = list(node.args[index])  # type: ignore[arg-type]
        del parts[at]
        set_argument(node, index, parts)
    return f"{label(node)} without gradient {at}"


def drop_reduction(edit: Editor) -> str | None:
    """Never reduce a bucket."""
    if (store := edit.any_of(edit.find(ops.store_grad))) is None:
        return None
    wait = store.args[0]
    assert isinstance(wait, fx.Node) and isinstance(wait.args[0], fx.Node)
    launch, what = wait.args[0], label(wait.args[0])
    shard = alias_source(launch.args[0]).args[0]  # type: ignore[arg-type]
    edit.erase(store, shard)  # type: ignore[arg-type]
    edit.erase(wait)
    edit.erase(launch)
    return what


def drop_store(edit: Editor) -> str | None:
    return _drop_any(edit, ops.store_grad, passes_on=True)


def drop_update(edit: Editor) -> str | None:
    return _drop_any(edit, ops.update)


def drop_compute(edit: Editor) -> str | None:
    """Leave out a node whose input has the shape of its result."""
    nodes = [
        (n, a)
        for n in edit.compute()
        for a in n.all_input_nodes
        if is_same_kind(value(a), value(n)) and n.users
    ]
    if not nodes:
        return None
    node, instead = edit.rng.choice(nodes)
    what = f"{node.name}, its readers read {instead.name}"
    edit.erase(node, instead)
    return what


def duplicate(edit: Editor) -> str | None:
    """Repeat a zerofx op, at once or later; some of its readers read the copy."""
    return _duplicate(edit, edit.any_of(edit.find(*(op_sets.ALL - {ops.sync_buffers}))))


def duplicate_launch(edit: Editor) -> str | None:
    return _duplicate(edit, edit.any_of(edit.find(*op_sets.LAUNCHES)))


def _duplicate(edit: Editor, node: fx.Node | None) -> str | None:
    if node is None:
        return None
    anchor = edit.any_of([node.next, *[g for g in edit.gaps([node]) if edit.is_behind(g, node)]])
    assert anchor is not None
    with edit.graph.inserting_before(anchor):
        copy = edit.graph.node_copy(node)
    _share_readers(edit, node, copy)
    return f"{label(node)} again before {anchor.name}, read by {len(copy.users)}"


def duplicate_compute(edit: Editor) -> str | None:
    """Compute something twice; some readers read the copy."""
    if (node := edit.any_of(edit.compute())) is None:
        return None
    with edit.graph.inserting_after(node):
        copy = edit.graph.node_copy(node)
    _share_readers(edit, node, copy)
    return f"{node.name}, read by {len(copy.users)}"


def _share_readers(edit: Editor, node: fx.Node, copy: fx.Node) -> None:
    position = edit.positions()
    for user in list(node.users):
        if user is not copy and position[user] > position[copy] and edit.rng.random() < 0.5:
            user.replace_input_with(node, copy)
