"""Attention as one op, whole (`attention`) and around a ring of ranks (`ring_attention`).

The pass `open-attention` inserts the whole ops, which take keys with fewer heads than queries and
know a causal mask by name, while any other mask is an operand; the reference of the proof is taken
after it. The pass `place` replaces
a whole op by the op of the ring if queries, keys and values are cut along the sequence. A call of
the ring has the digest of the whole call that its node records, and `ir.placing` accepts it only
with that call's arguments and with all operands cut along the sequence.

A call sends and receives inside: it is launched and waited for as one, between regions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Category, Storage
from zerofx.analysis.time.tasks import Price, Walk
from zerofx.codegen.schedule import write_unpacked
from zerofx.ir.graphs import call
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.order import Order
from zerofx.ir.program import Planned
from zerofx.ir.spec import Carries, Kind, Lane, OpSpec, Payload, define
from zerofx.ir.verify_values import Numbering
from zerofx.layout.buckets import CONTEXT
from zerofx.policy import ring as policy
from zerofx.runtime import ring


def _operands(node: fx.Node, is_backward: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, as a node reads them."""
    first = 1 if is_backward else 0
    q, k, v = (value(n) for n in node.args[first : first + 3])  # type: ignore[arg-type]
    return q, k, v


def _constants(node: fx.Node) -> tuple[Any, ...]:
    return tuple(a for a in node.args if not isinstance(a, fx.Node))


def _mask(node: fx.Node) -> fx.Node | None:
    """Return the mask that a node reads, which is its last argument if it has one."""
    last = node.args[-1]
    return last if isinstance(last, fx.Node) else None


# -- time -----------------------------------------------------------------------------------------
def _price(w: Walk, node: fx.Node, is_backward: bool, block: policy.Block) -> Price:
    """Price one block as a region of torch's operator on its shapes."""
    q, k, v = _operands(node, is_backward)
    rows, columns = (end - start for start, end in (block.rows, block.columns))
    graph = fx.Graph()

    def given(name: str, like: Tensor, *shape: int) -> fx.Node:
        made = graph.placeholder(name)
        made.meta["val"] = like.new_empty(shape)
        return made

    heads = q.shape[:2]
    queries = given("q", q, *heads, rows, q.shape[3])
    keys, values = (given(n, x, *heads, columns, x.shape[3]) for n, x in (("k", k), ("v", v)))
    aten = torch.ops.aten
    if is_backward:
        grad, out = (given(n, v, *heads, rows, v.shape[3]) for n in ("grad", "out"))
        lse = given("lse", q.new_empty((), dtype=torch.float32), *heads, rows)
        args = (grad, queries, keys, values, out, lse, 0.0, block.is_causal)
        target: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    else:
        args = (queries, keys, values, 0.0, block.is_causal)  # type: ignore[assignment]
        target = aten._scaled_dot_product_flash_attention_for_cpu.default
    return w.found.prices.region([call(graph, target, args)])


def _task_ring(is_backward: bool) -> Any:
    """Return the tasks of a call: each transfer beside the block before the one that needs it."""

    def task(w: Walk, node: fx.Node) -> None:
        mesh = w.layout.mesh
        q, k, v = _operands(node, is_backward)
        *_, ranks, causal, _ = _constants(node)
        numel = policy.message_numel(k.shape, v.shape)
        steps = policy.blocks(0, ranks, q.shape[2], k.shape[2], causal)
        stride, where = mesh.stride(CONTEXT), info(node)

        def sends(what: str, itemsize: int, needs: list[int]) -> int:
            # as an all-gather of two: each sends one message, and receives one
            size = 2 * numel * itemsize
            price = w.found.prices.exchange("all_gather", size, 2, stride)
            beside = w.found.prices.beside("all_gather", size, 2)
            name = f"{what} v{where.index}"
            return w.found.sends(Lane.VALUES, name, price, beside, where, needs, CONTEXT)

        def attends(step: int) -> int:
            name = f"attention v{where.index} block {step}"
            price = _price(w, node, is_backward, steps[step])
            return w.found.computes("region", name, price, where)

        item = q.element_size()
        arrives = sends("RING", item, w.data(node))
        done = attends(0)
        sums: int | None = None
        for step in range(1, ranks):
            w.found.ended.add(arrives)
            if step + 1 < ranks:
                arrives = sends("RING", item, [arrives])
            done = attends(step)
            if is_backward:
                sums = sends("RING grads", max(item, 4), [done])
        if sums is not None:
            w.found.ended.add(sums)

    return task


