"""Changes of how values lie over an axis: collectives, parts, and what is told of both.

Half of them are told: what nodes note of how they lie is made to agree with the change wherever
the rules have a way, as a pass would write that is wrong and believes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from mutants import Editor, is_same_kind, label, set_argument
from torch import Tensor, fx

from zerofx import ops
from zerofx.errors import ProgramError
from zerofx.ir.meta import Hole, Placed, info, set_info, tensors_of, value
from zerofx.ir.placing import Operand, WholeCall, _is_local, _noted, _Typing, has_owners, ways
from zerofx.ir.program import BACKWARD, FORWARD, JOINT, Planned
from zerofx.ir.spec import Kind, kind_of, wait_for
from zerofx.ir.verify_values import Numbering
from zerofx.layout.buckets import CONTEXT
from zerofx.layout.placements import Cut, Owned, Part, R, fits, num_chunks, serves
from zerofx.ops.placed import CONVERSIONS

aten = torch.ops.aten
OWN_ROWS = (ops.embedding_rows, ops.embedding_rows_backward)
OF_EXPERTS = (ops.grouped_rows, ops.grouped_rows_backward, ops.grouped_weights)


def conversions(edit: Editor, *targets: object) -> list[fx.Node]:
    return edit.find(*(targets or CONVERSIONS))


def _of(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _axis(node: fx.Node) -> str:
    """Return the axis of a conversion."""
    return node.args[1]  # type: ignore[return-value]


def _team(edit: Editor, axis: str) -> int:
    return edit.program.plan.parallel.value_axes[axis]


def _chunks(edit: Editor, axis: str) -> int:
    """Return into how many chunks what is cut over an axis is divided."""
    zigzag = axis == CONTEXT and edit.program.plan.parallel.is_zigzag
    return num_chunks(_team(edit, axis), zigzag)


def _end(node: fx.Node) -> fx.Node:
    """Return what a conversion gives: what its wait returns, if it is a launch."""
    return wait_for(node) if kind_of(node) is Kind.LAUNCH else node


def _replace(edit: Editor, node: fx.Node, instead: fx.Node) -> None:
    """Take a conversion out; the readers of what it gives read something else."""
    end = _end(node)
    end.replace_all_uses_with(instead, lambda user: user is not instead)
    edit.graph.erase_node(end)
    if end is not node:
        edit.graph.erase_node(node)


def _own(node: fx.Node) -> Placed | None:
    """Return what is noted of a node: of a conversion, over its own axis."""
    placed = info(node).placed
    if placed is None or placed.outer is None or node.target not in CONVERSIONS:
        return placed
    return placed if _axis(node) == CONTEXT else placed.outer


def _whole_shape(node: fx.Node) -> list[int]:
    placed = _own(node)
    return list(placed.shape if placed is not None else value(node).shape)


def _as_call(placed: Placed | None, target: Any, args: tuple[Any, ...]) -> Placed | None:
    """Return the note of a call whose result lies as another value does, over each axis."""
    if placed is None:
        return None
    outer = _as_call(placed.outer, target, args)
    return Placed(placed.gives, placed.shape, target, args, {}, outer=outer)


def _launch(node: fx.Node) -> fx.Node:
    """Return the launch of what a wait gives, and any other node itself."""
    return node.args[0] if kind_of(node) is Kind.WAIT else node  # type: ignore[return-value]


def _inserted(
    edit: Editor, target: Any, args: tuple[Any, ...], before: fx.Node, like: fx.Node, **told: Any
) -> fx.Node:
    """Insert a call whose fake value is computed; told: what it notes of how it lies."""
    _cut_region(edit, before)
    with edit.graph.inserting_before(before):
        node = edit.graph.call_function(target, args)
    node.meta["val"] = target(*fx.node.map_arg(args, value))
    node.meta["zfx"] = replace(info(like), **told)
    if target not in CONVERSIONS and target is not ops.wait:
        regions = [info(n).region or 0 for n in edit.graph.nodes]
        set_info(node, region=max(regions) + 1)  # between what communicates, by itself
    return node


def _cut_region(edit: Editor, before: fx.Node) -> None:
    """Let a region begin where something is about to be put into it."""
    region = info(before).region
    if region is None or info(before.prev).region != region:
        return
    new = max(info(n).region or 0 for n in edit.graph.nodes) + 1
    while info(before).region == region:
        set_info(before, region=new)
        before = before.next


def _conversion(
    edit: Editor, target: Any, source: fx.Node, axis: str, more: tuple[Any, ...], before: fx.Node,
    gives: Any,
) -> fx.Node:  # fmt: skip
    like = next(n for n in conversions(edit))
    made = _inserted(edit, target, (source, axis, *more), before, like)
    note, axes = info(_launch(source)).placed, edit.program.plan.parallel.value_axes
    assert note is not None
    if axis == next(reversed(axes)):
        placed = Placed(gives, note.shape, outer=None if note.outer is None else note.outer.lies)
    else:  # a call on what is cut over the context axis
        told = Hole(0), axis, *more
        operand, result = Operand(note.shape, note.gives), SimpleNamespace(shape=note.shape)
        call = WholeCall(
            target, told, {}, (operand,), result, axes[CONTEXT], axis=CONTEXT,
            zigzag=edit.program.plan.parallel.is_zigzag,
        )  # fmt: skip
        found = (way.gives for way in ways(call) if way.needs == (note.gives,))
        inner, whole = next(found, note.gives), list(value(made).shape)
        if isinstance(inner, Cut):
            whole[inner.dim] *= axes[CONTEXT]
        outer = Placed(gives, note.outer.shape if note.outer is not None else ())
        placed = Placed(inner, tuple(whole), target, told, {}, outer=outer)
    set_info(made, placed=placed)
    if target is ops.part:
        return made
    return _inserted(edit, ops.wait, (made,), before, like, placed=None)


def _lies(node: fx.Node) -> Any:
    placed = _own(node)
    return placed.gives if placed is not None else None


# -- collectives ----------------------------------------------------------------------------------
def drop_conversion(edit: Editor) -> str | None:
    """Let all who read what a conversion gives read what it is given."""
    if (node := edit.any_of(conversions(edit))) is None:
        return None
    what = label(node)
    _replace(edit, node, _of(node))
    return what


def drop_conversion_once(edit: Editor) -> str | None:
    """Let one reader read what a conversion is given: a summand, or a part, as if it were whole."""
    nodes = [n for n in conversions(edit) if len(_end(n).users) > 1]
    if (node := edit.any_of(nodes)) is None:
        return None
    user = edit.rng.choice(list(_end(node).users))
    user.replace_input_with(_end(node), _of(node))
    return f"{label(node)} for {label(user)}"


def double_conversion(edit: Editor) -> str | None:
    """Convert twice."""
    if (node := edit.any_of(conversions(edit))) is None:
        return None
    end = _end(node)
    again = _copied(edit, node)
    end.replace_all_uses_with(_end(again), lambda user: user is not again)
    set_argument(again, 0, end)
    return label(node)


def _copied(edit: Editor, node: fx.Node) -> fx.Node:
    """Convert the same once more, behind a conversion."""
    end = _end(node)
    with edit.graph.inserting_after(end):
        again = edit.graph.node_copy(node)
    if end is not node:
        with edit.graph.inserting_after(again):
            wait = edit.graph.node_copy(end)
        wait.args = (again,)
    return again


def wrong_axis(edit: Editor) -> str | None:
    nodes = [*conversions(edit), *edit.find(*OWN_ROWS, *OF_EXPERTS)]
    if (node := edit.any_of(nodes)) is None:
        return None
    at = _constants_at(node)
    others = {"shard", "replicate", *edit.program.plan.parallel.value_axes} - {node.args[at]}
    set_argument(node, at, new := edit.rng.choice(sorted(others)))
    return f"{label(node)} over {new}"


def wrong_cut(edit: Editor) -> str | None:
    """Gather, scatter or part along another dimension, in other groups, or over other ranks."""
    if (node := edit.any_of([n for n in conversions(edit) if len(n.args) > 2])) is None:
        return None
    at = edit.rng.randrange(2, len(node.args))
    old: Any = node.args[at]
    if at == len(node.args) - 1:
        choices = [r for r in (1, 2, 4) if r != old]
    elif at % 2 == 0:
        choices = [d for d in range(value(node).dim()) if d != old]
    else:
        choices = [g for g in (1, 2, 3, 4) if g != old]
    if not choices:
        return None
    set_argument(node, at, new := edit.rng.choice(choices))
    return f"{label(node)}: {new} for {old} at {at}"


def other_conversion(edit: Editor) -> str | None:
    """Call another conversion in the place of one."""
    if (node := edit.any_of(conversions(edit))) is None:
        return None
    others = [op for op in sorted(CONVERSIONS, key=str) if op is not node.target]
    target = edit.rng.choice(others)
    team = _team(edit, _axis(node))
    dim = edit.rng.randrange(value(node).dim()) if value(node).dim() else 0
    fields: list[Any] = list(node.args[2:5]) if len(node.args) >= 5 else [dim, 1, team]
    if target in (ops.reduce_values, ops.summand):
        fields = []
    elif target is ops.swap_values:
        fields = [*fields[:2], edit.rng.randrange(max(value(node).dim(), 1)), 1, team]
    elif len(fields) != 3:
        fields = [*fields[:2], team]
    what = f"{label(node)} as {target}"
    node.target = target
    node.args = (*node.args[:2], *fields)
    return what


def swap_sources(edit: Editor) -> str | None:
    """Let two conversions of one form take what the other is given."""
    nodes = conversions(edit)
    edit.rng.shuffle(nodes)
    for i, a in enumerate(nodes):
        for b in nodes[i + 1 :]:
            first, second = _of(a), _of(b)
            is_one_form = first is not second and is_same_kind(value(first), value(second))
            if not is_one_form:
                continue
            position = edit.positions()
            low, high = sorted((a, b), key=position.__getitem__)
            if position[_of(high)] < position[low]:
                set_argument(a, 0, second)
                set_argument(b, 0, first)
                return f"{label(a)} and {label(b)}"
    return None


def scaled_by_world(edit: Editor) -> str | None:
    """Take the mean, or twice the sum, where the sum is meant; or the same of a whole value."""
    nodes = [n for n in conversions(edit) if value(n).is_floating_point()]
    if (node := edit.any_of(nodes)) is None:
        return None
    target, scale = aten.mul.Scalar, edit.rng.choice([0.5, 2.0, 0.25])
    placed = _as_call(info(node).placed, target, (Hole(0), scale))
    end = _end(node)
    made = _inserted(edit, target, (end, scale), end.next, node, placed=placed)
    end.replace_all_uses_with(made, lambda user: user is not made)
    return f"{label(node)} by {scale}"


def reduce_early(edit: Editor) -> str | None:
    """Sum one of two summands, and add the other behind."""
    for node in _shuffled(edit, conversions(edit, ops.reduce_values, ops.scatter_values)):
        total = _of(node)
        if total.target is not aten.add.Tensor or len(tensors_of(total)) != 2:
            continue
        at = edit.rng.randrange(2)
        early: Any = total.args[at]
        if list(value(early).shape) != list(value(total).shape):
            continue
        made = _conversion(edit, node.target, early, _axis(node), node.args[2:], total, _lies(node))
        if not is_same_kind(value(made), value(early)):
            late: Any = total.args[1 - at]
            part = _conversion(edit, ops.part, late, _axis(node), node.args[2:], total, _lies(node))
            set_argument(total, 1 - at, part)
        set_argument(total, at, made)
        total.meta["val"] = value(node)
        what = f"{label(node)}: {label(early)} alone"
        _replace(edit, node, total)
        return what
    return None


def _shuffled(edit: Editor, nodes: list[fx.Node]) -> list[fx.Node]:
    edit.rng.shuffle(nodes)
    return nodes


def part_of_another_rank(edit: Editor) -> str | None:
    """Take the same part on all ranks, or each rank the part of its neighbour."""
    nodes = [n for n in conversions(edit, ops.part) if n.args[3] == 1]
    if (node := edit.any_of(nodes)) is None:
        return None
    source, _, dim, _, ranks = node.args
    size = value(source).shape[dim] // ranks  # type: ignore[arg-type, index, operator]
    if edit.rng.random() < 0.5:
        args = (source, [size], [dim])
        told = info(_launch(source)).placed  # type: ignore[arg-type]
        whole = _as_call(told, aten.roll.default, (Hole(0), *args[1:]))
        made = _inserted(edit, aten.roll.default, args, node, node, placed=whole)
        set_argument(node, 0, made)
        return f"{label(node)}: rolled by {size}"
    args = (source, dim, 0, size)
    whole = _as_call(info(node).placed, aten.slice.Tensor, (Hole(0), *args[1:]))
    made = _inserted(edit, aten.slice.Tensor, args, node, node, placed=whole)
    node.replace_all_uses_with(made)
    edit.graph.erase_node(node)
    return f"{made.name}: rank 0's on all"


def wrong_rows(edit: Editor) -> str | None:
    """Look ids up among other rows than a rank has."""
    if (node := edit.any_of(edit.find(*OWN_ROWS))) is None:
        return None
    rows: Any = node.args[3]
    new = edit.rng.choice([rows - 1, rows * 2, rows // 2])
    set_argument(node, 3, new)
    return f"{label(node)}: {new} rows for {rows}"


def wrong_joined(edit: Editor) -> str | None:
    """Take another one of several sums, or exchange two."""
    if (node := edit.any_of(edit.find(ops.joined_value))) is None:
        return None
    others = [n for n in edit.find(ops.joined_value) if n.args[0] is node.args[0] and n is not node]
    other = edit.rng.choice(others)
    what = f"{label(node)} as {label(other)}"
    kept = node.args
    set_argument(node, 2, other.args[2])
    if edit.rng.random() < 0.5:
        set_argument(node, 1, other.args[1])
        what += ", both"
    if edit.rng.random() < 0.5:
        set_argument(other, 2, kept[2])
    return what


def sum_another(edit: Editor) -> str | None:
    """Let one of several sums be of another value of its shape."""
    for node in _shuffled(edit, edit.find(ops.reduce_joined)):
        xs: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        at = edit.rng.randrange(len(xs))
        if others := edit.alike(xs[at], node):
            xs[at] = edit.rng.choice(others)
            set_argument(node, 0, xs)
            return f"{label(node)} of {label(xs[at])}"
    return None


def wrong_part(edit: Editor) -> str | None:
    """Let each rank have another part of a parameter than its graph is for."""
    program, team = edit.program, edit.program.plan.parallel.tensor
    found: list[tuple[str, Part]] = []
    for param in program.params.values():
        if param.part is None:
            continue
        for groups in (1, 2, 3, 4):
            other = replace(param.part, cut=replace(param.part.cut, groups=groups))
            if fits(other.shape, other.cut, team) and other != param.part:
                found.append((param.name, other))
    if not found:
        return None
    name, part = edit.rng.choice(found)
    program.params = program.params | {name: replace(program.params[name], part=part)}
    buckets = [
        replace(b, params=tuple(replace(p, part=part) if p.name == name else p for p in b.params))
        for b in program.layout.buckets
    ]
    program.layout = replace(program.layout, buckets=tuple(buckets))
    return f"{name} lies as {part.cut}"


# -- local calls ----------------------------------------------------------------------------------
def wrong_literal(edit: Editor) -> str | None:
    """Change a number in a call on parts; where it stands in the whole call too, there as well."""
    found = []
    for node in edit.compute():
        placed = info(node).placed
        if placed is None or placed.target is None or not isinstance(placed.gives, Cut):
            continue
        for at, given in enumerate(node.args):
            if (type(given) is int and 0 <= given < 1 << 40) or (
                isinstance(given, (list, tuple)) and _numbers(given)
            ):
                found.append((node, at))
    if not found:
        return None
    node, at = edit.rng.choice(found)
    old: Any = node.args[at]
    if type(old) is int:
        new: Any = old - 1 if old else 1  # beyond an end would change nothing
    else:
        new = list(old)
        i, j = edit.rng.randrange(len(new)), edit.rng.randrange(len(new))
        if i == j or new[i] == new[j]:
            return None
        new[i], new[j] = new[j], new[i]
    set_argument(node, at, new)
    placed = info(node).placed
    if edit.rng.random() < 0.5 and placed is not None and placed.args[at] == old:
        told = (*placed.args[:at], new, *placed.args[at + 1 :])
        set_info(node, placed=replace(placed, args=told))
    try:
        args, named = (fx.node.map_arg(given, _on_meta) for given in (node.args, node.kwargs))
        made = node.target(*args, **named)  # type: ignore[operator]
    except (RuntimeError, IndexError, ValueError):
        return None  # no program at all
    if not isinstance(made, Tensor) or not is_same_kind(made, value(node)):
        return None
    return f"{label(node)}: {new} for {old}"


def _on_meta(node: fx.Node) -> Any:
    val = value(node)
    if not isinstance(val, Tensor):
        return val
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="meta")


def _numbers(given: Any) -> bool:
    return len(given) > 1 and all(type(n) is int and n > 0 for n in given)


def retarget_alike(edit: Editor) -> str | None:
    """Let a call read another value that lies as the right one does, and has its shape."""
    nodes = [n for n in edit.compute() if info(n).placed is not None]
    for node in _shuffled(edit, nodes):
        for read in _shuffled(edit, list(node.all_input_nodes)):
            if not isinstance(value(read), Tensor):
                continue
            others = [n for n in edit.alike(read, node) if _all_lie(n) == _all_lie(read)]
            if others:
                other = edit.rng.choice(others)
                node.replace_input_with(read, other)
                return f"{label(node)} reads {label(other)} for {label(read)}"
    return None


def _all_lie(node: fx.Node) -> str:
    return str(info(node).placed)


# -- rings of attention ---------------------------------------------------------------------------
RINGS = (ops.ring_attention, ops.ring_attention_backward)


def _constants_at(node: fx.Node) -> int:
    """Return where an op's axis is: after its tensors, before all other constants."""
    return next(at for at, argument in enumerate(node.args) if isinstance(argument, str))


