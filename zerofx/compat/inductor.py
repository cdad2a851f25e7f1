"""Inductor: a graph is compiled without Dynamo, saved, and loaded in another process.

standalone_compile is the only way to do that; it is private until torch makes it public.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import inspect
import json
import logging
import math
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerofx.compat.direct import load_direct, replace_file, save_direct, staging_mark
from zerofx.compat.operators import is_tensor_call, is_view, results_in_inputs
from zerofx.compat.strides import TrueStrides, keep_strides
from zerofx.compat.tracing import Symbols

T = TypeVar("T")
log = logging.getLogger("zerofx")


def inductor_problem() -> str:
    """Return why Inductor cannot compile here, or an empty string if it can."""
    if torch.cuda.is_available():
        return ""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "no C++ compiler found. Install g++, or set kernels='aten' to silence this"
    return ""


def probe_compiler(lock_limit_s: float) -> None:
    """Determine which vector instructions the C++ compiler has; Inductor remembers the result.

    A compile repeats the test if another process holds Inductor's lock for it too long.
    """
    from torch._inductor import cpu_vec_isa

    with contextlib.suppress(TimeoutError), _impatient(lock_limit_s):
        cpu_vec_isa.pick_vec_isa()


def import_inductor() -> None:
    """Import everything that compiling regions needs, so that no other thread imports it."""
    import torch._inductor.compile_fx
    import torch._inductor.cpu_vec_isa
    import torch._inductor.standalone_compile  # noqa: F401


Spec = tuple[str, Sequence[Any], Sequence[Any], str]  # dtype, shape, strides, device type
Specs = tuple[Spec, ...]


def compile_region(
    gm: torch.fx.GraphModule,
    specs: Specs | Callable[..., Specs],
    path: str,
    lock_limit_s: float = 600.0,
    hints: Mapping[str, int] | None = None,
) -> Callable[[list[Any]], Any] | None:
    """Compile a region's graph for inputs of these (dtype, shape, strides, device type).

    With `hints`, the graph takes sizes after its tensors, which vary from call to call, and `specs`
    is a function of them. hints: name of a size -> the value on which the compiler bases decisions.

    The artifact is saved at `path`, after the source that Inductor generated (`wrapper_of`); each
    file is written atomically. The result takes one list of tensors, which it empties. Returns None
    if there is nothing to compile.

    lock_limit_s: how long to wait for each of Inductor's locks that another process holds. After
        that, the region is compiled in a separate cache.
    """
    return _despite_cache(lambda: _compile_region(gm, specs, path, hints or {}), lock_limit_s)


def _spell_out_scales(gm: torch.fx.GraphModule) -> None:
    """Replace add(x, y, alpha=a) by add(x, mul(y, a)).

    Inductor fuses a sum with a matrix product, and forgets this factor of the product.
    """
    add, mul = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
    for node in gm.graph.find_nodes(op="call_function", target=add):
        scale = node.kwargs.get("alpha", 1)
        if scale != 1:
            with gm.graph.inserting_before(node):
                node.args = node.args[0], gm.graph.call_function(mul, (node.args[1], scale))
            node.kwargs = {}
    gm.recompile()


def _compile_region(
    gm: torch.fx.GraphModule,
    specs: Specs | Callable[..., Specs],
    path: str,
    hints: Mapping[str, int],
) -> Callable[[list[Any]], Any] | None:
    from torch._inductor import config, standalone_compile

    calls = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    if all(is_view(target) for target in calls if is_tensor_call(target)):
        return None  # Inductor generates no code for views, and warns that it has nothing to save
    _spell_out_scales(gm)
    options: dict[str, Any] = {"config_patches": _config()}
    aliases = results_in_inputs(gm.graph)
    symbols = Symbols(hints) if hints else None
    usual = specs(*hints.values()) if callable(specs) else specs
    with torch.no_grad(), config.patch(options["config_patches"]):
        # Tensors created without inputs.
        mode: FakeTensorMode = TrueStrides(allow_non_fake_inputs=True)
        fakes: list[Any] = [*_fakes(mode, usual), *hints.values()]
        keep_strides(gm, fakes)
    compile_graph = functools.partial(standalone_compile, gm, options=options)
    with torch.no_grad(), _generated_source() as sources:
        if symbols is None:
            artifact = compile_graph(fakes, dynamic_shapes="from_example_inputs")
        else:
            mode = FakeTensorMode(shape_env=symbols.env, allow_non_fake_inputs=True)
            sizes = symbols.sizes.values()
            assert callable(specs), "a region with sizes has specs that depend on them"
            given: list[Any] = [*_fakes(mode, specs(*sizes)), *sizes]
            with torch._guards.tracing(torch._guards.TracingContext(mode)):
                artifact = compile_graph(given, dynamic_shapes="from_tracing_context")
    if not sources:  # everything was simplified away
        return None
    replace_file(Path(wrapper_of(path)), "".join(sources).encode())
    if symbols is not None:
        if constants := symbols.constants():
            raise NarrowedError(
                f"compiled, the region only holds for one value of {', '.join(sorted(constants))}, "
                "a size that varies"
            )
        said = json.dumps(symbols.conditions())
        replace_file(_conditions_file(path), said.encode())
    if len(sources) == 1 and all(device == "cpu" for *_, device in usual):
        save_direct(sources[0], aliases, path)
    staging = f"{path}.{staging_mark()}"
    artifact.save(path=staging, format="binary")
    os.chmod(staging, 0o600)  # it is run only if no other user may write to it
    os.replace(staging, path)
    return _boxed(artifact)


def _fakes(mode: FakeTensorMode, specs: Sequence[Spec]) -> list[torch.Tensor]:
    with mode:
        return [
            torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
            for dtype, shape, stride, device in specs
        ]


class NarrowedError(RuntimeError):
    """Inductor has specialised on the value of a size that varies."""


def conditions_of(path: str) -> tuple[str, ...]:
    """Return the conditions on the sizes of a call under which the artifact may be used.

    They are Python expressions. The graph's own conditions on its sizes are separate.

    Raises:
        FileNotFoundError: the artifact at `path` takes no sizes, or is gone.
    """
    return tuple(json.loads(_conditions_file(path).read_text(encoding="utf-8")))


def _conditions_file(path: str) -> Path:
    return Path(f"{path.removesuffix('.bin')}.sizes")


# -- Inductor's shared cache ----------------------------------------------------------------------
def _despite_cache(step: Callable[[], T], limit_s: float) -> T:
    """Run a step that needs Inductor's shared cache; use a separate one if that is unusable.

    Inductor would wait 600 s for a process that was stopped while it held a lock, and then fail. A
    compiler that was killed leaves an incomplete library, which Inductor would load again and
    again. Where either happens as an artifact is loaded, Inductor hides it behind a cache miss.
    """
    from torch._functorch._aot_autograd.autograd_cache import FXGraphCacheMiss

    try:
        with _impatient(limit_s):
            return step()
    except Exception as error:
        if isinstance(error, FXGraphCacheMiss):
            log.info("Inductor's cache cannot be used now. This process has one of its own.")
        elif lock := _timed_out_lock(error):
            log.warning(
                "%s was locked for %g s by another process, which may have been stopped. This "
                "process compiles in a cache of its own.", lock, limit_s,
            )  # fmt: skip
        elif library := _unloadable_library(error):
            log.warning(
                "%s cannot be loaded: its compiler may have been killed. This process compiles in "
                "a cache of its own. Remove that file.", library,
            )  # fmt: skip
        else:
            raise
    with _own_cache():
        return step()


@contextlib.contextmanager
def _impatient(limit_s: float) -> Iterator[None]:
    """Limit the wait for each of Inductor's locks within the block."""
    from torch._inductor import codecache

    before = codecache.LOCK_TIMEOUT
    codecache.LOCK_TIMEOUT = min(before, math.ceil(limit_s))
    try:
        yield
    finally:
        codecache.LOCK_TIMEOUT = before


