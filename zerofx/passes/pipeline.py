"""The pass pipeline: one list in reading order, checked whole before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from zerofx.analysis.memory import peak_bytes
from zerofx.analysis.traffic import traffic
from zerofx.collector import paused_collector
from zerofx.errors import PlanError, ProgramError
from zerofx.fields import nearest
from zerofx.ir.dump import dump_body, header
from zerofx.ir.program import JOINT, Entry, Loop, Pool, Program, Record
from zerofx.ir.verify import verify
from zerofx.ir.verify_reference import take_reference, take_signature
from zerofx.machine import Machine
from zerofx.passes.assign_buckets import AssignBuckets
from zerofx.passes.assign_slots import AssignSlots
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.cast import Cast
from zerofx.passes.cut_regions import CutRegions
from zerofx.passes.decide import Choices, budget_bytes, decide
from zerofx.passes.fuse import Fuse
from zerofx.passes.host_budget import check_host_budget
from zerofx.passes.keep_gathered import KeepGathered
from zerofx.passes.merge_tied import MergeTied
from zerofx.passes.offload_activations import OffloadActivations
from zerofx.passes.offload_shards import OffloadShards
from zerofx.passes.prefetch import PrefetchGathers
from zerofx.passes.release import Release
from zerofx.passes.shard_gradients import ShardGradients
from zerofx.passes.shard_parameters import ShardParameters
from zerofx.passes.sink_waits import SinkWaits
from zerofx.passes.spill_activations import SpillActivations
from zerofx.passes.split import Split
from zerofx.passes.sync_buffers import SyncBuffers
from zerofx.passes.tile import Tile
from zerofx.passes.update_in_backward import UpdateInBackward
from zerofx.plan import Plan
from zerofx.runtime.layout import Layout


@dataclass(frozen=True)
class Setting:
    """What the pipeline is built for.

    choices: what the plan's budget decided; None takes the plan's fields as they stand.
    loop: the steps that the budget is for. pool: slots that are there for other programs.
    margin_bytes: of the budget, left for what compiled regions take beyond their operators.
    """

    plan: Plan
    world_size: int
    machine: Machine
    layout: Layout | None = None
    choices: Choices | None = None
    loop: Loop = field(default_factory=Loop)
    pool: Pool = field(default_factory=Pool)
    margin_bytes: int = 0


# One pass a line, in the order they run, each with the reason for its place.
ORDER: list[Callable[[Setting], Pass]] = [
    # first of all: it says what a parameter is, to whatever counts or compares them
    lambda s: Cast(precision=s.plan.precision),
    # before merge-tied, behind which the reference is taken: all else is proved against this graph
    lambda s: Fuse(patterns=_patterns(s)),
    # before merge-tied as well: a sum over tiles rounds otherwise
    lambda s: Tile(plan=s.plan, world_size=s.world_size, layout=s.layout),
    # before anything counts a parameter or a gradient
    lambda s: MergeTied(),
    # before gathers exist: an untagged gather before the split would be saved, not re-gathered
    lambda s: Split(activations=s.choices.activations if s.choices else s.plan.activations),
    # before communication: cuts depend on units alone, so identical layers stay identical
    lambda s: CutRegions(),
    # between regions, and before gathers: what it moves is forward's own, and all that comes later
    # is measured without it
    lambda s: OffloadActivations(
        activations=s.plan.activations,
        everything=s.plan.offload.activations != "none" and s.plan.activations != "auto",
        values=s.choices.offloaded if s.choices else (),
        distance=_distance(s),
        least_bytes=s.machine.offload_min_bytes,
        # what else is on the host is counted with it, behind the last pass
        host_budget_bytes=None if _spills(s) or _lives_away(s) else s.plan.host_budget,
    ),
    # at once: it takes what has just been brought to the host from there
    lambda s: SpillActivations(enabled=_spills(s)),
    # before the collectives that it shapes
    lambda s: AssignBuckets(
        plan=s.plan,
        world_size=s.world_size,
        persist_below=_or(s.plan.persist_below, s.machine.persist_below_bytes),
        bucket_bytes=_or(s.plan.bucket_bytes, s.machine.bucket_bytes),
        layout=s.layout,
    ),
    lambda s: ShardParameters(stage=s.plan.stage),
    # after shard-parameters: it reads the shard placeholders
    lambda s: ShardGradients(world_size=s.world_size),
    # running statistics follow rank 0
    lambda s: SyncBuffers(enabled=s.plan.buffers == "rank0" and s.world_size > 1),
    lambda s: Release(),
    # after release: moving a launch needs to know when its buffer is free again
    lambda s: PrefetchGathers(distance=_distance(s)),
    lambda s: SinkWaits(),
    # after the collectives have their places: copies are launched ahead of those
    lambda s: OffloadShards(distance=_distance(s)),
    # after all that moves reads of shards, which an update overwrites
    lambda s: UpdateInBackward(enabled=s.plan.update == "in-backward"),
    # after all that moves and frees: what fits is measured on the final order
    lambda s: KeepGathered(
        budget_bytes=s.choices.spend_bytes if s.choices else budget_bytes(s.plan, s.margin_bytes)
    ),
    # last: places follow the final order
    lambda s: AssignSlots(),
]


def _spills(setting: Setting) -> bool:
    """Tell whether activations that leave go on to NVMe, so that the host holds few of them."""
    return setting.plan.offload.activations == "nvme"


def _lives_away(setting: Setting) -> bool:
    """Tell whether parameters or optimizer states live off the device."""
    offload = setting.plan.offload
    return {offload.parameters, offload.optimizer} != {"none"}


def _patterns(setting: Setting) -> str:
    """Return what may be fused: it changes rounding, and on CPU only the loss head gains by it."""
    if setting.plan.numerics == "bitwise":
        return "none"
    return "all" if setting.machine.device_type == "cuda" else "linear-cross-entropy"


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _distance(setting: Setting) -> int:
    if setting.choices is not None:
        return setting.choices.prefetch
    prefetch = setting.plan.prefetch
    return setting.machine.prefetch if prefetch == "auto" else int(prefetch)


def build(setting: Setting) -> list[Pass]:
    """Build the plan's passes and check that each finds what it requires."""
    passes = [make(setting) for make in ORDER]
    check_order(passes)
    return passes


