"""Inductor: one graph compiled without Dynamo, saved, and loaded in another process.

standalone_compile is the only way to that; it is private until torch makes it public.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from zerofx.compat.aliases import is_view, results_in_inputs
from zerofx.compat.direct import load_direct, save_direct
from zerofx.compat.graphs import FakeTensorMode


def inductor_problem() -> str:
    """Return why Inductor cannot compile here, empty where it can."""
    if torch.cuda.is_available():
        return ""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "no C++ compiler found; install g++, or set kernels='aten' to silence this"
    return ""


def probe_compiler() -> None:
    """Find out which vector instructions the C++ compiler has; Inductor remembers the answer."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.pick_vec_isa()


def import_inductor() -> None:
    """Import what compiling regions needs, so that a thread beside this one imports nothing."""
    import torch._inductor.compile_fx
    import torch._inductor.cpu_vec_isa
    import torch._inductor.standalone_compile  # noqa: F401


def compile_region(
    gm: torch.fx.GraphModule, specs: tuple[tuple[Any, ...], ...], path: str
) -> Callable[[list[torch.Tensor]], Any] | None:
    """Compile a region's graph for inputs of these (dtype, shape, strides, device type).

    The artifact is saved at `path`, beside it the source that Inductor wrote (`wrapper_of`); the
    result takes one list of tensors, which it empties. None where there is nothing to compile.
    """
    from torch._inductor import standalone_compile

    if all(is_view(n.target) for n in gm.graph.nodes if n.op == "call_function"):
        return None  # Inductor makes no code of views, and warns that it has nothing to save
    fakes: list[Any] = []
    with FakeTensorMode():
        for dtype, shape, stride, device in specs:
            made = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
            fakes.append(made)
    options = {"config_patches": _config()}
    aliases = results_in_inputs(gm.graph)
    with torch.no_grad(), _generated_source() as sources:
        artifact = standalone_compile(
            gm, fakes, dynamic_shapes="from_example_inputs", options=options
        )
    if not sources:  # all was simplified away
        return None
    Path(wrapper_of(path)).write_text("".join(sources), encoding="utf-8")
    if len(sources) == 1 and all(device == "cpu" for *_, device in specs):
        save_direct(sources[0], aliases, path)
    artifact.save(path=path, format="binary")
    return _boxed(artifact)


def _config() -> dict[str, Any]:
    """Return what regions ask of Inductor's configuration.

    Inductor's own random numbers would differ from eager's. Its CPU kernels hold a place for each
    thread of the compile; where that is one for each core, they run with as many as there are
    later, and write past those places. Named outright, the count holds whatever becomes of it; to
    be asked for it on each run (`dynamic_threads`), even the smallest loop would start threads.
    """
    return {"fallback_random": True, "cpp.threads": torch.get_num_threads()}


def wrapper_of(path: str) -> str:
    """Return where the source generated for the artifact at `path` lies."""
    return f"{path.removesuffix('.bin')}.py"


@contextlib.contextmanager
def _generated_source() -> Iterator[list[str]]:
    """Collect the module that Inductor generates, or finds in its cache, within the block."""
    from torch._inductor.graph import GraphLowering

    sources: list[str] = []
    before = GraphLowering.save_output_code
    GraphLowering.save_output_code = sources.append
    try:
        yield sources
    finally:
        GraphLowering.save_output_code = before


def load_artifact(path: str) -> Callable[[list[torch.Tensor]], Any] | None:
    """Load what `compile_region` saved; None where this torch cannot read it."""
    direct = load_direct(path)
    if direct is not None:
        return direct
    from torch._inductor import CompiledArtifact

    try:
        return _boxed(CompiledArtifact.load(path=path, format="binary"))
    except (AssertionError, RuntimeError, EOFError):  # another torch's key or serialisation
        return None


def _boxed(artifact: Any) -> Callable[[list[torch.Tensor]], Any]:
    """Return an artifact as a function of one list, which it empties.

    An artifact takes its inputs one by one and so holds them all to its end; the function within
    takes a list and frees each input behind its last reader.
    """
    within = _taking_a_list(artifact)

    def run(args: list[torch.Tensor]) -> Any:
        taken = list(args)
        args.clear()
        return artifact(*taken) if within is None else within(taken)

    return run


def _taking_a_list(artifact: Any) -> Callable[[list[torch.Tensor]], Any] | None:
    """Return the function of one list that an artifact wraps, None where this torch hides it."""
    outer = getattr(artifact, "_compiled_fn", None)
    while isinstance(outer, FunctionType):
        held = inspect.getclosurevars(outer).nonlocals
        if held.get("params_buffers_flat"):  # they would have to be put before the inputs
            return None
        inner = held.get("compiled_fn")
        if inner is not None:
            return inner if getattr(inner, "_boxed_call", False) else None
        outer = held.get("fn")  # torch._dynamo.disable's
    return None