def _timed_out_lock(error: BaseException | None) -> str | None:
    """Return the file whose lock timed out, if that caused the error."""
    while error is not None:
        if isinstance(error, TimeoutError) and hasattr(error, "lock_file"):  # filelock.Timeout
            return str(error.lock_file)
        error = error.__cause__ or error.__context__
    return None


def _unloadable_library(error: BaseException | None) -> str | None:
    """Return the library of Inductor's cache that cannot be loaded, if that caused the error."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    while error is not None:
        library = getattr(error, "path", None)
        if isinstance(error, ImportError) and library and Path(library).is_relative_to(cache_dir()):
            return str(library)
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Make Inductor use a new cache within the block, without the old precompiled headers."""
    from torch._inductor import config

    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(prefix="zerofx-inductor-", ignore_cleanup_errors=True) as own:
        os.environ[name] = own
        try:
            with config.patch(cpp_cache_precompile_headers=False):
                yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def is_fault_of_machine(error: BaseException, lock_limit_s: float = 600.0) -> bool:
    """Return whether a compilation failed because of the machine, not because of the region.

    No disk space, no memory and no working compiler are faults of the machine. If the error itself
    does not tell, a graph that is known to compile is compiled. If that fails too, the machine is
    at fault.
    """
    from torch._inductor import exc

    of_machine = (
        OSError, MemoryError, ImportError, torch.OutOfMemoryError, subprocess.SubprocessError,
        concurrent.futures.BrokenExecutor, exc.InvalidCxxCompiler, exc.TritonMissing,
        exc.GPUTooOldForTriton,
    )  # fmt: skip
    told: BaseException | None = error
    while told is not None:
        was_killed = isinstance(told, exc.CppCompileError) and any(
            sign in told.output for sign in _NO_MEMORY
        )
        if was_killed or isinstance(told, of_machine):
            return True
        told = getattr(told, "inner_exception", None) or told.__cause__
    try:
        _compile_probe(lock_limit_s)
    except Exception:  # # noqa: BLE001 - whatever it is, the region did not cause it
        return True
    return False


