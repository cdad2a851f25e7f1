"""Predict a step before it runs: memory, time and what limits it, for any hardware and world."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zerofx.analysis.memory.memory import ATEN
from zerofx.analysis.time.forecast import forecast
from zerofx.api import PlanLike, load_program
from zerofx.capture import capture
from zerofx.errors import PlanError
from zerofx.hardware import Hardware, load_hardware
from zerofx.ir.program import Captured, Loop, Planned, Program
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import Proof, run
from zerofx.passes.placement import capture_options
from zerofx.plan.plan import Plan, as_plan
from zerofx.tools import reports
from zerofx.tools.search.family import Says, silent
from zerofx.tools.search.way_out import WayOut, way_out
from zerofx.tools.targets import Target, own_errors, resolve
from zerofx.tools.views.memory import shown
from zerofx.tools.views.prediction import PredictionView


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
) -> PredictionView:
    """Return what one step of a training loop holds and takes; nothing is run or allocated.

    target: a captured or a finished program, or what the command line takes: `package:function`,
        `file.py:function`, `hf:config.json`, an emitted directory. A finished program keeps its
        plan and world.
    hardware: a description, a preset's name (`zerofx.hardware.hardware_names()`), or a file.
    batch, seq: of an `hf:` model's call.
    accumulation, no_sync: backwards a step, and whether all but the last run under no_sync.
    clips: the loop clips the global norm. optimizer_bytes: of optimizer state an element.
    keeps_results: the loop holds all results until the step, not the loss alone.
    basis: what regions are counted as in memory: "aten", op by op, or "compiled", as Inductor
        compiles them; those that the cache lacks are compiled then.
    says: told what is done next, and whether that is of interest until the next thing only.

    Where the plan does not fit, `view.way_out` is the nearest plan that does: it is looked for when
    it is first asked for or printed, among a bounded number of plans.

    Raises:
        PlanError: the hardware is unknown or does not multiply in the plan's format; a plan was
            given for a finished program; or the plan cannot be.
    """
    described = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    checked = as_plan(plan)
    source = _source(target, plan is not None, batch, seq)
    finished = source if isinstance(source, Planned) and source.is_laid_out else None
    described.check_world(world_size if finished is None else finished.world_size)
    seek: Callable[[], WayOut] | None = None
    known: dict[str, Any] = {"optimizer_bytes": optimizer_bytes, "keeps_results": keeps_results}
    if finished is None:
        if checked.parallel.pipeline > 1:
            raise PlanError(
                f"predict prices one program, and Plan.parallel.pipeline = "
                f"{checked.parallel.pipeline} makes one a stage. Capture a micro-batch, and give "
                "predict each of zerofx.rewrite(captured, plan, world_size, position=...): what a "
                "stage holds in a step, and takes for a micro-batch"
            )
        captured = source if isinstance(source, Program) else _captured(source, checked)
        described.check_format(checked.precision.compute)
        loop = Loop(accumulation, no_sync)
        setting = Setting(checked, world_size, described, loop=loop)
        program = run(captured, setting, proof=Proof.END)
        named = source if isinstance(source, Target) else None
        given = checked, described, world_size, loop, {"clips": clips, **known}
        seek = partial(way_out, named, captured, *given, says)
    else:
        program = replace(finished, hardware=described)
    compiled = reports.regions_as(basis, program)
    found = forecast(program, described, clips, compiled=compiled, **known)
    held = shown(
        program, found.memory, found.traffic, optimizer_bytes, compiled, keeps_results, basis
    )
    return PredictionView(found, held, basis, seek)


def _source(
    target: str | Target | Program, has_plan: bool, batch: int, seq: int
) -> Target | Program:
    """Return the model that was named, or the captured or finished program that was given."""
    if isinstance(target, str) and Path(target).is_dir():
        target = load_program(target)
    if not isinstance(target, (str, Target, Program)):
        raise PlanError(
            f"predict takes a captured program or a target such as 'file.py:function', got "
            f"{type(target).__name__}; capture a model first: "
            "zerofx.predict(zerofx.capture(model, args), plan, hardware=..., world_size=...)"
        )
    if isinstance(target, Program):
        if isinstance(target, Planned) and target.is_laid_out and has_plan:
            raise PlanError(
                f"the program of {target.model_name} is finished for world {target.world_size}: "
                "its plan is settled; leave out the plan, or give the captured program"
            )
        return target
    return target if isinstance(target, Target) else resolve(target, batch, seq)


def _captured(named: Target, plan: Plan) -> Captured:
    with own_errors(named.name, "its forward"):
        return capture(named.module, named.args, named.kwargs, **capture_options(plan))