def other_ring(edit: Editor) -> str | None:
    """Go around other ranks, or attend under another mask or scale."""
    if (node := edit.any_of(edit.find(*RINGS))) is None:
        return None
    at = _constants_at(node) + edit.rng.randrange(4)
    old: Any = node.args[at]
    new: Any = not old if isinstance(old, bool) else "shard" if isinstance(old, str) else 2 * old
    set_argument(node, at, new)
    return f"{label(node)}: {new} for {old} at {at}"


def no_ring(edit: Editor) -> str | None:
    """Let each rank attend to its own keys alone: all other steps are left out."""
    if (node := edit.any_of(edit.find(*RINGS))) is None:
        return None
    what, backward = label(node), node.target is RINGS[1]
    node.target = ops.attention_backward if backward else ops.attention
    at = _constants_at(node)
    node.args = (*node.args[:at], *node.args[at + 2 :])
    return what


def no_mask(edit: Editor) -> str | None:
    """Let a ring attend to what its mask hides."""
    nodes = [n for n in edit.find(*RINGS) if isinstance(n.args[-1], fx.Node)]
    if (node := edit.any_of(nodes)) is None:
        return None
    what = label(node)
    node.args = node.args[:-1]
    return what


def other_rows(edit: Editor) -> str | None:
    """Let a ring read the mask's rows of other queries, or of these for other keys."""
    nodes = [n for n in edit.find(*RINGS) if isinstance(n.args[-1], fx.Node)]
    if (node := edit.any_of(nodes)) is None:
        return None
    mask: Any = node.args[-1]
    dim = edit.rng.choice([2, 3])
    turned = _inserted(edit, aten.flip.default, (mask, [dim]), node, mask)
    set_argument(node, len(node.args) - 1, turned)
    return f"{label(node)}: {label(mask)} turned over along {dim}"