def first_line(error: BaseException) -> str:
    """Return an error's message as one line; for a C++ compiler's output, its first error."""
    from torch._inductor import exc

    inner = getattr(error, "inner_exception", error)
    if isinstance(inner, exc.CppCompileError):
        found = next((line for line in inner.output.splitlines() if "error:" in line), "")
        return f"{type(inner).__name__}: {found.strip()}"
    return f"{type(inner).__name__}: {inner}".splitlines()[0]


_NO_MEMORY = ("Killed", "memory exhausted", "annot allocate memory", "No space left")


def _compile_probe(lock_limit_s: float) -> None:
    """Compile a small graph that no cache contains: its constant is random."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    drawn = random.SystemRandom().random()
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, drawn)),))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        compile_region(
            gm, (("float32", (8,), (1,), device),), str(Path(folder) / "probe.bin"), lock_limit_s
        )


def _config() -> dict[str, Any]:
    """Return the settings of Inductor's configuration that regions need.

    Inductor's own random numbers would differ from eager's. Its CPU kernels reserve space for each
    thread at compile time. If the thread count defaults to the number of cores, they run with as
    many threads as there are later, and write past that space. An explicit count stays valid. With
    `dynamic_threads`, which queries it on each run, even the smallest loop would start threads.
    """
    return {"fallback_random": True, "cpp.threads": torch.get_num_threads()}


def wrapper_of(path: str) -> str:
    """Return the path of the source generated for the artifact at `path`."""
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


def load_artifact(
    path: str, lock_limit_s: float = 600.0
) -> Callable[[list[torch.Tensor]], Any] | None:
    """Load the artifact that `compile_region` saved; None if this torch version cannot read it."""
    direct = load_direct(path)
    if direct is not None:
        return direct
    from torch._functorch._aot_autograd.autograd_cache import FXGraphCacheMiss
    from torch._inductor import CompiledArtifact

    load = functools.partial(CompiledArtifact.load, path=path, format="binary")
    # Of another torch version, the key or the serialisation differs.
    unreadable = AssertionError, RuntimeError, EOFError, FXGraphCacheMiss
    try:
        return _boxed(_despite_cache(load, lock_limit_s))
    except unreadable:
        return None


def _boxed(artifact: Any) -> Callable[[list[torch.Tensor]], Any]:
    """Return an artifact as a function of one list, which it empties.

    An artifact takes its inputs as separate arguments and therefore holds all of them until its
    end. The function within it takes a list and frees each input after its last use.
    """
    within = _taking_a_list(artifact)

    def run(args: list[torch.Tensor]) -> Any:
        taken = list(args)
        args.clear()
        return artifact(*taken) if within is None else within(taken)

    return run


def _taking_a_list(artifact: Any) -> Callable[[list[torch.Tensor]], Any] | None:
    """Return the function of one list that an artifact wraps, or None if torch hides it."""
    outer = getattr(artifact, "_compiled_fn", None)
    while isinstance(outer, FunctionType):
        held = inspect.getclosurevars(outer).nonlocals
        if held.get("params_buffers_flat"):  # they would have to precede the inputs
            return None
        inner = held.get("compiled_fn")
        if inner is not None:
            return inner if getattr(inner, "_boxed_call", False) else None
        outer = held.get("fn")  # the one of torch._dynamo.disable
    return None
