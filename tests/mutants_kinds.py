"""The kinds of change that `mutants` makes; each returns what it did, or None: it found no place."""

from __future__ import annotations

from itertools import pairwise

from mutants import Editor, Kind, is_same_kind, label, set_argument
from torch import Tensor, fx

from zerofx.ir import ops
from zerofx.ir.graphs import alias_source
from zerofx.ir.meta import Role, info, set_info, value

SLOTTED = {ops.all_gather: 3, ops.grad_buffer: 4, ops.release: 1}


# -- drop -----------------------------------------------------------------------------------------
def drop_wait(edit: Editor) -> str | None:
    """Read a launch without waiting for it."""
    if (node := edit.any_of(edit.find(ops.wait))) is None:
        return None
    what = label(node)
    edit.erase(node, node.args[0])  # type: ignore[arg-type]
    return what


def drop_release(edit: Editor) -> str | None:
    if (node := edit.any_of(edit.find(ops.release))) is None:
        return None
    what = label(node)
    edit.erase(node)
    return what


def drop_pack(edit: Editor) -> str | None:
    if (node := edit.any_of(edit.find(ops.pack))) is None:
        return None
    what = label(node)
    edit.erase(node, node.args[0])  # type: ignore[arg-type]
    return what


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
    if (node := edit.any_of(edit.find(ops.store_grad))) is None:
        return None
    what = label(node)
    edit.erase(node, node.args[0])  # type: ignore[arg-type]
    return what


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


# -- duplicate ------------------------------------------------------------------------------------
def duplicate(edit: Editor) -> str | None:
    """Repeat a zerofx op, at once or later; some of its readers read the copy."""
    node = edit.any_of(edit.find(*(ops.ALL - {ops.sync_buffers})))
    if node is None:
        return None
    anchor = edit.any_of([node.next, *[g for g in edit.gaps([node]) if _follows(edit, g, node)]])
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


def _follows(edit: Editor, node: fx.Node, first: fx.Node) -> bool:
    position = edit.positions()
    return position[node] > position[first]


def _share_readers(edit: Editor, node: fx.Node, copy: fx.Node) -> None:
    position = edit.positions()
    for user in list(node.users):
        if user is not copy and position[user] > position[copy] and edit.rng.random() < 0.5:
            user.replace_input_with(node, copy)


# -- swap and move --------------------------------------------------------------------------------
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
    target = edit.rng.choice(sorted(ops.ALL, key=str))
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
    node = edit.any_of(edit.find(*ops.ALL))
    return None if node is None else _move(edit, [node])


def move_launch(edit: Editor) -> str | None:
    node = edit.any_of(edit.find(*ops.LAUNCHES))
    return None if node is None else _move(edit, [node])


def move_wait(edit: Editor) -> str | None:
    node = edit.any_of(edit.find(ops.wait))
    return None if node is None else _move(edit, [node])


def move_pack(edit: Editor) -> str | None:
    node = edit.any_of(edit.find(ops.pack, ops.grad_buffer, ops.store_grad))
    return None if node is None else _move(edit, [node])


def move_region(edit: Editor) -> str | None:
    regions = [s for s in edit.statements() if info(s[0]).region is not None]
    return _move(edit, edit.rng.choice(regions)) if regions else None


def release_early(edit: Editor) -> str | None:
    if (node := edit.any_of(edit.find(ops.release))) is None:
        return None
    early = [g for g in edit.gaps([node]) if not _follows(edit, g, node)]
    if not early:
        return None
    anchor = edit.rng.choice(early)
    edit.move([node], anchor)
    return f"{label(node)} before {label(anchor)}"


def release_late(edit: Editor) -> str | None:
    if (node := edit.any_of(edit.find(ops.release))) is None:
        return None
    late = [g for g in edit.gaps([node]) if _follows(edit, g, node)]
    if not late:
        return None
    anchor = edit.rng.choice(late)
    edit.move([node], anchor)
    return f"{label(node)} before {label(anchor)}"


