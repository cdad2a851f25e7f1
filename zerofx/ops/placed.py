"""Conversions: change the placement of a value that is sharded, or is a partial sum.

        reduce_values    P -> R      the sum, on all ranks of the axis
        reduce_joined    P -> R      the sums of several values, in one message
        scatter_values   P -> S      the sum, one part per rank
        gather_values    S -> R      all parts, on all ranks
        swap_values      S -> S      sharded along another dimension
        part             R -> S      this rank's part: local
        summand          R -> P      the value on the first rank, zeros on the others: local
        padded           S -> P      this rank's part with zeros around it: local

The logical value does not change. The proof therefore erases conversions, and checks that each one
fits its argument's placement. Parts are `layout.placements.Cut`s, written as (dim, groups).

A conversion that communicates is a launch, completed by a wait. The pass `place` inserts launches
only; `overlap-values` adds the waits, and from then on only the result of the wait may be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Category, Storage
from zerofx.analysis.time.tasks import Walk
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.names import op_stem
from zerofx.ir.order import Buffer, Order
from zerofx.ir.program import Fact, Planned
from zerofx.ir.spec import (
    Carries,
    Holds,
    Kind,
    Lane,
    OpSpec,
    Payload,
    define,
    kind_of,
    launch_of,
    launched,
    spec_of,
)
from zerofx.ir.text import identifier
from zerofx.ir.verify_fault import name_of
from zerofx.ir.verify_values import Numbering, args
from zerofx.layout.buckets import Mesh
from zerofx.layout.placements import (
    Cut,
    P,
    R,
    fits,
    is_dense,
    leads,
    local_shape,
    serves,
    strides_like,
)
from zerofx.ops.waits import end_once, hold_at_source, same
from zerofx.policy import exchange
from zerofx.policy.exchange import Receives
from zerofx.runtime import placed


def _like(x: Tensor, shape: list[int]) -> Tensor:
    return x.new_empty_strided(shape, strides_like(x, shape))


def _cut(x: Tensor, dim: int, groups: int, ranks: int) -> Tensor:
    return _like(x, local_shape(x.shape, Cut(dim, groups), ranks))


def _joined(x: Tensor, dim: int, ranks: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= ranks
    return _like(x, shape)


# -- time and bytes -------------------------------------------------------------------------------
def _whole_bytes(node: fx.Node) -> int:
    return max(nbytes(value(node)), nbytes(value(node.all_input_nodes[0])))


def _takes(kind: str) -> Any:
    def task(w: Walk, node: fx.Node) -> None:
        axis: Any = node.args[1]
        if copied := _copied_bytes(w.layout.mesh, node, kind):
            price = w.found.prices.touch(2 * copied)
            w.found.computes("pack", f"pack {w.label(node)}", price, info(node))
        w.collective(node, kind, _whole_bytes(node), axis)

    return task


def _copied_bytes(mesh: Mesh, node: fx.Node, kind: str) -> int:
    """Return the bytes that are copied to be sent: several values, or one in another order."""
    given = node.all_input_nodes
    size = sum(nbytes(value(x)) for x in given)
    if len(given) > 1 or kind == "all_to_all":
        return size
    is_copied = not is_dense(value(given[0]))
    return size if is_copied or (kind == "reduce_scatter" and not _leads(mesh, node)) else 0


def _finishes(kind: str) -> Any:
    """Return the tasks of a wait: the sum of what has arrived, or its copy into the whole value."""

    def finishes(w: Walk, node: fx.Node) -> None:
        axis: Any = node.args[1]
        mesh, size = w.layout.mesh, nbytes(value(node))
        ranks = mesh.along(axis)
        if kind == "all_reduce":  # two ranks swap whole values
            w.arrive(node, size if ranks == 2 else size // ranks, ranks)
        elif kind == "reduce_scatter":
            w.arrive(node, size, ranks)
        elif kind == "all_to_all" or not _leads(mesh, node):
            price = w.found.prices.touch(2 * size)
            w.found.computes("store", f"join {w.label(node)}", price, info(node))

    return finishes


def _leads(mesh: Mesh, node: fx.Node) -> bool:
    """Return whether parts follow each other in memory, so that a transfer needs no copy."""
    return leads(value(node.all_input_nodes[0]), _cut_of(node), mesh.is_zigzag(args(node)[1]))


def _sends(kind: str) -> Any:
    def sends(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
        axis: Any = node.args[1]
        mesh, x = program.layout.mesh, value(node)
        ranks = mesh.along(axis)
        if kind == "all_reduce":
            numel = exchange.all_reduce_sent(x.numel(), mesh.position(axis, rank), ranks)
        elif kind == "all_gather":
            numel = exchange.part_sent(x.numel() // ranks, ranks)
        elif kind == "reduce_scatter":
            numel = exchange.part_sent(x.numel(), ranks)
        else:
            numel = exchange.part_sent(x.numel() // ranks, ranks)
        return [Payload(kind, numel * x.element_size(), x.element_size(), axis)]

    return sends


def _task_part(w: Walk, node: fx.Node) -> None:
    w.found.computes("store", f"part {node.name}", w.found.prices.touch(2 * nbytes(value(node))))


# -- memory: as `runtime.placed` allocates what is sent, received and delivered -------------------
def _ends(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if kind_of(user) is Kind.WAIT]


def _delivered(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    return p.own(node, p.category((_ends(node) or [node])[0]), value(node), time)


def _sent(p: Places, node: fx.Node, time: int, is_ordered: bool = False) -> tuple[Storage, ...]:
    """Return the storage that is sent: the value itself, a dense copy, or a copy in rank order."""
    (given,) = node.all_input_nodes
    x = value(given)
    if not is_ordered and is_dense(x):
        return p.held[given]
    copy = x.new_empty(x.shape)
    return p.own(node, Category.COMMUNICATION, copy, time, name=f"sent by {node.name}")


def _hold_reduced(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    return _delivered(p, node, time) + _sent(p, node, time)


def _hold_joined(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    return _delivered(p, node, time)  # summed in the buffer that joins the summands


def _hold_scattered(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    return _delivered(p, node, time) + _sent(p, node, time, not _lands_in_place(p, node))


def _hold_gathered(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    lands = _delivered if _lands_in_place(p, node) else _landing
    return lands(p, node, time) + _sent(p, node, time)


def _hold_swapped(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    return _landing(p, node, time) + _sent(p, node, time, is_ordered=True)


def _landing(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the receive buffer; the assembled result is allocated at the wait."""
    landed = value(node).new_empty(value(node).shape)
    made = p.own(node, Category.COMMUNICATION, landed, time, name=f"received by {node.name}")
    return made if _ends(node) else _delivered(p, node, time) + made


