"""Views of a program: its schedule, its memory, its lanes over time.

Methods of Program import these functions when they are called, so that training loads no view.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zerofx.analysis.memory.memory import ATEN, BASES, runs_compiled
from zerofx.analysis.memory.storage import Compiled
from zerofx.analysis.time.forecast import Forecast, compute_format, forecast
from zerofx.analysis.time.steps import schedule as steps
from zerofx.errors import PlanError, UnpricedError
from zerofx.hardware import Hardware, load_hardware
from zerofx.ir.meta import value
from zerofx.ir.program import Planned, Program
from zerofx.ir.settle import with_sizes
from zerofx.model.allocations import compiled_regions
from zerofx.plan.fields import one_of
from zerofx.tools.views import look, memory, schedule
from zerofx.tools.views.recording import RecordingView, load_recording

_Path = str | os.PathLike[str]
Recorded = RecordingView | _Path | Sequence[_Path] | None


def schedule_of(program: Program, basis: str = ATEN) -> schedule.ScheduleView:
    """Return the schedule of each lane. basis: as in `regions_as`."""
    return schedule.view(program, regions_as(basis, program.planned()), basis)


def memory_of(
    program: Program,
    basis: str = ATEN,
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> memory.MemoryView:
    """Return the memory of a rank. basis: as in `regions_as`; options: of `views.memory.view`.

    sizes: values of symbols of the program; the others have their hints.
    """
    if sizes is not None:
        program = with_sizes(program, sizes)
    compiled = regions_as(basis, program.planned())
    return memory.view(program, compiled=compiled, basis=basis, **options)


def regions_as(basis: str, program: Planned) -> Compiled:
    """Return the regions that are counted as compiled; none by the basis "aten".

    basis: "aten" counts regions op by op; "compiled" compiles those that the cache lacks and counts
        their own allocations. So neither depends on the cache.

    Raises:
        PlanError: there is no such basis, or the regions would be compiled for another type of
            device than the hardware has.
        ProgramError: there is no compiler.
    """
    one_of(*BASES)("basis", basis)
    if basis == ATEN or not program.is_laid_out or not runs_compiled(program):
        return {}
    values = (value(n) for name in program.graphs for n in program.placeholders(name))
    device = next((v.device.type for v in values if isinstance(v, torch.Tensor)), "cpu")
    hardware = program.hardware
    if device != hardware.device_type:
        raise PlanError(
            f"basis = {basis!r}: the regions of {program.model_name} would be compiled for "
            f"{device}, and {hardware.name} is {hardware.device_type}. Use basis='aten', or "
            f"hardware of the type {device}."
        )
    return compiled_regions(program)


def look_at(
    program: Program,
    recording: Recorded = None,
    hardware: Hardware | _Path | None = None,
    predicted: Forecast | None = None,
    basis: str = ATEN,
) -> look.Look:
    """Return a program's lanes; without times if the hardware lacks what the schedule uses.

    recording: or its files, one per rank. predicted: its prediction on `hardware`, if known.
    basis: as in `regions_as`.
    """
    unpriced = ""
    if hardware is not None and predicted is None:
        described = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
        if isinstance(program, Planned):
            program = replace(program, hardware=described)
    planned = program.planned()
    compiled = regions_as(basis, planned)
    if hardware is not None and predicted is None:
        try:
            described.check_format(compute_format(planned))
            predicted = forecast(planned, described, compiled=compiled)
        except UnpricedError as error:
            unpriced = str(error)
    if isinstance(recording, (str, os.PathLike)):
        recording = [recording]
    if recording is not None and not isinstance(recording, RecordingView):
        recording = load_recording(*recording)
    recorded = [] if recording is None else recording.of(planned)
    return look.look(program, steps(planned, compiled), predicted, recorded, unpriced, basis)