def reorder_compute(edit: Editor) -> str | None:
    """Exchange two neighbours in a region; where two nodes draw at random, those in half the cases."""
    nodes = edit.compute()
    drawn = [n for n in nodes if info(n).is_random]
    if len(drawn) > 1 and edit.rng.random() < 0.5:
        first, second = sorted(edit.rng.sample(drawn, 2), key=edit.positions().__getitem__)
        inputs = second.all_input_nodes
        if all(not _follows(edit, a, first) and a is not first for a in inputs):
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


# -- retarget -------------------------------------------------------------------------------------
def retarget_compute(edit: Editor) -> str | None:
    """Let a compute node read another value of the same shape."""
    return _retarget(edit, edit.compute())


def retarget_op(edit: Editor) -> str | None:
    """Let a zerofx op read another value of the same shape."""
    return _retarget(edit, edit.find(*ops.ALL))


def retarget_parameter(edit: Editor) -> str | None:
    """Let a compute node read another parameter of the same shape."""
    views = edit.find(ops.param_view)
    edit.rng.shuffle(views)
    for view in views:
        for user in view.users:
            others = [n for n in edit.alike(view, user) if n.target is ops.param_view]
            if others:
                other = edit.rng.choice(others)
                user.replace_input_with(view, other)
                return f"{user.name} reads {info(other).name} for {info(view).name}"
    return None


def retarget_result(edit: Editor) -> str | None:
    """Return another value of the same shape, or two saved ones in exchanged places."""
    results = edit.program.results(edit.name)
    specs = edit.program.outputs[edit.name]
    # which node stands for a reduced gradient is bookkeeping: what counts is what was stored
    at = [
        i for i, (s, r) in enumerate(zip(specs, results, strict=True))
        if isinstance(r, fx.Node) and s.role is not Role.SHARD_GRAD
    ]  # fmt: skip
    edit.rng.shuffle(at)
    out = edit.graph.output_node()
    for i in at:
        others = [n for n in edit.alike(results[i], out) if n.target not in ops.LAUNCHES]
        if others:
            other = edit.rng.choice(others)
            what = f"{other.name} for {results[i].name}"
            results[i] = other
            out.args = (tuple(results),)
            return what
    return None


def _retarget(edit: Editor, nodes: list[fx.Node]) -> str | None:
    edit.rng.shuffle(nodes)
    for node in nodes:
        reads = [a for a in node.all_input_nodes if isinstance(value(a), Tensor)]
        edit.rng.shuffle(reads)
        for read in reads:
            if others := edit.alike(read, node):
                other = edit.rng.choice(others)
                node.replace_input_with(read, other)
                return f"{label(node)} reads {label(other)} for {label(read)}"
    return None


# -- wrong numbers --------------------------------------------------------------------------------
def wrong_view_offset(edit: Editor) -> str | None:
    """Look at another place of a gathered bucket."""
    if (node := edit.any_of(edit.find(ops.param_view))) is None:
        return None
    full, offset, _ = node.args
    room = value(full).numel() - value(node).numel()  # type: ignore[arg-type]
    offsets = _offsets(edit, value(full).numel())  # type: ignore[arg-type]
    choices = [o for o in {*offsets, offset + 1, offset + 16} if o != offset and 0 <= o <= room]  # type: ignore[operator]
    if not choices:
        return None
    set_argument(node, 1, new := edit.rng.choice(sorted(choices)))
    return f"{label(node)} at {new} for {offset}"


def wrong_pack_offset(edit: Editor) -> str | None:
    """Pack a gradient to another place, or two to each other's."""
    if (node := edit.any_of(edit.find(ops.pack))) is None:
        return None
    offsets = list(node.args[2])  # type: ignore[arg-type]
    at = edit.rng.randrange(len(offsets))
    others = [o for o in _offsets(edit, value(node).numel()) if o != offsets[at]]
    if not others:
        return None
    new = edit.rng.choice(others)
    if new in offsets:
        offsets[offsets.index(new)] = offsets[at]
    offsets[at] = new
    set_argument(node, 2, offsets)
    return f"{label(node)}: {offsets}"


def _offsets(edit: Editor, numel: int) -> list[int]:
    """Return where the parameters of the buckets of `numel` elements begin."""
    layout = edit.program.layout
    assert layout is not None
    return sorted({p.offset for b in layout.buckets if b.numel == numel for p in b.params})


