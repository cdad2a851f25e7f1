"""Prove a program: what it reads when (order), and that it computes what was captured (dataflow).

Run after every pass and on every load. Only what the facts of a program establish is demanded.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zerofx.errors import ProgramError
from zerofx.ir.facts import Fact
from zerofx.ir.order import Crossing, Order
from zerofx.ir.program import BACKWARD, FORWARD, Program
from zerofx.ir.spec import Kind, kind_of, spec_of
from zerofx.ir.verify_fault import fault, name_of, user_line
from zerofx.ir.verify_shape import check_regions, check_saved, check_synced
from zerofx.ir.verify_values import SHORT, Numbering, Output, args


def verify(program: Program) -> None:
    """Check every invariant of a program.

    Order: a gathered parameter is read between its wait and its release; each launch is waited
    for; each gradient is packed at its own offset and its bucket reduced once, complete, at scale
    1/world_size; buffers in one slot never overlap; nothing saved looks into a gathered buffer
    that goes away. Dataflow: with the zerofx ops erased and recomputed nodes merged, outputs,
    gradients and buffer updates are the expressions that were captured.

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
    check_dataflow(program)


def check_dataflow(program: Program) -> None:
    """Check that a program computes its reference, where it has one."""
    reference = program.reference
    if reference is None:
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
    graph, node, what = _first_difference(program, numbering, made.get(wrong[0]))
    raise fault(
        program,
        graph,
        node,
        f"the program does not compute what was captured: {names} "
        f"{'differs' if len(wrong) == 1 else 'differ'}; {what}",
    )


def _first_difference(
    program: Program, numbering: Numbering, wrong: Output | None
) -> tuple[str, fx.Node, str]:
    """Return the first node whose value the captured graph does not have, else the wrong output."""
    assert program.reference is not None
    known = program.reference.values
    for graph, gm in program.graphs.items():
        for node in gm.graph.nodes:
            made = numbering.of.get(node)
            is_value = kind_of(node) in (None, Kind.VIEW)
            if node.op != "call_function" or not is_value or not node.users:
                continue
            if isinstance(made, str) and made[:SHORT] not in known:
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


def verify_ranks(programs: Sequence[Program]) -> None:
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