def _lands_in_place(p: Places, node: fx.Node) -> bool:
    return _leads(p.program.layout.mesh, node)


def _cut_of(node: fx.Node) -> Cut:
    _, _, dim, groups, *_ = args(node)
    return Cut(dim, groups)


def _arrive_gathered(p: Places, wait: fx.Node, time: int) -> tuple[Storage, ...]:
    arrive = hold_at_source if _lands_in_place(p, launch_of(wait)) else _arrive_apart
    return arrive(p, wait, time)


def _arrive_apart(p: Places, wait: fx.Node, time: int) -> tuple[Storage, ...]:
    """Return the whole value, allocated after the transfer and filled from its buffer."""
    for storage in p.held[launch_of(wait)][1:]:
        storage.death = min(storage.death, time - 1)  # unless something reads it later
    return p.own(wait, p.category(wait), value(wait), time)


def _receives(kind: str) -> Any:
    def receives(node: fx.Node, ranks: int, is_native: Callable[[int], bool]) -> Receives:
        made = value(node)
        if kind == "all_reduce":
            return exchange.all_reduce_receives(made.numel(), 0, ranks)
        if kind == "reduce_scatter":
            full_bytes = nbytes(made) * ranks
            return exchange.reduce_scatter_receives(made.numel(), ranks, is_native(full_bytes))
        return Receives(())

    return receives


# -- proof ----------------------------------------------------------------------------------------
def _order_local(o: Order, node: fx.Node) -> None:
    """Do nothing: only placements need to be checked, see `ir.placing`."""


def _order(o: Order, node: fx.Node) -> None:
    """Record the transfer once waits are in the graph; its inputs must stay until the wait."""
    if not {Fact.VALUES_AWAITED, Fact.REGIONS_CUT} & o.program.facts:
        return
    made = Buffer(Holds.CONVERTED, node, landed=False)
    for given in node.all_input_nodes:
        for buffer in o.roots[given]:
            buffer.sent.append(made)
    o.add(node, made)