def wrong_scale(edit: Editor) -> str | None:
    if (node := edit.any_of(edit.find(*ops.REDUCES))) is None:
        return None
    scale = node.args[3]
    assert isinstance(scale, float)
    set_argument(node, 3, new := edit.rng.choice([s for s in (1.0, 0.5, 0.25, 2.0) if s != scale]))
    return f"{label(node)}: {new} for {scale}"


def wrong_bucket(edit: Editor) -> str | None:
    """Name another bucket of the same size, where the emitted line would."""
    layout = edit.program.layout
    assert layout is not None
    named = ops.LAUNCHES | {ops.resident, ops.grad_buffer, ops.store_grad}
    nodes = edit.find(*named)
    edit.rng.shuffle(nodes)
    for node in nodes:
        mine = layout.buckets[int(node.args[1])]  # type: ignore[arg-type]
        others = [b.index for b in layout.buckets if b is not mine and b.numel == mine.numel]
        if others:
            new = edit.rng.choice(others)
            set_argument(node, 1, new)
            what = f"{label(node)}: {new}"
            set_info(node, index=new)
            return what
    return None


def wrong_slot(edit: Editor) -> str | None:
    """Place a buffer in another slot, its release with it, or let the two differ."""
    nodes = [n for n in edit.find(*SLOTTED) if len(n.args) > SLOTTED[n.target]]
    if (node := edit.any_of(nodes)) is None:
        return None
    old = node.args[SLOTTED[node.target]]
    slots = range(-1, len(edit.program.slots["bytes"]) + 1)
    new = edit.rng.choice([s for s in slots if s != old])
    changed = [node]
    if node.target is ops.all_gather and edit.rng.random() < 0.5:
        waits = [u for u in node.users if u.target is ops.wait]
        changed += [u for w in waits for u in w.users if u.target is ops.release]
    for each in changed:
        set_argument(each, SLOTTED[each.target], new)
    return f"{' and '.join(map(label, changed))}: {new} for {old}"


def wrong_zero(edit: Editor) -> str | None:
    """Clear a gradient buffer that needs no clearing, or do not clear one that does."""
    if (node := edit.any_of(edit.find(ops.grad_buffer))) is None:
        return None
    set_argument(node, 3, new := not node.args[3])
    return f"{label(node)}: {new}"


def wrong_saved(edit: Editor) -> str | None:
    """Let backward take another saved value than forward meant."""
    program = edit.program
    if "backward" not in program.graphs:
        return None
    saved = program.placeholders("backward", Role.SAVED)
    pairs = [
        (a, b) for i, a in enumerate(saved) for b in saved[i + 1 :]
        if is_same_kind(value(a), value(b))
    ]  # fmt: skip
    if not pairs:
        return None
    a, b = edit.rng.choice(pairs)
    first, second = info(a).index, info(b).index
    set_info(a, index=second)
    set_info(b, index=first)
    return f"{a.name} and {b.name}"


# -- one rank only --------------------------------------------------------------------------------
def one_rank(edit: Editor) -> str | None:
    """Let one rank alone run a schedule whose communication differs."""
    return edit.rng.choice(COMMUNICATION)(edit)


COMMUNICATION: list[Kind] = [
    drop_reduction, drop_part_of_pack, duplicate, swap_two, wrong_scale, wrong_bucket,
    wrong_pack_offset,
]  # fmt: skip
KINDS: list[Kind] = [
    drop_wait, drop_release, drop_pack, drop_part_of_pack, drop_reduction, drop_store,
    drop_compute, duplicate, duplicate_compute, swap, swap_two, move_op, move_launch, move_wait,
    move_pack, move_region, release_early, release_late, reorder_compute, retarget_compute,
    retarget_op, retarget_parameter, retarget_result, wrong_view_offset, wrong_pack_offset,
    wrong_scale, wrong_bucket, wrong_slot, wrong_zero, wrong_saved, one_rank,
]  # fmt: skip
ON_ONE_RANK: list[Kind] = [one_rank]
