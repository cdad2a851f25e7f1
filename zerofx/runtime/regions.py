"""Load an emitted program's regions: as ATen source, or compiled by Inductor once per structure."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Protocol, TextIO

import torch
from torch import fx

from zerofx.collector import paused_collector
from zerofx.compat.graphs import OpNamespace
from zerofx.compat.inductor import (
    compile_region,
    import_inductor,
    inductor_problem,
    load_artifact,
    probe_compiler,
)
from zerofx.errors import ProgramError
from zerofx.runtime.debug import checked
from zerofx.runtime.region_keys import artifact_key, cache_dir, mark_of_use

log = logging.getLogger("zerofx")
Region = Callable[[list[torch.Tensor]], Any]


class CompileCount:
    """How many regions this process compiled and how many it took from the cache."""

    compiled = 0
    cached = 0


def import_file(path: Path, name: str) -> ModuleType:
    """Import one emitted file under a name of its own.

    Always from the source: cached bytecode could be older than an edit made within one second.
    """
    module = ModuleType(name)
    module.__file__ = str(path)
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except SyntaxError as e:
        raise ProgramError(f"{path}:{e.lineno}: {e.msg}; mend the edit or emit again") from e
    exec(code, module.__dict__)
    return module


class Reader(Protocol):
    """Stands in for what loads a schedule's other files: how a schedule is read, not run."""

    def regions(self, directory: Path) -> Any: ...

    def constants(self, directory: Path) -> Any: ...

    def kernels(self, directory: Path) -> Any: ...


_READER: ContextVar[Reader | None] = ContextVar("reader", default=None)


@contextlib.contextmanager
def read_by(reader: Reader) -> Iterator[None]:
    """Give what is imported inside the reader's regions and constants."""
    token = _READER.set(reader)
    try:
        yield
    finally:
        _READER.reset(token)


def load_constants(schedule_file: str) -> Any:
    """Return the program's constants by name."""
    directory = Path(schedule_file).parent
    if (reader := _READER.get()) is not None:
        return reader.constants(directory)
    return import_file(directory / "constants.py", "zerofx_constants")


def load_kernels(schedule_file: str) -> Any:
    """Return the program's fused kernels by name."""
    directory = Path(schedule_file).parent
    if (reader := _READER.get()) is not None:
        return reader.kernels(directory)
    return import_file(directory / "kernels.py", "zerofx_kernels")


def load_regions(schedule_file: str, kernels: str | None = None) -> Any:
    """Return the program's regions by name, each a function of one list that it empties.

    `kernels` defaults to what fingerprint.json says; "inductor" compiles each file once and
    caches the result per user, "aten" runs the file as it stands.
    """
    directory = Path(schedule_file).parent
    if (reader := _READER.get()) is not None:
        return reader.regions(directory)
    facts = json.loads((directory / "fingerprint.json").read_text())
    kernels = kernels or facts["kernels"]
    found = SimpleNamespace()
    paths = sorted((directory / "regions").glob("*.py"))
    modules = {p.stem: import_file(p, f"zerofx_region_{p.stem}") for p in paths}
    if kernels == "inductor" and not _has_compiler():
        kernels = "aten"
    compiled = _compile_all(modules) if kernels == "inductor" else {}
    for name, module in modules.items():
        plain = checked(module, name) if facts["debug"] else getattr(module, name)
        setattr(found, name, compiled.get(name) or plain)
    return found


def _has_compiler() -> bool:
    problem = inductor_problem()
    if problem:
        log.warning("kernels='inductor' falls back to ATen: %s", problem)
    return not problem


_PROBE: list[threading.Thread] = []