def check_order(passes: Sequence[Pass]) -> None:
    """Refuse an order in which a pass misses what it requires or meets what it conflicts with.

    Raises:
        PlanError: naming the pass and the facts.
    """
    facts = {Fact.CAPTURED}
    for p in passes:
        if missing := p.requires - facts:
            raise PlanError(f"{p.name} runs before what it needs: {_names(missing)}")
        if clash := p.conflicts & facts:
            raise PlanError(f"{p.name} must run before: {_names(clash)}")
        facts |= p.provides


def _names(facts: frozenset[Fact]) -> str:
    return ", ".join(sorted(f.name.lower().replace("_", "-") for f in facts))


class Proof(Enum):
    """When a program is linted and verified while passes run."""

    EACH = "behind each pass"
    END = "behind the last one"
    NONE = "never: the result is for pricing alone"


def run_pass(program: Program, p: Pass) -> Program:
    """Copy, run, lint, verify, record. The given program is left as it was."""
    after = program.clone()
    report = _apply(after, p)
    if not report.changed:
        assert _shape(after) == _shape(program), f"{p.name} says it changed nothing, but it did"
    after.history.append(_recorded(after, p.spec(), report.summary))
    return after


def _apply(program: Program, p: Pass, proof: Proof = Proof.EACH) -> Report:
    """Run a pass in place; lint and verify what it changed, in nodes or in facts."""
    report = p.run(program)
    facts, program.facts = program.facts, program.facts | p.provides
    if proof is Proof.NONE:
        return report
    if program.reference is None and Fact.TIED_MERGED in program.facts:
        program.reference = take_reference(program)
        program.signature = take_signature(program)
    if proof is Proof.EACH and (report.changed or facts != program.facts):
        try:
            _prove(program)
        except ProgramError as error:
            raise ProgramError(f"{p.name}: {error}") from None
    return report


def _prove(program: Program) -> None:
    """Lint and verify a program; its graphs can be run from here on."""
    for gm in program.graphs.values():
        gm.graph.lint()
        gm.recompile()
    verify(program)


