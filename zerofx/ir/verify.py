"""Verification: prove the order of a program's reads, and that it computes what was captured.

It runs after every pass and on every load. It demands only what the facts of a program establish.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerofx.errors import ProgramError, as_sentence
from zerofx.ir.graphs import is_compute, pause_of, root_producer
from zerofx.ir.meta import OutputInfo, Role, info, value
from zerofx.ir.order import Crossing, Order
from zerofx.ir.placing import check_placed
from zerofx.ir.program import BACKWARD, FORWARD, JOINT, Fact, Planned, Program, Reference, Sum
from zerofx.ir.spec import Bounded, Capped, Kind, kind_of, spec_of
from zerofx.ir.text import few
from zerofx.ir.verify_fault import fault, name_of, user_line
from zerofx.ir.verify_values import SHORT, Numbering, Output, args, digest, label_of, sum_digest
from zerofx.policy import schedules

# -- The outer structure of a program: contiguous regions, saved values, synchronised buffers ------


def check_regions(program: Planned, graph: str) -> None:
    """Check that each region is contiguous compute, with each getitem in its producer's region."""
    seen: set[int] = set()
    current: int | None = None
    for node in program.graph(graph).nodes:
        if node.op != "call_function":
            continue
        if not is_compute(node):
            current = None
            continue
        region = info(node).region
        if region is None:
            raise fault(program, graph, node, f"{node.name} is compute outside any region.")
        if region != current and region in seen:
            raise fault(
                program,
                graph,
                node,
                f"region {region} is interrupted before {node.name}: communication is allowed "
                "only between regions.",
            )
        if node.target is operator.getitem and info(root_producer(node)).region != region:
            raise fault(
                program,
                graph,
                node,
                f"{node.name} is not in the region of the call that it unpacks.",
            )
        seen.add(region)
        current = region


def check_saved(program: Planned) -> None:
    """Check that backward takes what forward saves: the same number of values, of equal form."""
    output = program.graph(FORWARD).output_node()
    results = zip(program.outputs[FORWARD], program.results(FORWARD), strict=True)
    given = [result for spec, result in results if spec.role is Role.SAVED]
    taken = sorted(program.placeholders(BACKWARD, Role.SAVED), key=lambda n: info(n).index)
    positions = [info(n).index for n in taken]
    if positions != list(range(len(given))):
        raise fault(
            program,
            FORWARD,
            output,
            f"forward saves {len(given)} values, backward takes {len(taken)} (at {positions}).",
        )
    for result, node in zip(given, taken, strict=True):
        if not isinstance(result, fx.Node) or not _is_alike(value(result), value(node)):
            made = value(result) if isinstance(result, fx.Node) else result
            raise fault(
                program,
                BACKWARD,
                node,
                f"{name_of(node)} is saved as {_form(made)} and taken as {_form(value(node))}.",
            )


def _is_alike(made: Any, taken: Any) -> bool:
    if not isinstance(made, torch.Tensor) or not isinstance(taken, torch.Tensor):
        return _form(made) == _form(taken)
    is_same_shape = made.shape == taken.shape and made.stride() == taken.stride()
    return is_same_shape and made.dtype is taken.dtype


def _form(val: Any) -> str:
    if not isinstance(val, torch.Tensor):
        return repr(val)
    return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)} strides {list(val.stride())}"


def check_synced(program: Planned) -> None:
    """Check that updated buffers follow rank 0 as the plan demands, once all passes have run.

    In a pipeline they do so between programs, when a call ends.
    """
    plan = program.plan
    if Fact.SLOTS_ASSIGNED not in program.facts or FORWARD not in program.graphs:
        return
    results = zip(program.outputs[FORWARD], program.results(FORWARD), strict=True)
    for spec, result in results:
        if spec.role is not Role.BUFFER_UPDATE or not isinstance(result, fx.Node):
            continue
        is_synced = kind_of(root_producer(result)) is Kind.SYNC
        must = plan.buffers == "rank0" and program.world_size > 1 and program.stage.size == 1
        if must and not is_synced:
            message = f"{spec.name} does not follow rank 0: its new value passes no sync_buffers."
            raise fault(program, FORWARD, result, message)
        if is_synced and plan.buffers != "rank0":
            message = f"{spec.name} follows rank 0, but the plan says buffers={plan.buffers!r}."
            raise fault(program, FORWARD, result, message)