def _order_joined_value(o: Order, node: fx.Node) -> None:
    flat, number, offset, shape = args(node)
    xs = args(launch_of(flat))[0] if launched(flat) is not None else None
    if not isinstance(xs, (list, tuple)) or not 0 <= number < len(xs):
        o.fail(node, f"{node.name} takes value {number} of {name_of(flat)}, which has none.")
    before = sum(value(x).numel() for x in xs[:number])
    if offset != before or list(shape) != list(value(xs[number]).shape):
        o.fail(
            node,
            f"{node.name} takes {list(shape)} at {offset} for {name_of(xs[number])}, which is "
            f"{list(value(xs[number]).shape)} at {before}.",
        )
    o.roots.follow(node)


def _erase_joined(numbering: Numbering, node: fx.Node) -> Any:
    return [numbering.of[x] for x in args(node)[0]]


def _lies_joined(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    return R if all(serves(each, P) for each in now) else "it takes summands"


def _lies_joined_value(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    return R if now == R else "it takes a sum"


def _needs_summands(now: Any) -> str:
    return "" if serves(now, P) else "it takes summands"


def _lies_reduced(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    return _needs_summands(now) or R


def _lies_scattered(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    return _needs_summands(now) or _lies_cut(shape, more, ranks)


def _lies_gathered(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    dim, groups, over = more
    cut = Cut(dim, groups)
    return R if now == cut and over == ranks else f"it gathers placement {cut} over {over} ranks"


def _lies_swapped(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    dim, groups, *to = more
    cut = Cut(dim, groups)
    if dim == to[0]:
        return f"it swaps dimension {dim} for itself"
    return _lies_cut(shape, to, ranks) if now == cut else f"it swaps placement {cut}"


def _lies_part(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    return _lies_cut(shape, more, ranks) if now == R else "it takes a part of a whole value"


def _lies_summand(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    return P if now == R else "it makes summands of what is whole"


def _lies_padded(now: Any, shape: Any, more: Any, ranks: int) -> Any:
    dim, groups, over = more
    cut = Cut(dim, groups)
    return P if now == cut and over == ranks else f"it pads what lies as {cut} over {over} ranks"


def _lies_cut(shape: Any, more: Any, ranks: int) -> Any:
    dim, groups, over = more
    cut = Cut(dim, groups)
    is_right = over == ranks and fits(shape, cut, ranks)
    return cut if is_right else f"{list(shape)} cannot be cut as {cut} over {over} ranks"


def _arrived(word: str) -> Any:
    """Return the naming rule of a wait's result: from the sent value and the kind of conversion."""

    def name(wait: fx.Node) -> str:
        sent, unit = launch_of(wait).all_input_nodes[0], info(wait).unit
        stem = (op_stem(sent) if spec_of(sent) is not None else "") or sent.name
        return identifier(f"{unit}_{stem}_{word}" if unit and spec_of(sent) is None else stem)

    return name


def _define(
    schema: str, fake: Any, runtime: Any, lies: Any, kind: str, verb: str, means: str, word: str,
    hold: Any, arrive: Any = hold_at_source, erase: Any = same,
) -> Any:  # fmt: skip
    return define(
        OpSpec(
            schema=schema,
            kind=Kind.LAUNCH,
            carries=Carries.VALUE,
            axis="tensor",
            fake=fake,
            run=lambda calls, *args: calls.moved(runtime(calls.engine, *args)),
            runtime=runtime,
            lane=Lane.VALUES,
            verb=verb,
            means=means,
            task=_takes(kind),
            finishes=_finishes(kind),
            sends=_sends(kind),
            receives=_receives(kind),
            hold=hold,
            arrive=arrive,
            adds=lambda node: nbytes(value(node)),
            stem=word,
            arrives_as=_arrived(word),
            lies=lies,
            order=_order,
            end=end_once,
            erase=erase,
        )
    )


# -- the ops --------------------------------------------------------------------------------------
reduce_values = _define(
    "reduce_values(Tensor x, str axis) -> Tensor",
    lambda x, axis: _like(x, list(x.shape)),
    placed.reduce_values, _lies_reduced, "all_reduce", "AR values", "all-reduce of a value",
    "sum", _hold_reduced,
)  # fmt: skip
reduce_joined = _define(
    "reduce_joined(Tensor[] xs, str axis) -> Tensor",
    lambda xs, axis: xs[0].new_empty(sum(x.numel() for x in xs)),
    placed.reduce_joined, _lies_joined, "all_reduce", "AR values", "all-reduce of a value",
    "sums", _hold_joined, erase=_erase_joined,
)  # fmt: skip
joined_value = define(
    OpSpec(
        schema="joined_value(Tensor(a) flat, int number, int offset, int[] shape) -> Tensor(a)",
        kind=Kind.MAKE,
        carries=Carries.VALUE,
        fake=lambda flat, number, offset, shape: placed.joined_value(
            None, flat, number, offset, shape
        ),
        run=lambda calls, *args: placed.joined_value(calls.engine, *args),
        runtime=placed.joined_value,
        lies=_lies_joined_value,
        order=_order_joined_value,
        erase=lambda numbering, node: numbering.of[args(node)[0]][args(node)[1]],
    )
)
scatter_values = _define(
    "scatter_values(Tensor x, str axis, int dim, int groups, int ranks) -> Tensor",
    lambda x, axis, dim, groups, ranks: _cut(x, dim, groups, ranks),
    placed.scatter_values, _lies_scattered, "reduce_scatter", "RS values",
    "reduce-scatter of a value", "part", _hold_scattered,
)  # fmt: skip
gather_values = _define(
    "gather_values(Tensor x, str axis, int dim, int groups, int ranks) -> Tensor",
    lambda x, axis, dim, groups, ranks: _joined(x, dim, ranks),
    placed.gather_values, _lies_gathered, "all_gather", "AG values", "all-gather of a value",
    "whole", _hold_gathered, _arrive_gathered,
)  # fmt: skip
swap_values = _define(
    "swap_values(Tensor x, str axis, int dim, int groups, int to_dim, int to_groups, int ranks) "
    "-> Tensor",
    lambda x, axis, dim, groups, to_dim, to_groups, ranks: _cut(
        _joined(x, dim, ranks), to_dim, to_groups, ranks
    ),
    placed.swap_values, _lies_swapped, "all_to_all", "A2A values", "all-to-all of a value",
    "swapped", _hold_swapped, _arrive_apart,
)  # fmt: skip


def _apart(schema: str, fake: Any, runtime: Any, lies: Any, method: str = "") -> Any:
    """Define a conversion that sends nothing."""
    return define(
        OpSpec(
            schema=schema,
            kind=Kind.MAKE,
            carries=Carries.VALUE,
            fake=fake,
            run=lambda calls, *args: runtime(calls.engine, *args),
            method=method,
            runtime=runtime,
            task=_task_part,
            adds=lambda node: nbytes(value(node)),
            lies=lies,
            order=_order_local,
            erase=same,
        )
    )


part = _apart(
    "part(Tensor x, str axis, int dim, int groups, int ranks) -> Tensor",
    lambda x, axis, dim, groups, ranks: _cut(x, dim, groups, ranks),
    placed.part_of, _lies_part, "part_of",
)  # fmt: skip
summand = _apart(
    "summand(Tensor x, str axis) -> Tensor", lambda x, axis: _like(x, list(x.shape)),
    placed.summand, _lies_summand,
)  # fmt: skip
padded = _apart(
    "padded(Tensor x, str axis, int dim, int groups, int ranks) -> Tensor",
    lambda x, axis, dim, groups, ranks: _joined(x, dim, ranks), placed.padded, _lies_padded,
)  # fmt: skip


def _local(schema: str, fake: Any, runtime: Any) -> Any:
    """Define an op that computes a rank's part locally: its proof is that of the whole call."""
    return define(
        OpSpec(
            schema=schema,
            kind=Kind.MAKE,
            carries=Carries.VALUE,
            fake=fake,
            run=lambda calls, *args: runtime(calls.engine, *args),
            runtime=runtime,
            task=_task_part,
            adds=lambda node: nbytes(value(node)),
            order=_order_local,
            erase=lambda numbering, node: numbering.whole_call(node),
        )
    )


embedding_rows = _local(
    "embedding_rows(Tensor table, Tensor ids, str axis, int rows) -> Tensor",
    lambda table, ids, axis, rows: table.new_empty((*ids.shape, table.shape[1])),
    placed.embedding_rows,
)
embedding_rows_backward = _local(
    "embedding_rows_backward(Tensor grad, Tensor ids, str axis, int rows, int padding) -> Tensor",
    lambda grad, ids, axis, rows, padding: grad.new_empty((rows, grad.shape[-1])),
    placed.embedding_rows_backward,
)
CONVERSIONS = frozenset(
    {reduce_values, scatter_values, gather_values, swap_values, part, summand, padded}
)