def other_operand(edit: Editor) -> str | None:
    """Let a ring read one of its operands in the place of another, or of another ring's."""
    nodes = edit.find(*RINGS)
    for node in _shuffled(edit, nodes):
        at = edit.rng.randrange(_constants_at(node))
        found = [a for n in nodes for a in n.all_input_nodes if a is not node.args[at]]
        position = edit.positions()
        alike = [
            a for a in found
            if is_same_kind(value(a), value(node.args[at])) and position[a] < position[node]
        ]  # fmt: skip
        if alike:
            set_argument(node, at, other := edit.rng.choice(alike))
            return f"{label(node)} reads {label(other)} at {at}"
    return None


def other_result(edit: Editor) -> str | None:
    """Let readers of one of a ring's gradients read another one."""
    for node in _shuffled(edit, edit.find(RINGS[1])):
        items = {user.args[1]: user for user in node.users}
        first, second = edit.rng.sample([0, 1, 2], 2)
        if first in items and second in items:
            one, other = items[first], items[second]
            if is_same_kind(value(one), value(other)):
                set_argument(one, 1, second)
                return f"{label(node)}: {second} for {first}"
    return None


RING_KINDS = [other_ring, no_ring, other_operand, other_result]
MASK_KINDS = [no_mask, other_rows]