_aten = torch.ops.aten
# Attention that takes the elements of a row to be consecutive in memory: other rows give wrong
# results on a CPU, without an error. torch chooses these kernels for such operands only.
_OF_ROWS = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
)


def check_rows(program: Planned) -> None:
    """Check that queries, keys and values are laid out as the kernels of attention read them."""
    for name, gm in program.graphs.items():
        for target in _OF_ROWS:
            for node in gm.graph.find_nodes(op="call_function", target=target):
                for read in node.args[:3]:
                    val = value(read)
                    if val.shape[-1] != 1 and val.stride()[-1] != 1:
                        raise fault(
                            program, name, node,
                            f"{node.name} reads {read.name}, whose rows are not consecutive in "
                            f"memory: its strides are {tuple(val.stride())}. Make it contiguous.",
                        )  # fmt: skip


def check_pause(program: Planned) -> None:
    """Check that backward pauses if the schedule of the plan divides it, once passes have run."""
    if Fact.SLOTS_ASSIGNED not in program.facts or BACKWARD not in program.graphs:
        return
    graph, plan = program.graph(BACKWARD), program.plan
    pause, must = pause_of(graph), plan.parallel.splits_backward
    if must == (pause is not None):
        return
    said = "pauses nowhere" if must else "pauses"
    raise fault(
        program,
        BACKWARD,
        pause or graph.output_node(),
        f"backward {said}, and Plan.parallel.schedule is {plan.parallel.schedule!r}.",
    )


def check_secondary(program: Planned) -> None:
    """Check that backward gathers from secondary shards what forward gathers, if the plan has them.

    It holds once all passes have run.
    """
    has_both = FORWARD in program.graphs and BACKWARD in program.graphs
    has_nodes = program.plan.secondary_shard_size is not None and program.layout.node_size > 1
    if Fact.SLOTS_ASSIGNED not in program.facts or not (has_both and has_nodes):
        return
    gathered = {info(node).index for node in _gathers_over_shards(program, FORWARD)}
    for node in _gathers_over_shards(program, BACKWARD):
        bucket = program.layout.buckets[info(node).index]
        if bucket.index in gathered:
            raise fault(
                program,
                BACKWARD,
                node,
                f"{node.name} gathers bucket {bucket.index} ({bucket.label()}) across nodes again. "
                f"Plan.secondary_shard_size is {program.plan.secondary_shard_size}. Gather it from "
                "the secondary shard that forward keeps.",
            )


def _gathers_over_shards(program: Planned, graph: str) -> list[fx.Node]:
    found = ((n, spec_of(n)) for n in program.graph(graph).nodes)
    return [n for n, s in found if s and s.is_gather and not s.stays and s.axis == "shard"]


# -- The proof of a program ------------------------------------------------------------------------


