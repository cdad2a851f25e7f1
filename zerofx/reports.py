"""What a Program can say of itself: gives its methods (dump, schedule, look, ...) their bodies.

They are written in rooms above ir (views, codegen), which ir may not import; so Program names them,
and importing this room, as the face and the api do, hands them in.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from zerofx.analysis.forecast import Forecast, compute_format, forecast
from zerofx.analysis.steps import schedule as steps
from zerofx.analysis.storage import CompiledRegion
from zerofx.analysis.wrapper import RegionTrace, trace
from zerofx.codegen.emit import emit
from zerofx.codegen.regions import RegionCode, RegionLibrary
from zerofx.compat.inductor import wrapper_of
from zerofx.errors import UnpricedError
from zerofx.hardware import Hardware, load_hardware
from zerofx.ir.dump import dump_program
from zerofx.ir.meta import value
from zerofx.ir.program import BACKWARD, FORWARD, Program, register_reports
from zerofx.runtime.region_keys import artifact_key, cache_dir
from zerofx.views import look, memory, schedule
from zerofx.views.recording import RecordingView, load_recording

_Path = str | os.PathLike[str]
Recorded = RecordingView | _Path | Sequence[_Path] | None


def _dump(program: Program, level: str = "nodes") -> str:
    return dump_program(program, level=level)


def _schedule(program: Program) -> schedule.ScheduleView:
    return schedule.view(program, compiled_regions(program))


def _memory(program: Program, **options: Any) -> memory.MemoryView:
    return memory.view(program, compiled=compiled_regions(program), **options)


def compiled_regions(program: Program) -> dict[fx.Node, CompiledRegion]:
    """Return what this program's regions allocate, of those that Inductor has compiled here."""
    plan = program.plan
    if program.layout is None or plan.kernels != "inductor" or plan.debug:
        return {}
    library = RegionLibrary()
    found: dict[fx.Node, CompiledRegion] = {}
    traces: dict[str, RegionTrace | None] = {}
    for graph in (g for g in (FORWARD, BACKWARD) if g in program.graphs):
        for first, call in library.calls(program.graph(graph)).items():
            if call.code.key not in traces:
                traces[call.code.key] = _trace(call.code, call.inputs)
            known = traces[call.code.key]
            if known is not None and len(known.outputs) == len(call.outputs):
                found[first] = CompiledRegion(call.nodes, call.inputs, call.outputs, known)
    return found


def _trace(code: RegionCode, inputs: tuple[fx.Node, ...]) -> RegionTrace | None:
    device = value(inputs[0]).device.type if inputs else "cpu"
    artifact = cache_dir() / "regions" / f"{artifact_key(code.source, device)}.bin"
    path = Path(wrapper_of(str(artifact)))
    if not path.exists():
        return None
    found = trace(path.read_text(encoding="utf-8"))
    return found if found is not None and found.num_inputs == len(inputs) else None


def look_at(
    program: Program,
    recording: Recorded = None,
    hardware: Hardware | _Path | None = None,
    predicted: Forecast | None = None,
) -> look.Look:
    """Return a program's lanes; without times where the hardware lacks what the schedule uses.

    recording: or its files, one a rank. predicted: what is known already of it on `hardware`.
    """
    compiled, unpriced = compiled_regions(program), ""
    if hardware is not None and predicted is None:
        described = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
        try:
            described.check_format(compute_format(program))
            predicted = forecast(program, described, compiled=compiled)
        except UnpricedError as error:
            unpriced = str(error)
    if isinstance(recording, (str, os.PathLike)):
        recording = [recording]
    if recording is not None and not isinstance(recording, RecordingView):
        recording = load_recording(*recording)
    recorded = [] if recording is None else recording.of(program)
    return look.look(program, steps(program, compiled), predicted, recorded, unpriced)


register_reports(dump=_dump, schedule=_schedule, memory=_memory, emit=emit, look=look_at)