# -- experts that are divided ----------------------------------------------------------------------
def other_owner(edit: Editor) -> str | None:
    """Let a call read rows of another layer, which other ranks own, in the place of its own."""
    nodes = [n for n in edit.graph.nodes if n.op == "call_function" and n.target is not ops.wait]
    for node in _shuffled(edit, nodes):
        for read in _shuffled(edit, list(node.all_input_nodes)):
            lies = _lies(read)
            if not isinstance(lies, Owned):
                continue
            others = [
                n for n in edit.alike(read, node)
                if isinstance(at := _lies(n), Owned) and at.dim == lies.dim and at != lies
            ]  # fmt: skip
            if others:
                node.replace_input_with(read, other := edit.rng.choice(others))
                return f"{label(node)} reads {label(other)} for {label(read)}"
    return None


def other_ends(edit: Editor) -> str | None:
    """Let a product take other rows for those of its experts: one row less of each, or none."""
    if (node := edit.any_of(edit.find(*OF_EXPERTS))) is None:
        return None
    ends: Any = node.args[2]
    target, last = edit.rng.choice([(aten.sub.Tensor, 1), (aten.clamp.default, 2)])
    more = (last,) if target is aten.sub.Tensor else (None, last)
    whole = Placed(R, tuple(value(ends).shape), target, (Hole(0), *more), {})
    made = _inserted(edit, target, (ends, *more), node, ends, placed=whole)
    set_argument(node, 2, made)
    return f"{label(node)}: {target} of {label(ends)}"


