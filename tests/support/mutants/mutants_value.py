"""Changes of what is read, and of the numbers that schedules carry."""

from __future__ import annotations

import op_sets
from mutants import Editor, is_same_kind, label, set_argument
from torch import Tensor, fx

from zerofx import ops
from zerofx.ir.meta import Role, info, set_info, value

# where the slot stands
SLOTTED = {ops.all_gather: 3, ops.reload_shard: 3, ops.grad_buffer: 4, ops.release: 1}


def retarget_compute(edit: Editor) -> str | None:
    """Let a compute node read another value of the same shape."""
    return _retarget(edit, edit.compute())


def retarget_op(edit: Editor) -> str | None:
    """Let a zerofx op read another value of the same shape."""
    return _retarget(edit, edit.find(*op_sets.ALL))


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
        others = [n for n in edit.alike(results[i], out) if n.target not in op_sets.LAUNCHES]
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
    if (node := edit.any_of(edit.find(*op_sets.REDUCES))) is None:
        return None
    scale = node.args[3]
    assert isinstance(scale, float)
    set_argument(node, 3, new := edit.rng.choice([s for s in (1.0, 0.5, 0.25, 2.0) if s != scale]))
    return f"{label(node)}: {new} for {scale}"


def wrong_bucket(edit: Editor) -> str | None:
    """Name another bucket of the same size, where the emitted line would."""
    layout = edit.program.layout
    assert layout is not None
    named = op_sets.LAUNCHES | {ops.resident, ops.grad_buffer, ops.store_grad}
    nodes = [n for n in edit.find(*named) if type(n.args[1]) is int]
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
    slots = range(-1, len(edit.program.slot_bytes) + 1)
    new = edit.rng.choice([s for s in slots if s != old])
    changed = [node]
    if node.target in (ops.all_gather, ops.reload_shard) and edit.rng.random() < 0.5:
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
