"""The pass pipeline: runs the passes in order, checks the result of each, and records it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from zerofx.analysis.memory.memory import memory
from zerofx.analysis.time.prices import Roofline
from zerofx.analysis.time.traffic import traffic
from zerofx.errors import BudgetError, PlanError, ProgramError, as_sentence
from zerofx.ir.dump import dump_body, header
from zerofx.ir.program import JOINT, Entry, Planned, Program, Record, Unproved
from zerofx.ir.settle import take_forms
from zerofx.ir.verify import take_reference, take_signature, verify
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.decide import Choices, decide
from zerofx.passes.order import Setting, build, distance
from zerofx.passes.parts import with_styles_of
from zerofx.plan.fields import nearest
from zerofx.plan.sizes import format_bytes
from zerofx.process import paused_collector

# -- Whether a program's host memory fits the plan's `host_budget` ---------------------------------


NAMES = 3  # how many of the largest holders an error lists


def check_host_budget(program: Planned) -> None:
    """Raise if a program holds more host memory than its plan allows.

    No pass can reduce this amount: tensors kept on the host stay there permanently.

    Raises:
        BudgetError: states both numbers and the largest holders.
    """
    budget = program.plan.host_budget
    if budget is None:
        return
    report = memory(program)
    if report.host_bytes <= budget:
        return
    held: Counter[str] = Counter()
    for storage in report.on_host:
        held[storage.name.partition("_")[0]] += storage.nbytes
    largest = ", ".join(f"{name} {format_bytes(n)}" for name, n in held.most_common(NAMES))
    raise BudgetError(
        f"host_budget: {program.model_name} holds {format_bytes(report.host_bytes)} "
        f"({report.host_bytes} bytes) on the host per rank at stage {program.plan.stage} and world "
        f"{program.world_size} ({largest}), but the budget is {format_bytes(budget)}. Raise it "
        "to that, which is the least, shard over more ranks, or let the tier 'nvme' hold more.",
        report.host_bytes,
    )


# -- The pass pipeline: runs the passes in order, checks the result of each, and records it --------


class Proof(Enum):
    """When a program is linted and verified while passes run."""

    EACH = "after each pass"
    END = "after the last pass"
    NONE = "never: the result is for pricing alone"


def run_pass(program: Planned, p: Pass) -> Planned:
    """Run a pass on a copy of the program; lint, verify and record it. Return the copy."""
    after = program.clone()
    report = _apply(after, p)
    if not report.changed:
        assert _shape(after) == _shape(program), f"{p.name} says it changed nothing, but it did"
    after.history.append(_recorded(after, p.spec(), report.summary))
    return after


def _apply(program: Planned, p: Pass, proof: Proof = Proof.EACH) -> Report:
    """Run a pass in place; lint and verify the program if its nodes or facts changed."""
    report = p.run(program)
    facts, program.facts = program.facts, program.facts | p.provides
    if proof is Proof.NONE:
        return report
    if program.reference is Unproved.NOT_YET and Fact.TIED_MERGED in program.facts:
        program.reference = take_reference(program)
        program.signature = take_signature(program, program.reference)
    if proof is Proof.EACH and (report.changed or facts != program.facts):
        try:
            _prove(program)
        except ProgramError as error:
            raise ProgramError(f"{p.name}: {as_sentence(error)}") from None
    return report


def _prove(program: Planned) -> None:
    """Lint and verify a program and recompile its graphs, so that they can be run."""
    for gm in program.graphs.values():
        gm.graph.lint()
        gm.recompile()
    verify(program)


def _shape(program: Planned) -> list[tuple]:
    return [
        (name, [(n.op, str(n.target), str(n.args)) for n in gm.graph.nodes])
        for name, gm in program.graphs.items()
    ]


def _num_nodes(program: Planned) -> int:
    return sum(len(gm.graph.nodes) for gm in program.graphs.values())


def _recorded(program: Planned, spec: str, summary: str) -> Entry:
    """Return the history entry of a pass that has just run, with its record made immediately."""
    entry = Entry(spec, summary, _num_nodes(program))
    comm = traffic(program).sent_bytes
    peak = memory(program, keeps_results=False).peak_bytes
    record = Record(comm, peak, header(program, entry, comm, peak), dump_body(program))
    return replace(entry, record=lambda: record)


@paused_collector()
def run(
    program: Program, setting: Setting, until: str | None = None, proof: Proof = Proof.EACH
) -> Planned:
    """Run the whole pipeline on a captured program, or up to the pass named `until`.

    proof: when the results of passes are verified. If verification fails at the end, all passes run
        once more to identify the faulty one.

    The given program is unchanged. The history's records (dumps, peaks) are made on first access,
    by running the pipeline once more with everything recorded. This is possible because passes are
    functions of the program and their options alone, and worthwhile because recording takes longer
    than the passes.

    Raises:
        PlanError: no pass has that name.
        BudgetError: memory_budget or host_budget is too small; the message gives the smallest
            sufficient one.
    """
    pipeline = build(setting)
    names = ["capture", *(p.name for p in pipeline.passes)]
    if until is not None and until not in names:
        raise PlanError(f"no pass is named {until!r}{nearest(until, names)}")
    last = names.index(until) if until is not None else len(pipeline.passes)
    given = program
    program = _begun(program, setting)
    # of programs for pricing no record is asked for, unless by hand
    source = None if proof is Proof.NONE else program.clone()
    history = program.history
    ran: list[Pass] = []
    recorded = functools.cache(lambda: _run_recorded(source or _begun(given, setting), ran).history)

    def apply(p: Pass) -> None:
        report = _apply(program, p, proof)
        ran.append(p)
        note(p.spec(), report.summary)

    def note(spec: str, summary: str) -> None:
        at = len(history)
        entry = Entry(spec, summary, _num_nodes(program), lambda: recorded()[at].record())
        history.append(entry)

    if not history:
        note("capture", program.model_name)
    for p in pipeline.prepare[:last]:
        apply(p)
    place = pipeline.place[: max(0, last - len(pipeline.prepare))]
    if place and _has_budget(program):
        choices = decide_budget(program, setting)
        place = build(replace(setting, choices=choices)).place[: len(place)]
        program.decisions = choices.decisions
    for p in place:
        apply(p)
    if proof is Proof.END:
        try:
            _prove(program)
        except ProgramError:
            run(given, setting, until)
            raise
    if program.sizes:
        program.sizes = take_forms(program)
    if until is None:
        check_host_budget(program)
    return program


@paused_collector()
def resume(program: Planned, setting: Setting, after: str, until: str | None = None) -> Planned:
    """Run the passes that follow the one named `after`, on a program that was run up to it.

    For pricing alone: nothing is proved or recorded. The passes before must be those that `setting`
    would have run. until: the last pass to run; None runs all that are left. A memory budget is
    decided if these include all that follow its decision.
    """
    pipeline = build(setting)
    names, decided = [p.name for p in pipeline.passes], len(pipeline.prepare)
    first = names.index(after) + 1
    last = len(names) if until is None else names.index(until) + 1
    program = _begun(program, setting)
    for p in pipeline.prepare[first:last]:
        _apply(program, p, Proof.NONE)
    if first <= decided < last and _has_budget(program):
        choices = decide_budget(program, setting)
        pipeline = build(replace(setting, choices=choices))
        program.decisions = choices.decisions
    for p in pipeline.passes[max(first, decided) : last]:
        _apply(program, p, Proof.NONE)
    if until is None:
        check_host_budget(program)
    return program


def _begun(program: Program, setting: Setting) -> Planned:
    """Return a copy of a program with the setting's plan, for its passes to rewrite."""
    program = program.planned().clone()
    program.plan, program.hardware = setting.plan, setting.hardware
    program.loop, program.pool = setting.loop, setting.pool
    if setting.layout is not None and not setting.plan.parallel.brings_slices:
        program.params = with_styles_of(setting.layout, program.params)
    return program


def _has_budget(program: Planned) -> bool:
    """Return whether a program must meet a budget: a training program whose plan sets one."""
    return program.plan.memory_budget is not None and JOINT in program.graphs


def decide_budget(program: Planned, setting: Setting) -> Choices:
    """Decide the choices of the plan's memory budget for a program after its `prepare` passes.

    The program is compiled on paper with one choice after another, and each result is measured.
    """

    def trial(choices: Choices) -> Planned:
        tried = program.clone()
        for p in build(replace(setting, choices=choices)).place:
            _apply(tried, p, Proof.NONE)
        return tried

    ahead = distance(setting)
    prices = Roofline.of(setting.plan, setting.hardware, setting.world_size)
    return decide(program, setting.plan, prices, ahead, trial, setting.margin_bytes)


@paused_collector()
def _run_recorded(program: Planned, passes: Sequence[Pass]) -> Planned:
    program = program.clone()
    if not program.history:
        program.history.append(_recorded(program, "capture", program.model_name))
    for p in passes:
        program = run_pass(program, p)
    return program