def whole_product(edit: Editor) -> str | None:
    """Let a rank multiply all rows by what it has, as if it had all experts."""
    if (node := edit.any_of(edit.find(*OF_EXPERTS))) is None:
        return None
    what, placed = label(node), info(node).placed
    assert placed is not None
    at = _constants_at(node)
    node.target, node.args = placed.target, node.args[:at]
    return what


EXPERT_KINDS = [other_owner, other_ends, whole_product]


# -- what is right --------------------------------------------------------------------------------
def convert_again(edit: Editor) -> str | None:
    """Convert a value a second time for some of its readers."""
    nodes = [n for n in conversions(edit) if len(_end(n).users) > 1]
    if (node := edit.any_of(nodes)) is None:
        return None
    end, again = _end(node), _end(_copied(edit, node))
    for user in list(end.users):
        if edit.rng.random() < 0.5 and edit.is_behind(user, again):
            user.replace_input_with(end, again)
    return f"{label(node)}, read by {len(again.users)}"


def _dims(edit: Editor, node: fx.Node) -> list[int]:
    """Return the dimensions along which a value can be cut over the axis of its conversion."""
    chunks, placed = _chunks(edit, _axis(node)), info(node).placed
    is_over_last = _own(node) is placed
    inner = None if is_over_last or placed is None else placed.gives  # cut further already
    return [
        d for d, size in enumerate(_whole_shape(node))
        if size % chunks == 0 and not (isinstance(inner, Cut) and inner.dim == d)
    ]  # fmt: skip


