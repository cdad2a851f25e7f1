"""Allocations of a program's compiled regions, read from Inductor's generated source."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import fx

from zerofx.analysis.memory.memory import runs_compiled
from zerofx.analysis.memory.storage import CompiledRegion
from zerofx.codegen.regions import RegionCall, RegionLibrary
from zerofx.compat.inductor import inductor_problem
from zerofx.compat.wrapper import RegionTrace, trace
from zerofx.errors import ProgramError
from zerofx.ir.meta import value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.runtime.regions.cache import compile_missing, generated_source
from zerofx.runtime.regions.keys import artifact_path
from zerofx.runtime.regions.load import import_file


def compiled_regions(program: Planned) -> dict[fx.Node, CompiledRegion]:
    """Return the regions whose allocations are known from compiled code, by their first nodes.

    Regions that the cache lacks are compiled first, so that the result does not depend on the
    cache. It is empty if the plan runs regions op by op. Regions that Inductor cannot compile are
    left out, because they run op by op as well.

    Raises:
        ProgramError: there is no compiler.
    """
    if not program.is_laid_out or not runs_compiled(program):
        return {}
    library = RegionLibrary(program.sizes.typical)
    calls = [
        (first, call)
        for graph in (FORWARD, BACKWARD)
        if graph in program.graphs
        for first, call in library.calls(program.graph(graph)).items()
        if call.kernel is None
    ]
    traces = _traces({call.code.key: call for _, call in calls}, program.sizes.hints)
    return {
        first: CompiledRegion(call.nodes, call.inputs, call.outputs, known)
        for first, call in calls
        if (known := traces[call.code.key]) is not None and len(known.outputs) == len(call.outputs)
    }


def _traces(
    calls: Mapping[str, RegionCall], sizes: Mapping[str, int]
) -> dict[str, RegionTrace | None]:
    """Return the allocations of each region structure at these sizes; None if they are unknown."""
    paths = {key: artifact_path(call.code.source, _device(call)) for key, call in calls.items()}
    sources = {key: generated_source(path) for key, path in paths.items()}
    missing = [key for key, (_, is_known) in sources.items() if not is_known]
    if missing:
        _compile([calls[key] for key in missing])
        sources |= {key: generated_source(paths[key]) for key in missing}
    found: dict[str, RegionTrace | None] = {}
    for key, (source, _) in sources.items():
        taken = tuple(sizes[name] for name in calls[key].sizes)
        read = trace(source.read_text(encoding="utf-8"), taken) if source is not None else None
        is_same = read is not None and read.num_inputs == len(calls[key].inputs)
        found[key] = read if is_same else None
    return found


def _device(call: RegionCall) -> str:
    return value(call.inputs[0]).device.type if call.inputs else "cpu"


def _compile(calls: list[RegionCall]) -> None:
    """Compile regions into the cache, as the program's first call would."""
    if problem := inductor_problem():
        raise ProgramError(
            f"{len(calls)} regions must be compiled to read their allocations: {problem}. Use "
            "basis='aten', which counts them op by op."
        )
    with tempfile.TemporaryDirectory() as folder:
        for call in calls:
            path = Path(folder) / f"{call.code.name}.py"
            path.write_text(call.code.source, encoding="utf-8")
            compile_missing(call.code.name, import_file(path, call.code.name))
