"""Prove a program: what it reads when (order), and that it computes what was captured (dataflow).

Run after every pass and on every load. Only what the facts of a program establish is demanded.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zerofx.errors import ProgramError
from zerofx.ir.facts import Fact
from zerofx.ir.order import Crossing, Order
from zerofx.ir.program import BACKWARD, FORWARD, Planned, Program, Reference
from zerofx.ir.spec import Bounded, Kind, kind_of, spec_of
from zerofx.ir.verify_fault import fault, name_of, user_line
from zerofx.ir.verify_shape import check_regions, check_saved, check_synced
from zerofx.ir.verify_values import SHORT, Numbering, Output, args


def verify(program: Planned) -> None:
    """Check every invariant of a program.

    Order: a gathered parameter is read between its wait and its release; each launch is waited
    for; each gradient is packed at its own offset and its bucket reduced once, complete, at scale
    1/world_size; buffers in one slot never overlap; nothing saved looks into a gathered buffer
    that goes away. Dataflow: with the zerofx ops erased and recomputed nodes merged, outputs,
    gradients and buffer updates are the expressions that were captured. An op that declares an
    error bound is erased like an exact one; `bounds` says which there are, and a plan that asks for
    the captured bits allows none.

    Raises:
        ProgramError: naming the invariant, the parameter, the user's line, with the ten lines of
            the graph (of schedule.py, for a loaded program) around the node.
    """
    crossing = Crossing()
    for name in program.graphs:
        Order(program, name, crossing).check()
        if Fact.REGIONS_CUT in program.facts:
            check_regions(program, name)
    if FORWARD in program.graphs and BACKWARD in program.graphs:
        check_saved(program)
    check_synced(program)
    check_precision(program)
    check_dataflow(program)


def bounds(program: Program) -> dict[str, Bounded]:
    """Return the error that each op of a program declares, those that are exact left out."""
    called = (spec_of(n) for gm in program.graphs.values() for n in gm.graph.nodes)
    found = {spec.name: spec.precision for spec in called if spec is not None}
    return {name: rule for name, rule in found.items() if isinstance(rule, Bounded)}


def check_precision(program: Planned) -> None:
    """Check that no op changes values where the plan asks for the bits that were captured."""
    if program.plan.numerics != "bitwise":
        return
    inexact = bounds(program)
    for graph, gm in program.graphs.items():
        for node in gm.graph.nodes:
            spec = spec_of(node)
            if spec is not None and spec.name in inexact:
                raise fault(
                    program,
                    graph,
                    node,
                    f"{name_of(node)} delivers values {spec.precision}. Plan(numerics='bitwise') "
                    "allows exact ops only. Leave out the pass that inserts it, or choose other "
                    "numerics.",
                )


def check_dataflow(program: Planned) -> None:
    """Check that a program computes its reference, where it has one."""
    reference = program.reference
    if not isinstance(reference, Reference):
        return
    numbering = Numbering(program)
    made = numbering.outputs
    wrong = [
        label
        for label in dict.fromkeys([*reference.outputs, *made])
        if label not in made or made[label].digest != reference.outputs.get(label)
    ]
    if not wrong:
        return
    names = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    graph, node, what = _first_difference(program, reference, numbering, made.get(wrong[0]))
    raise fault(
        program,
        graph,
        node,
        f"the program does not compute what was captured: {names} "
        f"{'differs' if len(wrong) == 1 else 'differ'}; {what}",
    )


def _first_difference(
    program: Planned, reference: Reference, numbering: Numbering, wrong: Output | None
) -> tuple[str, fx.Node, str]:
    """Return the first node whose value the captured graph does not have, else the wrong output."""
    for graph, gm in program.graphs.items():
        for node in gm.graph.nodes:
            made = numbering.of.get(node)
            is_value = kind_of(node) in (None, Kind.VIEW)
            if node.op != "call_function" or not is_value or not node.users:
                continue
            if isinstance(made, str) and made[:SHORT] not in reference.values:
                where = user_line(node)
                note = f"{name_of(node)}{f' ({where})' if where else ''}"
                return graph, node, f"the first value that the captured graph lacks is {note}"
    if wrong is None:
        graph = next(iter(program.graphs))
        return graph, program.graph(graph).output_node(), "nothing computes it"
    return wrong.graph, wrong.node, "each value is a captured one, but in the wrong place"


def communication(program: Program) -> list[tuple[str, str, tuple[object, ...]]]:
    """Return the program's collectives in order: graph, op, and its constant arguments."""
    return [
        (name, node.target.name(), _constants(node))
        for name, gm in program.graphs.items()
        for node in gm.graph.nodes
        if (spec := spec_of(node)) is not None and spec.is_agreed
    ]


def _constants(node: fx.Node) -> tuple[object, ...]:
    if kind_of(node) is Kind.SYNC:
        return (len(args(node)[0]),)
    return tuple(a for a in args(node) if not isinstance(a, fx.Node))


def verify_ranks(programs: Sequence[Planned]) -> None:
    """Check the programs of all ranks, and that they launch the same collectives in one order.

    Raises:
        ProgramError: naming the first rank and call that differ from rank 0's.
    """
    for program in programs:
        verify(program)
    first = communication(programs[0])
    for rank, program in enumerate(programs):
        mine = communication(program)
        for i in range(max(len(first), len(mine))):
            ours, theirs = (c[i] if i < len(c) else None for c in (mine, first))
            if ours != theirs:
                raise ProgramError(
                    f"rank {rank} would launch {_call(ours)} as its collective {i + 1}, rank 0 "
                    f"{_call(theirs)}: they would wait for each other for ever; run one program "
                    "on all ranks"
                )


def _call(call: tuple[str, str, tuple[object, ...]] | None) -> str:
    if call is None:
        return "nothing"
    graph, op, arguments = call
    return f"{op.removeprefix('zerofx::')}{arguments} in {graph}"