def in_two_steps(edit: Editor) -> str | None:
    """Sum by a scatter and a gather; swap by a gather and a part; part, gather and part again."""
    for node in _shuffled(edit, conversions(edit)):
        source, target, axis = _of(node), node.target, _axis(node)
        team, dims = _team(edit, axis), _dims(edit, node)
        if not dims:
            continue
        dim = edit.rng.choice(dims)
        middle = (dim, 1, team)
        if target is ops.reduce_values:
            first = _conversion(edit, ops.scatter_values, source, axis, middle, node, Cut(dim))
            last = _conversion(edit, ops.gather_values, first, axis, middle, node, R)
        elif target is ops.swap_values:
            _, _, d, g, to_d, to_g, _ = node.args
            first = _conversion(edit, ops.gather_values, source, axis, (d, g, team), node, R)
            last = _conversion(
                edit, ops.part, first, axis, (to_d, to_g, team), node, Cut(to_d, to_g)
            )  # type: ignore[arg-type]
        elif target is ops.part:
            first = _conversion(edit, ops.part, source, axis, middle, node, Cut(dim))
            whole = _conversion(edit, ops.gather_values, first, axis, middle, node, R)
            last = _conversion(edit, ops.part, whole, axis, node.args[2:], node, _lies(node))
        elif target is ops.scatter_values:
            first = _conversion(edit, ops.reduce_values, source, axis, (), node, R)
            last = _conversion(edit, ops.part, first, axis, node.args[2:], node, _lies(node))
        elif target is not ops.gather_values:
            continue
        else:
            d, g = node.args[2:4]
            others = [e for e in dims if e != d]
            if not others:
                continue
            to = edit.rng.choice(others)
            ends = (d, g, to, 1, team)
            first = _conversion(edit, ops.swap_values, source, axis, ends, node, Cut(to))
            last = _conversion(edit, ops.gather_values, first, axis, (to, 1, team), node, R)
        what = label(node)
        _replace(edit, node, last)
        return f"{what} by {first.name} and {last.name}"
    return None