def _shape(program: Program) -> list[tuple]:
    return [
        (name, [(n.op, str(n.target), str(n.args)) for n in gm.graph.nodes])
        for name, gm in program.graphs.items()
    ]


def _num_nodes(program: Program) -> int:
    return sum(len(gm.graph.nodes) for gm in program.graphs.values())


def _recorded(program: Program, spec: str, summary: str) -> Entry:
    """Return the entry of a pass that has just run, its record made at once."""
    entry = Entry(spec, summary, _num_nodes(program))
    comm, peak = traffic(program).sent_bytes, peak_bytes(program)
    record = Record(comm, peak, header(program, entry, comm, peak), dump_body(program))
    return replace(entry, record=lambda: record)


@paused_collector()
def run(
    program: Program, setting: Setting, until: str | None = None, proof: Proof = Proof.EACH
) -> Program:
    """Run the whole pipeline on a captured program, or up to the pass named `until`.

    proof: when what passes made is verified. Of what fails at the end all passes run once more,
        to name the one that made it.

    The given program is left as it was. The history's records (dumps, peaks) are made when first
    asked for, by running the pipeline once more with everything recorded: passes are functions of
    the program and their options alone, and recording takes longer than they do.

    Raises:
        PlanError: no pass has that name.
        BudgetError: memory_budget or host_budget is too small; the least that would do is said.
    """
    passes = build(setting)
    names = ["capture", *(p.name for p in passes)]
    if until is not None and until not in names:
        raise PlanError(f"no pass is named {until!r}{nearest(until, names)}")
    last = names.index(until) if until is not None else len(passes)
    program = program.clone()
    program.plan, program.machine = setting.plan, setting.machine
    program.loop, program.pool = setting.loop, setting.pool
    source = program.clone()
    recorded = functools.cache(lambda: _run_recorded(source, passes[:last]).history)
    history = program.history

    def note(spec: str, summary: str) -> None:
        at = len(history)
        entry = Entry(spec, summary, _num_nodes(program), lambda: recorded()[at].record())
        history.append(entry)

    if not history:
        note("capture", program.model_name)
    for i in range(last):
        if isinstance(passes[i], Split) and _has_budget(program):
            choices = _decided(program, setting)
            passes[:] = build(replace(setting, choices=choices))
            program.decisions = choices.decisions
        report = _apply(program, passes[i], proof)
        note(passes[i].spec(), report.summary)
    if proof is Proof.END:
        try:
            _prove(program)
        except ProgramError:
            run(source, setting, until)
            raise
    if until is None:
        check_host_budget(program)
    return program


@paused_collector()
def resume(program: Program, setting: Setting, after: str) -> Program:
    """Run what follows on the pass named `after`, on a program that was run until there.

    For pricing alone: nothing is proved or recorded. What was run before must be what `setting`
    would have run.
    """
    passes = build(setting)
    first = [p.name for p in passes].index(after) + 1
    program = program.clone()
    program.plan, program.machine = setting.plan, setting.machine
    program.loop, program.pool = setting.loop, setting.pool
    for p in passes[first:]:
        _apply(program, p, Proof.NONE)
    check_host_budget(program)
    return program


def _has_budget(program: Program) -> bool:
    """Tell whether a program has a budget to meet: a training program whose plan sets one."""
    return program.plan.memory_budget is not None and JOINT in program.graphs


def _decided(program: Program, setting: Setting) -> Choices:
    """Return what the budget decides for a program that is about to be split."""

    def trial(choices: Choices) -> Program:
        tried = program.clone()
        passes = build(replace(setting, choices=choices))
        first = next(i for i, p in enumerate(passes) if isinstance(p, Split))
        for p in passes[first:]:
            _apply(tried, p, Proof.NONE)
        return tried

    distance = _distance(setting)
    return decide(program, setting.plan, setting.machine, distance, trial, setting.margin_bytes)


@paused_collector()
def _run_recorded(program: Program, passes: Sequence[Pass]) -> Program:
    program = program.clone()
    if not program.history:
        program.history.append(_recorded(program, "capture", program.model_name))
    for p in passes:
        program = run_pass(program, p)
    return program
