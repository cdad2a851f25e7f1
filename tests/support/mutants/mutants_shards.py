"""Changes of what moves shards that live off the device, and of their gradients' way back."""

from __future__ import annotations

import op_sets
from mutants import Editor, label, set_argument
from mutants_copies import copy_waits, swap_waits
from torch import fx

from zerofx import ops
from zerofx.ir.graphs import call
from zerofx.ir.meta import Role, info, set_info


def drop_shard_reload(edit: Editor) -> str | None:
    """Read the shard where it is, off the device."""
    return _drop(edit, *op_sets.RELOADS)


def drop_grad_offload(edit: Editor) -> str | None:
    """Store the reduced slice as it lies on the device."""
    return _drop(edit, ops.offload_grad)


def _drop(edit: Editor, *targets: object) -> str | None:
    if (wait := edit.any_of(copy_waits(edit, *targets))) is None:
        return None
    launch = wait.args[0]
    assert isinstance(launch, fx.Node)
    what = label(launch)
    for user in list(wait.users):
        if user.target is ops.release:
            edit.erase(user)
    edit.erase(wait, launch.args[0])  # type: ignore[arg-type]
    edit.erase(launch)
    return what


def duplicate_move(edit: Editor) -> str | None:
    """Move something a second time, with a wait of its own; some readers read that."""
    if (wait := edit.any_of(copy_waits(edit, *op_sets.MOVES))) is None:
        return None
    launch = wait.args[0]
    anchor = edit.any_of(edit.gaps([wait]) or [wait.next])
    assert anchor is not None and isinstance(launch, fx.Node)
    with edit.graph.inserting_before(anchor):
        again = edit.graph.node_copy(launch)
        copy = edit.graph.node_copy(wait)
    copy.args = (again,)
    if again.target is ops.reload_shard and edit.rng.random() < 0.5:
        again.args = again.args[:3]  # beside the slots
    position = edit.positions()
    for user in list(wait.users):
        if position[user] > position[copy] and edit.rng.random() < 0.5:
            user.replace_input_with(wait, copy)
    return f"{label(launch)} again before {anchor.name}, read by {len(copy.users)}"


def duplicate_move_launch(edit: Editor) -> str | None:
    """Launch a move again, with nobody waiting for it, or wait for it twice."""
    nodes = edit.find(*op_sets.MOVES) + copy_waits(edit, *op_sets.MOVES)
    if (node := edit.any_of(nodes)) is None:
        return None
    behind = [node.next, *[g for g in edit.gaps([node]) if edit.is_behind(g, node)]]
    anchor = edit.any_of(behind)
    assert anchor is not None
    with edit.graph.inserting_before(anchor):
        edit.graph.node_copy(node)
    return f"{label(node)} again before {anchor.name}"


def move_move(edit: Editor) -> str | None:
    """Launch a move, or wait for one, elsewhere."""
    nodes = edit.find(*op_sets.MOVES) + copy_waits(edit, *op_sets.MOVES)
    if (node := edit.any_of(nodes)) is None or (anchor := edit.any_of(edit.gaps([node]))) is None:
        return None
    edit.move([node], anchor)
    return f"{label(node)} before {label(anchor)}"


def move_near(edit: Editor) -> str | None:
    """Release a reloaded shard elsewhere, or send it from elsewhere."""
    near = copy_waits(edit, *op_sets.RELOADS)
    nodes = [u for w in near for u in w.users if u.target in (ops.release, ops.all_gather)]
    if (node := edit.any_of(nodes)) is None or (anchor := edit.any_of(edit.gaps([node]))) is None:
        return None
    edit.move([node], anchor)
    return f"{label(node)} before {label(anchor)}"


def release_near(edit: Editor) -> str | None:
    """Release a reloaded or refreshed shard once more, as soon as it has been sent or later."""
    waits = [w for w in copy_waits(edit, *op_sets.RELOADS) if w.users]
    if (wait := edit.any_of(waits)) is None:
        return None
    position = edit.positions()
    heads = [s[0] for s in edit.statements() if position[s[0]] > position[wait]]
    anchor = edit.any_of([*heads, edit.graph.output_node()])
    assert anchor is not None
    slot = [u.args[1:] for u in wait.users if u.target is ops.release]
    with edit.graph.inserting_before(anchor):
        call(edit.graph, ops.release, (wait, *(slot[0] if slot else ())), like=wait)
    return f"{label(wait)} before {label(anchor)}"


def retarget_move(edit: Editor) -> str | None:
    """Move another value of the same form."""
    nodes = edit.find(*op_sets.MOVES)
    edit.rng.shuffle(nodes)
    for node in nodes:
        read = node.args[0]
        assert isinstance(read, fx.Node)
        others = [n for n in edit.alike(read, node) if n.target not in op_sets.TRANSFERS]
        if other := edit.any_of(others):
            node.replace_input_with(read, other)
            return f"{label(node)} moves {label(other)} for {label(read)}"
    return None


def rename_move(edit: Editor) -> str | None:
    """Name another bucket, whose shard is moved too, or let it only be called so."""
    layout = edit.program.layout
    assert layout is not None
    nodes = edit.find(*op_sets.MOVES)
    edit.rng.shuffle(nodes)
    for node in nodes:
        mine = layout.buckets[int(node.args[1])]  # type: ignore[call-overload]
        others = [b.index for b in layout.buckets if b is not mine and b.numel == mine.numel]
        if not others:
            continue
        new = edit.rng.choice(others)
        shards = edit.program.placeholders(edit.name, Role.SHARD)
        theirs = [s for s in shards if info(s).index == new]
        with_shard = node.target in op_sets.RELOADS and theirs and edit.rng.random() < 0.5
        if with_shard:
            set_argument(node, 0, theirs[0])
        set_argument(node, 1, new)
        what = f"{label(node)}: {new}{', with its shard' if with_shard else ''}"
        set_info(node, index=new)
        return what
    return None


def swap_moves(edit: Editor) -> str | None:
    """Let the waits of two moves deliver each other's."""
    return swap_waits(edit, *op_sets.MOVES)


def other_verb(edit: Editor) -> str | None:
    """Refresh what is to be reloaded, or the reverse."""
    if (node := edit.any_of(edit.find(*op_sets.RELOADS))) is None:
        return None
    what = label(node)
    if node.target is ops.reload_shard:
        slot = node.args[3:]
        node.target, node.args = ops.refresh_shard, node.args[:3]
        wait = next(u for u in node.users if u.target is ops.wait)
        for release in [u for u in wait.users if u.target is ops.release]:
            if slot and edit.rng.random() < 0.5:
                edit.erase(release)
    else:
        node.target = ops.reload_shard
    return what