def _lying(edit: Editor, placed: Placed, axis: str, made: Placed) -> Placed:
    """Return a note over all axes, with the placement that a conversion over one of them makes."""
    if axis == next(reversed(edit.program.plan.parallel.value_axes)):
        return replace(placed, gives=made.gives)
    assert placed.outer is not None and made.outer is not None
    outer = replace(placed.outer, gives=made.outer.gives)
    return replace(placed, gives=made.gives, shape=made.shape, outer=outer)


def reduce_apart(edit: Editor) -> str | None:
    """Sum both summands of a sum, and add what comes of it."""
    for node in _shuffled(edit, conversions(edit, ops.reduce_values, ops.scatter_values)):
        total = _of(node)
        given = list(tensors_of(total))
        is_sum = total.target is aten.add.Tensor and len(given) == 2 and not total.kwargs
        if not is_sum or len(total.users) > 1:
            continue
        for at, summand in enumerate(given):
            if summand in given[:at]:
                continue
            made = _conversion(
                edit, node.target, summand, _axis(node), node.args[2:], total, _lies(node)
            )
            total.replace_input_with(summand, made)
            set_info(made.all_input_nodes[0], placed=info(node).placed)
        placed, after = info(total).placed, info(node).placed
        assert placed is not None and after is not None
        set_info(total, placed=_lying(edit, placed, _axis(node), after))
        total.meta["val"] = value(node)
        what = label(node)
        _replace(edit, node, total)
        return what
    return None