def _task_whole(is_backward: bool) -> Any:
    def task(w: Walk, node: fx.Node) -> None:
        q, k, _ = _operands(node, is_backward)
        causal, _ = _constants(node)
        (block,) = policy.blocks(0, 1, q.shape[2], k.shape[2], causal)
        price = _price(w, node, is_backward, block)
        w.found.computes("region", f"attention {node.name}", price, info(node))

    return task


def _sends(is_backward: bool) -> Any:
    """Return one payload per message."""

    def sends(program: Planned, node: fx.Node, rank: int) -> list[Payload]:
        q, k, v = _operands(node, is_backward)
        *_, ranks, _, _ = _constants(node)
        numel, item = policy.message_numel(k.shape, v.shape), q.element_size()
        found = [Payload("send", numel * item, item)] * (ranks - 1)
        if is_backward:
            found += [Payload("send", numel * max(item, 4), max(item, 4))] * (ranks - 1)
        return found

    return sends


# -- memory ---------------------------------------------------------------------------------------
def _hold(is_backward: bool) -> Any:
    def hold(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
        """Return the results, and record what exists during the call alone."""
        q, k, v = _operands(node, is_backward)
        *_, ranks, causal, _ = _constants(node)
        inside = ring.inside_backward_bytes if is_backward else ring.inside_bytes
        mask = _mask(node)
        size = inside(q, k, v, ranks, causal, None if mask is None else value(mask))
        name = f"inside {node.name}"
        p.storages.append(Storage(Category.COMMUNICATION, size, name, time, time, info(node)))
        return tuple(p.own(node, p.category(node), v, time)[0] for v in value(node))

    return hold


# -- proof ----------------------------------------------------------------------------------------
def _order(o: Order, node: fx.Node) -> None:
    """Do nothing: a call has no effect on memory beyond its results."""


def _order_ring(o: Order, node: fx.Node) -> None:
    """Check that the steps of all ranks together are attention over the whole sequence."""
    *_, ranks, causal, _ = _constants(node)
    if fault := policy.fault_of(ranks, causal):
        o.fail(node, f"{node.name} goes around {ranks} ranks, and of their chunks {fault}.")


def _erase(numbering: Numbering, node: fx.Node) -> Any:
    return numbering.whole_call(node)


def _define(schema: str, fake: Any, runtime: Any, is_backward: bool, **more: Any) -> Any:
    return define(
        OpSpec(
            schema=schema,
            carries=Carries.VALUE,
            fake=fake,
            run=lambda calls, *args: runtime(calls.engine, *args),
            runtime=runtime,
            adds=lambda node: nbytes(value(node)),
            write=write_unpacked,
            erase=_erase,
            **more,
        )
    )


_FORWARD = "Tensor q, Tensor k, Tensor v"
_BACKWARD = "Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_RING = "str axis, int ranks, "
_HOW = "bool causal, float scale, Tensor? mask=None"

attention = _define(
    f"attention({_FORWARD}, {_HOW}) -> (Tensor, Tensor)",
    ring.attend, ring.attention, False, kind=Kind.MAKE, task=_task_whole(False), order=_order,
)  # fmt: skip
attention_backward = _define(
    f"attention_backward({_BACKWARD}, {_HOW}) -> (Tensor, Tensor, Tensor)",
    ring.attend_backward, ring.attention_backward, True,
    kind=Kind.MAKE, task=_task_whole(True), order=_order,
)  # fmt: skip


def _define_ring(schema: str, fake: Any, runtime: Any, is_backward: bool, means: str) -> Any:
    return _define(
        schema, fake, runtime, is_backward,
        kind=Kind.SYNC,
        axis=CONTEXT,
        lane=Lane.VALUES,
        verb="RING grads" if is_backward else "RING",
        means=means,
        task=_task_ring(is_backward),
        sends=_sends(is_backward),
        order=_order_ring,
        hold=_hold(is_backward),
    )  # fmt: skip


ring_attention = _define_ring(
    f"ring_attention({_FORWARD}, {_RING}{_HOW}) -> (Tensor, Tensor)",
    lambda q, k, v, axis, ranks, causal, scale, mask=None: ring.attend(q, k, v, causal, scale),
    ring.ring_attention, False, "keys and values travel from rank to rank, and are attended to",
)  # fmt: skip
ring_attention_backward = _define_ring(
    f"ring_attention_backward({_BACKWARD}, {_RING}{_HOW}) -> (Tensor, Tensor, Tensor)",
    lambda grad, q, k, v, out, lse, axis, ranks, causal, scale, mask=None: ring.attend_backward(
        grad, q, k, v, out, lse, causal, scale
    ),
    ring.ring_attention_backward, True, "keys, values and their gradients travel likewise",
)  # fmt: skip
