"""Changes of copies between device and host: left out, repeated, moved, or of something else."""

from __future__ import annotations

import op_sets
from mutants import Editor, is_same_kind, label
from torch import fx

from zerofx import ops
from zerofx.ir.graphs import users_after_views
from zerofx.ir.meta import value


def copy_waits(edit: Editor, *launches: object) -> list[fx.Node]:
    """Return the waits of these kinds of copies."""
    return [w for w in edit.find(ops.wait) if w.args[0].target in launches]  # type: ignore[union-attr]


def drop_offload(edit: Editor) -> str | None:
    """Save the value itself: it never leaves."""
    return _drop(edit, ops.offload)


def drop_reload(edit: Editor) -> str | None:
    """Read the value where it is, on the host."""
    return _drop(edit, ops.reload)


def drop_write(edit: Editor) -> str | None:
    """Save what is on the host: it never goes on."""
    return _drop(edit, ops.write_out)


def drop_read(edit: Editor) -> str | None:
    """Reload what is on NVMe as if it were on the host."""
    return _drop(edit, ops.read_back)


def _drop(edit: Editor, target: object) -> str | None:
    if (wait := edit.any_of(copy_waits(edit, target))) is None:
        return None
    launch = wait.args[0]
    assert isinstance(launch, fx.Node)
    what = label(launch)
    edit.erase(wait, launch.args[0])  # type: ignore[arg-type]
    edit.erase(launch)
    return what


def duplicate_copy(edit: Editor) -> str | None:
    """Copy a value a second time, with a wait of its own; some readers read that."""
    if (wait := edit.any_of(copy_waits(edit, *op_sets.COPIES))) is None:
        return None
    launch = wait.args[0]
    anchor = edit.any_of(edit.gaps([wait]) or [wait.next])
    assert anchor is not None and isinstance(launch, fx.Node)
    with edit.graph.inserting_before(anchor):
        again = edit.graph.node_copy(launch)
        copy = edit.graph.node_copy(wait)
    copy.args = (again,)
    position = edit.positions()
    for user in list(wait.users):
        if position[user] > position[copy] and edit.rng.random() < 0.5:
            user.replace_input_with(wait, copy)
    return f"{label(launch)} again before {anchor.name}, read by {len(copy.users)}"


def move_copy(edit: Editor) -> str | None:
    """Launch a copy, or wait for one, elsewhere."""
    nodes = edit.find(*op_sets.COPIES) + copy_waits(edit, *op_sets.COPIES)
    if (node := edit.any_of(nodes)) is None or (anchor := edit.any_of(edit.gaps([node]))) is None:
        return None
    edit.move([node], anchor)
    return f"{label(node)} before {label(anchor)}"


def offload_early(edit: Editor) -> str | None:
    """Let a value leave, wait and all, before its last read."""
    waits = copy_waits(edit, ops.offload)
    edit.rng.shuffle(waits)
    for wait in waits:
        launch = wait.args[0]
        assert isinstance(launch, fx.Node)
        reads = [u for u in users_after_views(launch.args[0]) if u.op != "output"]  # type: ignore[arg-type]
        gaps = [
            g for g in edit.gaps([launch]) if any(u is g or edit.is_behind(u, g) for u in reads)
        ]
        early = [g for g in gaps if not edit.is_behind(g, launch)]
        if anchor := edit.any_of(early):
            edit.move([launch, wait], anchor)
            return f"{label(launch)} with its wait before {label(anchor)}"
    return None


def retarget_copy(edit: Editor) -> str | None:
    """Copy another value of the same form."""
    nodes = edit.find(*op_sets.COPIES)
    edit.rng.shuffle(nodes)
    for node in nodes:
        read = node.args[0]
        assert isinstance(read, fx.Node)
        others = [n for n in edit.alike(read, node) if n.target not in op_sets.LAUNCHES]
        if other := edit.any_of(others):
            node.replace_input_with(read, other)
            return f"{label(node)} copies {label(other)} for {label(read)}"
    return None


def swap_copies(edit: Editor) -> str | None:
    """Let the waits of two copies deliver each other's values."""
    return swap_waits(edit, *op_sets.COPIES)


def swap_waits(edit: Editor, *launches: object) -> str | None:
    """Let the waits of two launches of these kinds deliver what the other should."""
    waits = copy_waits(edit, *launches)
    pairs = [
        (a, b)
        for i, a in enumerate(waits)
        for b in waits[i + 1 :]
        if is_same_kind(value(a), value(b)) and a.args[0].target is b.args[0].target  # type: ignore[union-attr]
    ]
    edit.rng.shuffle(pairs)
    for a, b in pairs:
        first, second = a.args[0], b.args[0]
        assert isinstance(second, fx.Node)
        if edit.is_behind(a, second):
            a.args, b.args = (second,), (first,)
            return f"{label(a)} and {label(b)}"
    return None