def verify(program: Planned) -> None:
    """Check every invariant of a program.

    Order: a gathered parameter is read between its wait and its release; each launch is waited for;
    each gradient is packed at its own offset, and its bucket is reduced once, complete, at scale
    1/world_size; buffers in one slot never overlap; no saved value aliases a gathered buffer that
    is released.
    Dataflow: with the zerofx ops erased and recomputed nodes merged, outputs, gradients and buffer
    updates are the captured expressions. Operands of attention are laid out as its kernels read
    them. If values are sharded over the tensor axis, each has the
    placement that its readers need, and the expressions are of whole values. An op that declares an
    error bound is erased like an exact one; `bounds` lists these ops, and a plan that demands
    bitwise numerics allows none.

    Raises:
        ProgramError: names the invariant, the parameter and the user's line, with the ten lines of
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
    check_pause(program)
    check_secondary(program)
    check_rows(program)
    check_precision(program)
    check_placed(program)
    check_dataflow(program)
    check_stage(program)


def bounds(program: Program) -> dict[str, Bounded | Capped]:
    """Return the declared error of each inexact op of a program."""
    called = (spec_of(n) for gm in program.graphs.values() for n in gm.graph.nodes)
    found = {spec.name: spec.precision for spec in called if spec is not None}
    return {name: rule for name, rule in found.items() if isinstance(rule, (Bounded, Capped))}


def check_precision(program: Planned) -> None:
    """Check that no op changes values if the plan demands the captured bits."""
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
    """Check that a program computes its reference, if it has one."""
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
    names = few(wrong)
    graph, node, what = _first_difference(program, reference, numbering, made.get(wrong[0]))
    raise fault(
        program,
        graph,
        node,
        f"the program does not compute what was captured: {names} "
        f"{'differs' if len(wrong) == 1 else 'differ'}. {as_sentence(what)}",
    )


def check_stage(program: Planned) -> None:
    """Check that what a pipeline stage must compute is its part of what was captured.

    Together with `check_dataflow` this proves the stage: what it sends has the digest that its
    receiver relies on, its outputs and gradients are captured ones, and the parts of a gradient
    that several stages have are in sum the captured one.
    """
    stage, reference = program.stage, program.reference
    if stage.size == 1 or not isinstance(reference, Reference):
        return
    due: dict[str, str | None] = dict(stage.captured)
    trained = {label_of(Role.GRAD, name) for name in stage.trained}
    if trained != {label for label in due if label.startswith(f"{Role.GRAD.value} ")}:
        raise ProgramError(
            f"{program.model_name}: the gradients that the pipeline stages are to compute "
            f"({few(sorted(stage.trained))}) are not those that were captured."
        )
    for name, terms in stage.sums.items():
        label = label_of(Role.GRAD, name)
        if _total(terms) != stage.captured.get(label):
            raise ProgramError(
                f"{program.model_name}: what the pipeline stages have of the gradient of {name} is "
                "not in sum the captured one."
            )
        part = stage.summands(name).get(stage.position)
        due[label] = sum_digest(part) if part else None
    roles = {FORWARD: (Role.OUTPUT, "later"), BACKWARD: (Role.INPUT_GRAD, "earlier")}
    for graph, (role, where) in roles.items():
        for wire in stage.sent(graph):
            due[label_of(role, f"to_{where}_{wire.name}", wire.output)] = wire.digest
    for label, made in reference.outputs.items():
        if due.get(label) != made:
            raise ProgramError(
                f"{program.model_name}: {label} of pipeline stage {stage.position} is not what was "
                "captured."
            )
    for name in stage.sums:
        label = label_of(Role.GRAD, name)
        if due[label] and label not in reference.outputs:
            raise ProgramError(
                f"{program.model_name}: pipeline stage {stage.position} leaves out its part of the "
                f"gradient of {name}."
            )
    _check_taken(program)
    _check_summed(program)


def _check_taken(program: Planned) -> None:
    """Check that what a stage reads as a received value is what the sender must send there."""
    stage = program.stage
    sent = {(w.graph, w.leaf): w for graph in (FORWARD, BACKWARD) for w in stage.taken(graph)}
    for name in program.graphs:
        for node in program.placeholders(name):
            where = info(node)
            if not where.digest or where.role is Role.SAVED:  # forward has taken it
                continue
            graph = FORWARD if where.role is Role.INPUT else BACKWARD
            wire = sent.get((graph, where.index))
            if wire is None or wire.digest != where.digest:
                what = f"{wire.name} of stage {wire.source}" if wire else "nothing"
                message = (
                    f"pipeline stage {stage.position} reads {name_of(node)} as another value than "
                    f"it is sent: {what}."
                )
                raise fault(program, name, node, message)


def _check_summed(program: Planned) -> None:
    """Check that the ranks which have parts of a gradient are those that add them up."""
    stage, size = program.stage, program.plan.parallel.pipeline
    for bucket in program.layout.buckets:
        for param in bucket.params:
            if param.owner not in stage.sums:
                continue
            ranks = sorted({position % size for position in stage.summands(param.owner)})
            if not {*ranks} <= {*bucket.positions}:
                raise ProgramError(
                    f"{program.model_name}: ranks {ranks} of the pipeline have parts of the "
                    f"gradient of {param.owner}, and ranks {sorted(bucket.positions)} add theirs "
                    "up."
                )


def _total(terms: Sum) -> str:
    early, late = terms
    if isinstance(early, int):
        return str(late)
    return sum_digest([_total(early), _total(late)])  # type: ignore[arg-type]


def _first_difference(
    program: Planned, reference: Reference, numbering: Numbering, wrong: Output | None
) -> tuple[str, fx.Node, str]:
    """Return the first node whose value the captured graph lacks, or else the wrong output."""
    for graph, gm in program.graphs.items():
        for node in gm.graph.nodes:
            made = numbering.of.get(node)
            is_value = kind_of(node) in (None, Kind.VIEW)
            if node.op != "call_function" or not is_value or not node.users:
                continue
            if isinstance(made, str) and made[:SHORT] not in reference.values:
                where = user_line(node)
                note = f"{name_of(node)}{f' ({where})' if where else ''}"
                return graph, node, f"The first value that the captured graph lacks is {note}"
    if wrong is None:
        graph = next(iter(program.graphs))
        return graph, program.graph(graph).output_node(), "Nothing computes it"
    return wrong.graph, wrong.node, "Each value is a captured one, but in the wrong place"


def communication(program: Program) -> list[tuple[str, str, tuple[object, ...]]]:
    """Return the program's collectives in order: graph, op, and its constant arguments."""
    return [
        (name, node.target.name(), constants(node))
        for name, gm in program.graphs.items()
        for node in gm.graph.nodes
        if (spec := spec_of(node)) is not None and spec.is_agreed
    ]


