"""Cache of compiled regions: each is compiled by Inductor once per structure, then loaded.

A region that Inductor cannot compile runs as ATen, with one warning. The cache remembers it, so
that the other ranks of the host and later runs neither retry nor run something else. A failure
caused by the machine (no disk space, no memory, a broken compiler) is an error and is not
remembered.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TextIO

import torch
from torch import fx

from zerofx.comm.meeting import from_environment, timeout_s
from zerofx.compat.direct import replace_file
from zerofx.compat.graphs import OpNamespace
from zerofx.compat.inductor import (
    compile_region,
    conditions_of,
    first_line,
    import_inductor,
    inductor_problem,
    is_fault_of_machine,
    load_artifact,
    probe_compiler,
    wrapper_of,
)
from zerofx.compat.operators import out_of_place
from zerofx.compat.tracing import SIZE_FUNCTIONS
from zerofx.errors import ProgramError
from zerofx.process import paused_collector
from zerofx.runtime.regions.foreman import BUSY, CACHED, COMPILED
from zerofx.runtime.regions.keys import (
    artifact_path,
    compiled_by,
    mark_of_use,
    regions_dir,
    usual_sizes,
)
from zerofx.runtime.regions.progress import Progress

log = logging.getLogger("zerofx")

LOCK_WAIT_S = 60.0
"""How long a process waits for another that compiles the same region, unless ZEROFX_TIMEOUT_S
is less. After that, it compiles the region itself; at worst, the work is done twice."""
_STUCK_S = 2.0  # timeout for Inductor's own locks after waiting for the region's lock has failed
_UNHURRIED_S = 600.0  # the same if no call waits for the result
_NAP_S = (0.01, 0.25)  # between two attempts to take a lock: first and maximum

VARIANTS = 4  # per region, each compiled for other sizes

Region = Callable[[list[Any]], Any]
Hints = Mapping[str, Any]  # name of a size -> the value for which a region is compiled
Variant = tuple[Region, Callable[..., bool] | None]  # a function, and a test of sizes


class CompileCount:
    """The number of regions that this process compiled and the number it took from the cache."""

    compiled = 0
    cached = 0


_PROBE: list[threading.Thread] = []


def prepare_regions(device: torch.device) -> None:
    """Start, in the background, setup for compiling regions that capture does not depend on.

    With cold caches, Inductor tests the C++ compiler for vector instructions, program by program.
    That takes 7 s, during which this process runs capture and the passes. If regions were compiled
    here before, these are likely cached, and loading them needs neither the tests nor Inductor
    itself.
    """
    if device.type != "cpu" or _PROBE or mark_of_use().exists():
        return
    if inductor_problem():
        return
    import_inductor()
    _PROBE.append(threading.Thread(target=probe_compiler, args=(lock_limit_s(),), daemon=True))
    _PROBE[0].start()


@paused_collector()
def compile_all(
    modules: Mapping[str, ModuleType], units: Mapping[str, str] | None = None, label: str = "model"
) -> dict[str, Region]:
    """Compile or load every region; ranks of one host share the work, one region at a time each.

    units: region -> the module of the model that it computes, for warnings. label: the model's
        name, for progress.
    """
    most = 2**31 - 1
    rank = from_environment("LOCAL_RANK", 0, most, 0)
    names = sorted(modules)
    turn = rank * len(names) // from_environment("LOCAL_WORLD_SIZE", 1, most, 1)
    done: dict[str, Region] = {}
    waiting = names[turn:] + names[:turn]
    failed: dict[str, str] = {}
    with Progress(label, len(names)) as progress:
        # first the regions that no other process compiles, then the rest
        for patient in (False, True):
            for name in list(waiting):
                module, before = modules[name], CompileCount.compiled
                path = _path(module, _hints(module))
                made = _compiled(name, module, path, _hints(module), patient)
                if made is not None:
                    done[name] = made[0] if made[1] is None else _Variants(name, module, made)
                    waiting.remove(name)
                    if reason := why_not_compiled(path):
                        failed[name] = reason
                    is_new = CompileCount.compiled > before
                    progress.count("failed" if reason else "compiled" if is_new else "cached")
    if failed and rank == 0:  # the other ranks of this host read the same cache
        _warn(failed, units or {})
    return done


def _warn(failed: dict[str, str], units: Mapping[str, str]) -> None:
    """Report in one warning which regions run as ATen, the module of each, and the reason."""
    said = [f"{name} (of {units.get(name) or 'the model'}): {why}" for name, why in failed.items()]
    log.warning(
        "Inductor cannot compile %d of this program's regions. They run as ATen, as in plain "
        "PyTorch, and the others compiled. Results may differ in the last bits from those of "
        "hosts where it can. It is tried again with another version of torch or zerofx, or after "
        "*.failed is removed from %s. kernels='aten' compiles nothing and silences this.\n  %s",
        len(failed), regions_dir(), "\n  ".join(said),
    )  # fmt: skip


def place_of(module: ModuleType) -> tuple[Path, str]:
    """Return where the artifact of a region lies, or would lie, and the region's source."""
    return _path(module, _hints(module)), Path(str(module.__file__)).read_text()


