"""Pointwise work compiled as regions are: once, before the ranks start, which load it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zerofx.compat.inductor import compile_region, inductor_problem, load_artifact
from zerofx.errors import DoctorError
from zerofx.tools.calibrate.compute import COMPILED, COMPILED_BYTES, memories, operands, sizes_of
from zerofx.tools.calibrate.probe import Probe


def compile_all(folder: Path) -> str:
    """Compile every kernel of `compiled`; return why there are none, empty where there are."""
    if problem := inductor_problem():
        return problem
    for kind in COMPILED:
        for size in sizes_of(kind, COMPILED_BYTES):
            spec = ("float32", (size // 4,), (1,), "cpu")
            made = compile_region(_graph(kind, size), (spec, spec), _path(folder, kind, size))
            if made is None:
                raise DoctorError(f"Inductor made no code of {kind} work.")
    return ""


def _graph(kind: str, size: int) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    def results(a, b):  # type: ignore[no-untyped-def]  # annotations would be part of the graph
        found = COMPILED[kind](a, b)
        return found if isinstance(found, tuple) else (found,)

    return make_fx(results)(*operands(size))


def _path(folder: Path, kind: str, size: int) -> str:
    return str(folder / f"{kind}_{size}.bin")


def compiled(folder: Path) -> list[Probe]:
    """Return the probes of what was compiled into a folder."""

    def function_of(kind: str, size: int) -> Callable[[Tensor, Tensor], object]:
        run = load_artifact(_path(folder, kind, size))
        assert run is not None, (kind, size)
        return lambda a, b: run([a, b])

    return memories("inductor", COMPILED, COMPILED_BYTES, function_of)
