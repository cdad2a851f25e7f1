"""Predict a step before it runs: memory and time, for any hardware and world."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from zerofx.analysis.memory.memory import ATEN
from zerofx.analysis.memory.standing import with_other_stages
from zerofx.analysis.time.forecast import forecast
from zerofx.analysis.time.pipelines import PipelineForecast, pipeline_forecast
from zerofx.analysis.time.steps import Lane
from zerofx.api import PlanLike, load_program
from zerofx.capture import capture
from zerofx.errors import PlanError
from zerofx.hardware import Hardware, load_hardware
from zerofx.ir.program import Captured, Loop, Planned, Program
from zerofx.ir.verify import verify, verify_stages
from zerofx.passes.cut_stages import CutStages, balanced, cut, unit_positions
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import Proof, resume, run
from zerofx.passes.placement import capture_options
from zerofx.plan.plan import Plan, as_plan
from zerofx.tools import reports
from zerofx.tools.search.family import Says, silent
from zerofx.tools.search.way_out import WayOut, way_out
from zerofx.tools.targets import Target, own_errors, resolve
from zerofx.tools.views.memory import shown
from zerofx.tools.views.prediction import BetterCuts, PipelineView, PredictionView

WHOLE = "place"  # the last pass on the whole model, after which pipeline stages are cut
CUT = CutStages.name
GAIN = 0.02  # share of the longest stage's time that other cuts must save


def predict(
    target: str | Target | Program,
    plan: PlanLike = None,
    *,
    hardware: Hardware | str | os.PathLike[str],
    world_size: int = 1,
    batch: int = 1,
    seq: int = 128,
    accumulation: int = 1,
    no_sync: bool = False,
    clips: bool = False,
    optimizer_bytes: int = 8,
    keeps_results: bool = False,
    basis: str = ATEN,
    says: Says = silent,
) -> PredictionView | PipelineView:
    """Return the memory and time of one step of a training loop; nothing is run or allocated.

    target: a captured or a finished program, or as on the command line: `package:function`,
        `file.py:function`, `hf:config.json`, an emitted directory. A finished program keeps its
        plan and world.
    hardware: a description, a preset's name (`zerofx.hardware.hardware_names()`), or a file.
    batch, seq: of an `hf:` model's call.
    accumulation, no_sync: backward passes per step, and whether all but the last run under
        no_sync(). clips: the loop clips the global norm. optimizer_bytes: of optimizer state per
        element.
    keeps_results: the loop holds all results until the step, not the loss alone.
    basis: how memory inside regions is counted: "aten", op by op, or "compiled", as Inductor
        compiles them; regions that the cache lacks are compiled.
    says: called with the next action, and whether it is of interest until the following one only.

    For a plan with a pipeline the result is a `PipelineView`, the step of all stages together: the
    call is that of a micro-batch, of which a step has as many as the plan has ("auto": four per
    stage). It has the memory, busy time and idle time of each pipeline stage.

    If the plan does not fit, `view.way_out` is the nearest plan that does. It is searched when it
    is first read or printed, among a bounded number of plans.

    Returns:
        A view to print, or to read: `fits`, `memory`, `forecast`, and `to_dict()` for JSON. Sizes
        are in bytes per rank, times in microseconds.

    Raises:
        PlanError: the hardware is unknown or does not multiply in the plan's format; a plan was
            given for a finished program; or the plan is not valid.

    Example:
        view = zerofx.predict("model.py:build", {"stage": 3}, hardware="dgx-h100", world_size=64)
        print(view)
    """
    described = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    checked = as_plan(plan)
    source = _source(target, plan is not None, batch, seq)
    finished = source if isinstance(source, Planned) and source.is_laid_out else None
    described.check_world(world_size if finished is None else finished.world_size)
    seek: Callable[[], WayOut] | None = None
    known: dict[str, Any] = {"optimizer_bytes": optimizer_bytes, "keeps_results": keeps_results}
    if finished is None:
        captured = source if isinstance(source, Program) else _captured(source, checked)
        described.check_format(checked.precision.compute)
        loop = Loop(accumulation, no_sync)
        setting = Setting(checked, world_size, described, loop=loop)
        named = source if isinstance(source, Target) else None
        given = checked, described, world_size, loop, {"clips": clips, **known}
        seek = partial(way_out, named, captured, *given, says)
        if checked.parallel.pipeline > 1:
            view = _of_pipeline(captured, setting, clips, basis, **known)
            return replace(view, seek=seek)
        program = run(captured, setting, proof=Proof.END)
    else:
        program = replace(finished, hardware=described)
    compiled = reports.regions_as(basis, program)
    found = forecast(program, described, clips, compiled=compiled, **known)
    held = shown(
        program, found.memory, found.traffic, optimizer_bytes, compiled, keeps_results, basis
    )
    return PredictionView(found, held, basis, seek)


def _of_pipeline(
    captured: Program, setting: Setting, clips: bool, basis: str, optimizer_bytes: int,
    keeps_results: bool,
) -> PipelineView:  # fmt: skip
    """Return what a step of all stages of a pipeline holds and takes."""
    size = setting.plan.parallel.num_stages
    programs = stage_programs(captured, setting)
    compiled = [reports.regions_as(basis, program) for program in programs]
    found = pipeline_forecast(
        programs, setting.hardware, clips, optimizer_bytes, keeps_results, compiled
    )
    memories = [
        shown(f.program, f.memory, f.traffic, optimizer_bytes, regions, keeps_results, basis)
        for f, regions in zip(found.stages, compiled, strict=True)
    ]
    at = unit_positions(captured.params.values(), setting.plan.parallel)
    units = tuple(tuple(u for u, there in at.items() if there == i) for i in range(size))
    return PipelineView(found, tuple(memories), units, _better_cuts(found, units), basis)


def stage_programs(captured: Program, setting: Setting) -> list[Planned]:
    """Return the proved programs of all stages of a pipeline, from the call of a micro-batch."""
    parallel = setting.plan.parallel
    whole = run(captured, setting, WHOLE, proof=Proof.END)  # what all stages begin with
    stages = cut(whole, parallel, range(parallel.num_stages))
    programs = [
        resume(stage, replace(setting, position=position, loop=stage.loop), CUT)
        for position, stage in enumerate(stages)
    ]
    for program in programs:
        verify(program)
    verify_stages(programs)
    for rank in range(parallel.pipeline):
        with_other_stages(programs[rank :: parallel.pipeline])
    return programs


def _better_cuts(found: PipelineForecast, units: Sequence[Sequence[str]]) -> BetterCuts | None:
    """Return cuts that shorten the longest pipeline stage, None if none gains much."""
    weights = {unit: 0.0 for own in units for unit in own}
    for stage in found.stages:
        for span in stage.timeline.spans:
            task = span.task
            if task.lane is Lane.COMPUTE and task.unit in weights and task.graph != "step":
                weights[task.unit] += task.us
    names = list(weights)
    starts = [*balanced([*weights.values()], len(units)), len(names)]
    now = max(sum(weights[u] for u in own) for own in units)
    then = max(sum(weights[u] for u in names[a:b]) for a, b in pairwise(starts))
    if then > (1 - GAIN) * now:
        return None
    return BetterCuts(tuple(names[start] for start in starts[1:-1]), now, then)


def _source(
    target: str | Target | Program, has_plan: bool, batch: int, seq: int
) -> Target | Program:
    """Return the named model, or the given captured or finished program."""
    if isinstance(target, str) and Path(target).is_dir():
        target = load_program(target)
    if not isinstance(target, (str, Target, Program)):
        raise PlanError(
            f"predict was given an object of type {type(target).__name__}. It takes a captured "
            "program, or a name such as 'file.py:function'. Capture a model first: "
            "zerofx.predict(zerofx.capture(model, args), plan, hardware=..., world_size=...)."
        )
    if isinstance(target, Program):
        if isinstance(target, Planned) and target.is_laid_out and has_plan:
            raise PlanError(
                f"the program of {target.model_name} is finished for world {target.world_size}: "
                "its plan is fixed. Leave out the plan, or give the captured program."
            )
        return target
    return target if isinstance(target, Target) else resolve(target, batch, seq)


def _captured(named: Target, plan: Plan) -> Captured:
    options = capture_options(plan)
    if plan.parallel.pipeline > 1:  # its backward begins before the call returns
        options["outputs"] = "loss"
    with own_errors(named.name, "its forward"):
        return capture(named.module, named.args, named.kwargs, **options)