def compile_for_trainer(name: str, module: ModuleType, path: Path, patient: bool) -> str:
    """Compile a region for another process to load; return what became of it.

    BUSY: a third one compiles it. Only who is `patient` leaves it to that.

    Raises:
        ProgramError: nothing can be compiled on this machine.
        Exception: the region uses an operator that this process does not have.
    """
    with _lock(path.with_suffix(".lock"), 0.0) as held:
        if is_at_hand(path):
            return CACHED
        if patient and not held:
            return BUSY
        _compile(name, module, path, _hints(module), _UNHURRIED_S if held else _STUCK_S)
    return COMPILED


def _path(module: ModuleType, hints: Hints) -> Path:
    specs = _specs(module)
    source = Path(str(module.__file__)).read_text()
    if hints != _hints(module):
        source += f"\nSIZES = {dict(hints)}\n"
    return artifact_path(source, specs[0][3] if specs else "cpu")


def _hints(module: ModuleType) -> Hints:
    """Return the sizes that a region takes, with the values for which it is compiled."""
    return getattr(module, "SIZES", {})  # most have none


def _specs(module: ModuleType) -> Any:
    """Return the tensors that a region takes, for the sizes that it is compiled for."""
    hints = _hints(module)
    return module.INPUTS(**hints) if hints else module.INPUTS


def generated_source(path: Path) -> tuple[Path | None, bool]:
    """Return the path of Inductor's source for an artifact, and whether it is final.

    Inductor generates nothing for a region that consists only of views, or that it cannot compile.
    """
    source = Path(wrapper_of(str(path)))
    if source.exists():
        return source, True
    return None, artifact_bytes(path) == 0 and is_at_hand(path)


def compile_missing(name: str, module: ModuleType) -> None:
    """Compile a region whose generated source is not in the cache."""
    hints, limit_s = _hints(module), lock_limit_s()
    path = _path(module, hints)
    with _lock(path.with_suffix(".lock"), limit_s) as held:
        if not generated_source(path)[1]:
            _compile(name, module, path, hints, limit_s if held else _STUCK_S)


def _patiently(name: str, module: ModuleType, path: Path, hints: Hints) -> Variant:
    made = _compiled(name, module, path, hints, patient=True)
    assert made is not None, "only an impatient caller leaves a region to others"
    return made


def _compiled(
    name: str, module: ModuleType, path: Path, hints: Hints, patient: bool
) -> Variant | None:
    limit_s = lock_limit_s()
    if not is_at_hand(path):
        with _lock(path.with_suffix(".lock"), limit_s if patient else 0.0) as held:
            if not (held or patient):
                return None
            if not is_at_hand(path):
                return _compile(name, module, path, hints, limit_s if held else _STUCK_S)
    num_bytes = artifact_bytes(path)
    if num_bytes == 0:  # nothing to compile: the region runs as is
        found: Variant | None = (getattr(module, name), None)
    else:
        found = _loaded(path, limit_s, hints) if num_bytes else None
    if found is None:  # another torch wrote it, or another process removed it: compile it again
        with _lock(path.with_suffix(".lock"), limit_s) as held:
            return _compile(name, module, path, hints, limit_s if held else _STUCK_S)
    CompileCount.cached += 1
    return found