def prepare_regions(kernels: str, device: torch.device) -> None:
    """Begin, in the background, what compiling regions needs and capture does not wait for.

    With cold caches the C++ compiler is asked for its vector instructions, program by program: 7 s
    in which this process has a capture and the passes to run. Where regions were compiled before,
    these are likely among them, and loading them needs neither the answer nor Inductor itself.
    """
    if kernels != "inductor" or device.type != "cpu" or _PROBE or mark_of_use().exists():
        return
    if inductor_problem():
        return
    import_inductor()
    _PROBE.append(threading.Thread(target=probe_compiler, daemon=True))
    _PROBE[0].start()


# -- the artifact cache ---------------------------------------------------------------------
@paused_collector()
def _compile_all(modules: dict[str, ModuleType]) -> dict[str, Region]:
    """Compile or load every region; ranks of one host share the work, one region at a time each."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    names = sorted(modules)
    turn = rank * len(names) // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    done: dict[str, Region] = {}
    waiting = names[turn:] + names[:turn]
    for patient in (False, True):  # first what nobody else compiles, then wait for the others
        for name in list(waiting):
            region = _compiled(name, modules[name], patient)
            if region is not None:
                done[name] = region
                waiting.remove(name)
    return done


def _compiled(name: str, module: ModuleType, patient: bool) -> Region | None:
    device = module.INPUTS[0][3] if module.INPUTS else "cpu"
    source = Path(str(module.__file__)).read_text()
    path = cache_dir() / "regions" / f"{artifact_key(source, device)}.bin"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        with _lock(path.with_suffix(".lock"), patient) as held:
            if not held:
                return None
            if not path.exists():
                return _compile(name, module, path)
    if path.stat().st_size:
        region = load_artifact(str(path))
    else:  # nothing to compile: it runs as it stands
        region = getattr(module, name)
    if region is None:  # written by a torch that this one cannot read: compile anew
        with _lock(path.with_suffix(".lock"), True):
            return _compile(name, module, path)
    CompileCount.cached += 1
    return region


@contextlib.contextmanager
def _lock(path: Path, patient: bool) -> Iterator[bool]:
    with _opened(path) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if patient else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def _opened(lock: Path) -> TextIO:
    try:
        return open(lock, "w")
    except OSError as e:
        if e.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise ProgramError(
            f"a region is to be compiled, and the cache {lock.parent} cannot be written to "
            f"({e.strerror}); set ZEROFX_CACHE_DIR to a directory of your own"
        ) from e


def _compile(name: str, module: ModuleType, path: Path) -> Region:
    for probe in _PROBE:
        probe.join()
    mark_of_use().touch()
    gm = trace_region(getattr(module, name), len(module.INPUTS))
    compiled = compile_region(gm, module.INPUTS, str(path))
    if compiled is None:  # remembered as an empty artifact
        path.write_bytes(b"")
        return getattr(module, name)  # type: ignore[no-any-return]
    CompileCount.compiled += 1
    return compiled


class _Recorder:
    """Stands for `aten` while a region is traced: a call becomes a node, whatever its arguments."""

    def __init__(self, tracer: fx.proxy.GraphAppendingTracer, target: Any) -> None:
        self._tracer, self._target = tracer, target

    def __getattr__(self, name: str) -> _Recorder:
        return _Recorder(self._tracer, getattr(self._target, name))

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        return self._tracer.create_proxy("call_function", self._target, args, kwargs)


def trace_region(function: Any, num_inputs: int) -> fx.GraphModule:
    """Turn a region's source back into a graph by running it on proxies."""
    tracer = fx.proxy.GraphAppendingTracer(fx.Graph())
    args = [fx.Proxy(tracer.graph.placeholder(f"x{i}"), tracer) for i in range(num_inputs)]
    recorded = {
        name: _Recorder(tracer, value) if isinstance(value, OpNamespace) else value
        for name, value in function.__globals__.items()
    }
    body = FunctionType(function.__code__, recorded, function.__name__)
    results = body(args)
    if not isinstance(results, (tuple, list)):
        results = (results,)
    tracer.graph.output(tuple(r.node for r in results))
    gm = fx.GraphModule(torch.nn.Module(), tracer.graph)
    gm.graph.lint()
    return gm
