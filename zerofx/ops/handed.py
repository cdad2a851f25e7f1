"""Gradients that no other rank shares: each becomes p.grad in the memory in which it is computed.

A bucket exists so that one collective reduces several gradients. A rank without other data ranks
reduces nothing, so packing would only copy. What is summed over a tensor axis is summed before.
`hand_over` makes the computed tensors themselves p.grad, as autograd does, or adds them to the
p.grad of an earlier backward. A gradient whose memory has another reader is copied: the op lists
it, and the proof demands that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from zerofx.analysis.memory.places import Places
from zerofx.analysis.memory.storage import Category, Storage, span_bytes
from zerofx.analysis.time.tasks import Walk
from zerofx.codegen.load_calls import Calls
from zerofx.codegen.schedule import Function
from zerofx.codegen.text import wrap_list
from zerofx.ir.graphs import alias_source, is_compute, users_after_views
from zerofx.ir.meta import info, nbytes, value
from zerofx.ir.order import Buffer, Order
from zerofx.ir.spec import Carries, Holds, Kind, OpSpec, define, gradients_of
from zerofx.ir.verify_fault import name_of
from zerofx.ir.verify_values import Numbering, Packed
from zerofx.ops.gathers import is_lasting
from zerofx.ops.gradients import check_gradient
from zerofx.policy import reduction


# -- which memory becomes p.grad ------------------------------------------------------------------
def copied_of(grads: Sequence[fx.Node]) -> list[int]:
    """Return the positions of the gradients that must be copied to become p.grad."""
    return [position for position, grad in enumerate(grads) if not _is_own(grad)]


def _is_own(grad: fx.Node) -> bool:
    """Return whether a gradient fills memory that compute has made for it, and nothing else keeps.

    Memory of several gradients, or of a result that backward returns, is copied for each of them.
    """
    val, source = value(grad), alias_source(grad)
    if not is_compute(source) or not val.is_contiguous():
        return False
    if span_bytes(value(source)) != nbytes(val):
        return False
    takers = 0
    for reader in {*users_after_views(source)}:
        if reader.op == "output":
            return False
        takers += sum(alias_source(taken) is source for taken, _ in gradients_of(reader))
    return takers == 1


# -- what torch needs -----------------------------------------------------------------------------
def _fake(
    grads: Sequence[Tensor], offsets: Sequence[int], numel: int, bucket: int, copied: Sequence[int]
) -> Tensor:
    return grads[0].new_empty(numel)


def _run(
    calls: Any, grads: Sequence[Tensor], offsets: Sequence[int], numel: int, bucket: int,
    copied: Sequence[int],
) -> Tensor:  # fmt: skip
    members = calls.engine.layout.buckets[bucket].params
    places = {p.offset: i for i, p in enumerate(members)}
    calls.engine.hand_over(bucket, tuple(places[o] for o in offsets), grads, tuple(copied))
    return grads[0].new_empty(numel)


# -- code -----------------------------------------------------------------------------------------
def _write(w: Function, node: fx.Node) -> tuple[str, ...]:
    grads: Any
    offsets: Any
    bucket: Any
    copied: Any
    grads, offsets, _, bucket, copied = node.args
    places = {p.offset: i for i, p in enumerate(w.program.layout.buckets[bucket].params)}
    positions = tuple(places[o] for o in offsets)
    head = f"rt.hand_over({bucket}, {positions}, "
    rest = f", copied={tuple(copied)}" if copied else ""
    return (f"{head}{wrap_list([w.bind(g) for g in grads], len(head) + 5)}{rest})",)


def _read(
    r: Calls,
    bucket: int,
    params: tuple[int, ...],
    grads: Sequence[Tensor],
    copied: tuple[int, ...] = (),
) -> None:
    b = r.bucket(bucket)
    offsets = [p.offset for p in r.members(bucket, params)]
    given = [r.value(g, "a gradient") for g in grads]
    arguments = given, offsets, b.numel, bucket, list(copied)
    r.stored[bucket] = r.append(hand_over, *arguments, **r.of_bucket(b))


# -- time and memory ------------------------------------------------------------------------------
def _task(w: Walk, node: fx.Node) -> None:
    bucket, copied = w.bucket(node), _copied(node)
    sizes = [nbytes(value(grad)) for grad, _ in gradients_of(node)]
    adds = w.found.micro > 0
    moved = 3 * sum(sizes) if adds else 2 * sum(sizes[position] for position in copied)
    if moved:
        price = w.found.prices.touch(moved)
        w.found.computes("store", f"store b{bucket.index}", price, info(node))
    w.stored[bucket.index] = w.found.compute


def _hold(p: Places, node: fx.Node, time: int) -> tuple[Storage, ...]:
    """Let gradients stay to the end of the step, unless they are added to those of an earlier one.

    `standing` counts the earlier ones.
    """
    if p.packs_apart:
        return ()
    for position, (grad, _) in enumerate(gradients_of(node)):
        held = p.held[grad]
        if position in _copied(node):
            held = p.own(node, Category.GRADIENTS, value(grad), time)
        for storage in held:
            storage.category, storage.name = Category.GRADIENTS, "p.grad"
        p.forever += held
    return ()


def _copied(node: fx.Node) -> Sequence[int]:
    copied: Any = node.args[4]
    return copied  # type: ignore[no-any-return]


# -- proof ----------------------------------------------------------------------------------------
def _order(o: Order, node: fx.Node) -> None:
    bucket = o.bucket(node)
    label = f"bucket {bucket.index} ({bucket.label()})"
    if not reduction.hands_over(o.layout, o.program.plan, bucket):
        o.fail(
            node,
            f"{node.name} hands over gradients of {label}, which the plan keeps in one buffer. "
            "Pack and reduce them.",
        )
    if bucket.index in o.reduced:
        first = o.reduced[bucket.index].made.name
        o.fail(node, f"{label} gets its gradients twice: by {first} and by {node.name}.")
    o.numel(node, bucket.numel, label)
    o.dtype(node, bucket.dtype, f"a gradient of {label}")
    made = Buffer(Holds.REDUCED, node, bucket.index)
    taken = gradients_of(node)
    if len(taken) != len(node.args[1]):  # type: ignore[arg-type]
        o.fail(node, f"{node.name} gives {len(taken)} gradients at {node.args[1]}.")
    for grad, offset in taken:
        check_gradient(o, node, made, bucket, grad, offset)
    expected = (o.expected or {}).get(bucket.index, {})
    if missing := [p.name for offset, p in expected.items() if offset not in made.packed]:
        o.fail(
            node, f"{node.name} leaves out the gradient of {missing[0]}. Hand over all of {label}."
        )
    for position in copied_of([grad for grad, _ in taken]):
        if position not in _copied(node):
            o.fail(
                node,
                f"{node.name} hands over {name_of(taken[position][0])}, whose memory is not the "
                f"gradient's alone. Add {position} to `copied`.",
            )
    made.stored = node
    o.reduced[bucket.index] = made


def _erase(numbering: Numbering, node: fx.Node) -> Any:
    bucket: Any = node.args[3]
    packed = Packed(bucket)
    for grad, offset in gradients_of(node):
        packed.contents[offset] = (str(numbering.of[grad]), node)
    numbering.give(node, packed)
    return packed


hand_over = define(
    OpSpec(
        schema="hand_over(Tensor[] grads, int[] offsets, int numel, int bucket, int[] copied) "
        "-> Tensor",
        kind=Kind.STORE,
        carries=Carries.GRADIENTS,
        bucket=3,
        gradients=0,
        in_backward=True,
        fake=_fake,
        run=_run,
        has_effect=True,
        task=_task,
        hold=_hold,
        is_static=is_lasting,
        is_quiet=True,
        stem="stored",
        write=_write,
        read=_read,
        order=_order,
        erase=_erase,
    )
)