def _loaded(path: Path, limit_s: float, hints: Hints) -> Variant | None:
    region = load_artifact(str(path), limit_s)
    return None if region is None else _variant(region, path, hints)


# -- Regions that take sizes: a variant fits the sizes for which Inductor would decide alike -------


def _variant(region: Region, path: Path, hints: Hints) -> Variant:
    """Return an artifact with the condition on its sizes, None if it fits all sizes."""
    conditions = conditions_of(str(path)) if hints else ()
    if not conditions:
        return region, None
    text = " and ".join(f"({condition})" for condition in conditions)
    return region, eval(f"lambda {', '.join(hints)}: {text}", {"math": math})


class _Variants:
    """A region compiled for several sizes: a call runs the first variant that fits its sizes.

    If none fits, one is compiled for these sizes, up to `VARIANTS` variants. Further sizes run as
    ATen, with one warning.
    """

    def __init__(self, name: str, module: ModuleType, first: Variant) -> None:
        self._name, self._module = name, module
        self._plain: Region = getattr(module, name)
        self._hints = [_hints(module)]
        self._known = [first]

    def __call__(self, args: list[Any]) -> Any:
        sizes = args[-len(self._hints[0]) :]
        for region, holds in self._known:
            if holds is None or holds(*sizes):
                return region(args)
        return self._another(sizes)(args)

    def _another(self, sizes: list[int]) -> Region:
        own = dict(zip(self._hints[0], sizes, strict=True))
        for hints in (usual_sizes(own), own):
            if hints in self._hints or len(self._known) == VARIANTS:
                continue
            path = _path(self._module, hints)
            region, holds = _patiently(self._name, self._module, path, hints)
            self._hints.append(hints)
            self._known.append((region, holds))
            if holds is None or holds(*sizes):
                return region
        if self._known[-1][0] is not self._plain:
            self._known.append((self._plain, None))
            log.warning(
                "Region %s runs as ATen for sizes such as %s: Inductor has compiled it %d times, "
                "each for other sizes. Set kernels='aten' to silence this.",
                self._name, own, VARIANTS,
            )  # fmt: skip
        return self._plain


def lock_limit_s() -> float:
    """Return how long to wait for a lock of the cache, in seconds.

    This is the smaller of `LOCK_WAIT_S` and ZEROFX_TIMEOUT_S.
    """
    return min(LOCK_WAIT_S, timeout_s())


@contextlib.contextmanager
def _lock(path: Path, limit_s: float) -> Iterator[bool]:
    """Lock a region for the block; yield whether that succeeded within `limit_s`.

    The lock only saves other processes the work. Artifacts appear whole or not at all, so there is
    no need to wait for a process that was stopped while it held the lock, or that hangs.
    """
    with _opened(path) as handle:
        if not _take(handle, limit_s):
            if limit_s:
                _warn_of_holder(path, handle.read(), limit_s)
            yield False
            return
        handle.truncate(0)
        handle.write(f"process {os.getpid()} of {socket.gethostname()}")
        handle.flush()
        yield True


def _take(handle: TextIO, limit_s: float) -> bool:
    nap, longest = _NAP_S
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(nap, left))
            nap = min(longest, nap * 1.5)
        else:
            return True


def _warn_of_holder(path: Path, holder: str, limit_s: float) -> None:
    log.warning(
        "%s was locked for %g s by %s, which may have been stopped. This process compiles the "
        "region itself. Continue or end that process to have regions compiled once.",
        path, limit_s, holder or "another process",
    )  # fmt: skip


def _opened(lock: Path) -> TextIO:
    """Open a lock file; its text names the last process that locked it."""
    try:
        handle = open(lock, "a+")  # noqa: SIM115  (the caller closes it)
        handle.seek(0)
        return handle
    except OSError as e:
        if e.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise ProgramError(
            f"a region must be compiled, and the cache {lock.parent} cannot be written to "
            f"({e.strerror}). Set ZEROFX_CACHE_DIR to a directory of your own."
        ) from e