def constants(node: fx.Node) -> tuple[object, ...]:
    """Return the non-tensor arguments of a collective, with lists replaced by their lengths."""
    given = [len(a) if isinstance(a, (list, tuple)) else a for a in args(node)]
    return tuple(a for a in given if not isinstance(a, fx.Node))


def verify_ranks(programs: Sequence[Planned]) -> None:
    """Check the programs of all ranks, and that they launch the same collectives in the same order.

    Raises:
        ProgramError: names the first rank and call that differ from rank 0's.
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
                    f"{_call(theirs)}, and both would wait forever. Run one program "
                    "on all ranks."
                )


def verify_stages(programs: Sequence[Planned]) -> None:
    """Check the programs of a pipeline's stages, and that each sends what the next one receives.

    programs: of all stages, in order, each cut from the same program.

    Raises:
        ProgramError: a stage is invalid, sends a value other than the one its receiver expects, a
            gradient is missing, or the schedule deadlocks.
    """
    made = []
    for program in programs:
        verify(program)
        made.append({(o.role, o.index): n.digest for o, n in _sent(program)})
    wires = programs[0].stage.wires
    for position, program in enumerate(programs):
        stage = program.stage
        if (stage.position, stage.size, stage.wires) != (position, len(programs), wires):
            raise ProgramError(
                f"the program given as stage {position} of {len(programs)} is stage "
                f"{stage.position} of {stage.size}, or of another pipeline."
            )
    for wire in wires:
        role = Role.OUTPUT if wire.graph == FORWARD else Role.INPUT_GRAD
        if made[wire.source].get((role, wire.output)) != wire.digest:
            raise ProgramError(
                f"stage {wire.source} does not send {wire.name} to stage {wire.target} in "
                f"{wire.graph}, or sends another value in its place."
            )
        taken = [
            n
            for name in programs[wire.target].graphs
            for n in programs[wire.target].placeholders(name)
            if info(n).digest == wire.digest and info(n).index == wire.leaf
        ]
        if taken and not _is_alike(wire.value, value(taken[0])):
            raise ProgramError(
                f"stage {wire.target} takes {wire.name} as {_form(value(taken[0]))}, and stage "
                f"{wire.source} sends it as {_form(wire.value)}."
            )
    _check_all_is_made(programs)
    _check_schedule(programs)


def _check_all_is_made(programs: Sequence[Planned]) -> None:
    """Check that each captured output has its stage, and each part of a sum its own."""
    stage = programs[0].stage
    for program in programs:
        if (program.stage.captured, program.stage.sums) != (stage.captured, stage.sums):
            raise ProgramError(
                f"stage {program.stage.position} is cut from another program than stage 0."
            )
    found = [{*Numbering(program).outputs} for program in programs]
    parts = {label_of(Role.GRAD, name): [*stage.summands(name)] for name in stage.sums}
    for label in stage.captured:
        made = [position for position, labels in enumerate(found) if label in labels]
        if label in parts:
            if made != sorted(parts[label]):
                raise ProgramError(
                    f"stages {made} compute parts of {label}, and stages {sorted(parts[label])} "
                    "have some."
                )
        elif len(made) != 1:
            by = f"stages {made} compute" if made else "no stage computes"
            raise ProgramError(f"{by} {label}, which is computed once in what was captured.")


def _sent(program: Planned) -> list[tuple[OutputInfo, Output]]:
    outputs = Numbering(program).outputs
    specs = [spec for graph in program.outputs.values() for spec in graph]
    labels = [(spec, label_of(spec.role, spec.name, spec.index)) for spec in specs]
    return [(spec, outputs[label]) for spec, label in labels if label in outputs]


def _check_schedule(programs: Sequence[Planned]) -> None:
    parallel = programs[0].plan.parallel
    size = parallel.pipeline
    num = schedules.expected_micro_batches(parallel.micro_batches, size)
    orders = schedules.orders(parallel.schedule, size, num, parallel.interleave)
    check_moves(programs[0], schedules.moves(orders, programs[0].stage.hops), num)


def check_moves(
    program: Planned,
    done: Sequence[Sequence[schedules.PipelineMove]],
    num: int,
    puts_off: bool = True,
) -> None:
    """Check what the ranks of a pipeline do in a training step.

    Each runs each half of its stages once on each micro-batch, a backward after its forward, and
    gradients of weights, if they are apart, after those of inputs; sends
    what it makes once; has begun to receive what it reads; and reduces gradients once, with the
    last of them. What a rank sends another is what that receives, in order; and all come to an end.
    No more micro-batches are under way in a stage than its memory is counted for.

    done: of each rank of the pipeline, in order. num: micro-batches.

    Raises:
        ProgramError: names the rank and what it does wrong.
    """
    parallel, hops = program.plan.parallel, program.stage.hops
    size = parallel.pipeline
    for rank, moves in enumerate(done):
        fault = schedules.fault_of(
            rank, size, moves, hops, parallel.stages_of(rank), num, puts_off,
            schedules.SPLIT if parallel.splits_backward else schedules.WHOLE,
        )  # fmt: skip
        fault = fault or _overrun(program, rank, moves, num)
        if fault:
            raise ProgramError(f"rank {rank} of the pipeline: {as_sentence(fault)}")
    if fault := schedules.mismatch(done):
        raise ProgramError(as_sentence(fault))
    if held := schedules.stuck(done):
        where = ", ".join(f"rank {p} at {move}" for p, move in enumerate(held))
        raise ProgramError(f"the schedule {parallel.schedule} comes to a halt: {where}.")


def _overrun(program: Planned, rank: int, moves: Sequence[schedules.PipelineMove], num: int) -> str:
    """Return in which stage more micro-batches are under way than its memory is counted for."""
    parallel = program.plan.parallel
    size = parallel.pipeline
    order = schedules.actions(parallel.schedule, size, rank, num, parallel.interleave)
    runs = [move for move in moves if move.hop is None]
    made = [schedules.Action(m.verb, m.micro_batch, m.stage // size) for m in runs]
    for turn in range(parallel.interleave):
        at, said = schedules.overrun(made, order, turn)
        if said:
            return f"{runs[at]}: {said}"
    return ""


def _call(call: tuple[str, str, tuple[object, ...]] | None) -> str:
    if call is None:
        return "nothing"
    graph, op, arguments = call
    return f"{op.removeprefix('zerofx::')}{arguments} in {graph}"


# -- The reference: a captured program's computation as digests, and the signature of its call -----


def take_reference(program: Planned) -> Reference:
    """Return the computation of a program, as the reference for later programs."""
    numbering = Numbering(program)
    values = (v[:SHORT] for v in numbering.of.values() if isinstance(v, str))
    return Reference(
        outputs={label: made.digest for label, made in numbering.outputs.items()},
        values=frozenset(values),
    )


def take_signature(program: Program, reference: Reference) -> str:
    """Return the digest of a call: its inputs, parameters, buffers and computation.

    Programs with equal signature and layout are interchangeable, whatever their plans.
    """
    inputs = [
        (info(n).role, info(n).name, info(n).index, _spec(value(n)))
        for n in program.placeholders(JOINT if JOINT in program.graphs else FORWARD)
        if info(n).role in (Role.INPUT, Role.BUFFER)
    ]
    params = [
        (p.name, p.shape, str(p.dtype), str(p.compute_dtype), p.requires_grad)
        for p in program.params.values()
    ]
    return digest(repr((program.is_training, inputs, params, sorted(reference.outputs.items()))))


def _spec(val: Any) -> tuple[Any, ...]:
    return str(val.dtype), tuple(val.shape), tuple(val.stride()), val.device.type