def convert_late(edit: Editor) -> str | None:
    """Let a launch or its wait stand elsewhere between the source and the readers."""
    for node in _shuffled(edit, [edit.rng.choice([n, _end(n)]) for n in conversions(edit)]):
        if gaps := edit.gaps([node]):
            anchor = edit.rng.choice(gaps)
            edit.move([node], anchor)
            return f"{label(node)} before {label(anchor)}"
    return None


def useless_conversion(edit: Editor) -> str | None:
    """Take a part that has no reader, or gather it and read that."""
    found = []
    for node in conversions(edit):
        if _lies(node) == R:
            found += [(node, d) for d in _dims(edit, node)]
    if not found:
        return None
    node, dim = edit.rng.choice(found)
    end = _end(node)
    readers = list(end.users)
    axis = _axis(node)
    more = (dim, 1, _team(edit, axis))
    first = _conversion(edit, ops.part, end, axis, more, end.next, Cut(dim))
    whole = _conversion(edit, ops.gather_values, first, axis, more, first.next, R)
    for user in readers:
        if edit.rng.random() < 0.5 and edit.is_behind(user, whole):
            user.replace_input_with(end, whole)
    return f"{label(node)} along {dim}"


HARMFUL: list[Callable[[Editor], str | None]] = [
    drop_conversion, drop_conversion_once, double_conversion, wrong_axis, wrong_cut,
    other_conversion, swap_sources, scaled_by_world, reduce_early, part_of_another_rank,
    wrong_rows, wrong_part, wrong_joined, sum_another, wrong_literal, retarget_alike,
]  # fmt: skip
HARMLESS: list[Callable[[Editor], str | None]] = [
    convert_again, in_two_steps, reduce_apart, convert_late, useless_conversion,
]  # fmt: skip


# -- telling --------------------------------------------------------------------------------------
class _Telling(_Typing):
    """Writes down how each value lies wherever a rule has a way, whatever was noted before."""

    def _call(self, over: Any, node: fx.Node, call: Any, placed: Placed | None) -> None:
        if placed is None or placed.target is None:
            super()._call(over, node, call, placed)
            return
        tensors = tensors_of(node)
        whole = self._whole(over, node, placed)
        now = tuple(o.now for o in whole.operands)
        for way in ways(whole):
            is_met = all(map(serves, now, way.needs))
            if is_met and _is_local(way, whole, call, tensors):
                placed, note = replace(placed, gives=way.gives), info(node).placed
                is_first = over is self.axes[0]
                set_info(node, placed=placed if is_first else replace(note, outer=placed))  # type: ignore[type-var]
                break
        super()._call(over, node, call, placed)


def tell(program: Planned) -> None:
    """Make what nodes note of how they lie agree with the graph, as far as there is a way."""
    saved: list[Any] = []
    numbering = Numbering(program, ()) if has_owners(program) else None
    for name in (JOINT, FORWARD, BACKWARD):
        if name in program.graphs:
            try:
                saved = _Telling(program, name, saved, _noted, numbering).run()
            except ProgramError:
                return


def told(kind: Callable[[Editor], str | None]) -> Callable[[Editor], str | None]:
    """Return a kind of change after which nodes are told how they lie."""

    def changed(edit: Editor) -> str | None:
        what = kind(edit)
        if what is not None:
            tell(edit.program)
        return what

    changed.__name__ = f"{kind.__name__}_told"
    return changed


PLACED = [*HARMFUL, *map(told, HARMFUL), *HARMLESS]