def _compile(name: str, module: ModuleType, path: Path, hints: Hints, limit_s: float) -> Variant:
    """Compile a region; wait at most `limit_s` for each of Inductor's own locks."""
    for probe in _PROBE:
        probe.join()
    mark_of_use().touch()
    gm = _as_graph(getattr(module, name), len(_specs(module)), list(hints))
    if why_not_compiled(path):  # of another version; the artifact goes first: ranks may look now
        path.unlink(missing_ok=True)
        _failed(path).unlink(missing_ok=True)
    reason, compiled = _refusal(hints), None
    try:
        if not reason:
            compiled = compile_region(gm, module.INPUTS, str(path), limit_s, hints)
    except Exception as e:
        reason = first_line(e)
        if is_fault_of_machine(e, limit_s):
            raise ProgramError(
                f"region {name} could not be compiled on this machine: {reason}. Run `zerofx "
                "doctor` to see what is missing, or set kernels='aten' to run without a compiler."
            ) from e
    if reason:
        note = {"error": reason, "compiled_by": compiled_by()}
        replace_file(_failed(path), json.dumps(note).encode())
    if compiled is None:  # stored as an empty artifact, unless another process compiled it
        if not artifact_bytes(path):
            replace_file(path, b"")
        return getattr(module, name), None
    CompileCount.compiled += 1
    return _variant(compiled, path, hints)


def _refusal(hints: Hints) -> str:
    """Return why a region with these sizes is not compiled, or an empty string if it may be."""
    fractions = [name for name, n in hints.items() if isinstance(n, float)]
    return (
        f"Inductor does not support floats that vary ({', '.join(fractions)})" if fractions else ""
    )


def artifact_bytes(path: Path) -> int | None:
    """Return the size of an artifact: 0 if there is nothing to load, None if there is no file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _failed(path: Path) -> Path:
    """Return the path of the file with the reason why an empty artifact's region failed."""
    return path.with_suffix(".failed")


def why_not_compiled(path: Path) -> str:
    """Return why a region could not be compiled, or an empty string if it was compiled."""
    if artifact_bytes(path):
        return ""
    try:
        return str(json.loads(_failed(path).read_text(encoding="utf-8"))["error"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ""


def is_at_hand(path: Path) -> bool:
    """Return whether there is an artifact, or a failure that this version would repeat."""
    num_bytes = artifact_bytes(path)
    if num_bytes is None or num_bytes:
        return bool(num_bytes)
    try:
        note = json.loads(_failed(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    return isinstance(note, dict) and note.get("compiled_by") == compiled_by()


class _Traced:
    """Replaces `aten` while a region is traced: any call becomes a node, whatever its arguments.

    What writes over its first argument becomes a new value, which that argument's name then has.
    """

    def __init__(self, tracer: fx.proxy.GraphAppendingTracer, target: Any) -> None:
        self._tracer, self._target = tracer, target

    def __getattr__(self, name: str) -> _Traced:
        return _Traced(self._tracer, getattr(self._target, name))

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        target = out_of_place(self._target)
        made = self._tracer.create_proxy("call_function", target, args, kwargs)
        if target is not self._target:
            args[0].node = made.node
        return made


def _as_graph(function: Any, num_inputs: int, sizes: Sequence[str] = ()) -> fx.GraphModule:
    """Turn a region's source back into a graph by running it on proxies: each call is a node."""
    tracer = fx.proxy.GraphAppendingTracer(fx.Graph())
    names = [*(f"x{i}" for i in range(num_inputs)), *sizes]
    args = [fx.Proxy(tracer.graph.placeholder(name), tracer) for name in names]
    recorded = (SIZE_FUNCTIONS if sizes else {}) | {
        name: _Traced(tracer, value) if isinstance(value, OpNamespace) else value
        for name, value in function.__globals__.items()
        if not (sizes and name in SIZE_FUNCTIONS)
    }
    body = FunctionType(function.__code__, recorded, function.__name__)
    results = body(args)
    if not isinstance(results, (tuple, list)):
        results = (results,)
    tracer.graph.output(tuple(r.node for r in results))
    gm = fx.GraphModule(torch.nn.Module(), tracer.graph)
    gm.graph.lint()
    return gm
