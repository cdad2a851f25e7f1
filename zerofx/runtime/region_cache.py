"""The cache of compiled regions: each compiled by Inductor once per structure, then loaded."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import torch

from zerofx.collector import paused_collector
from zerofx.compat.inductor import (
    compile_region,
    import_inductor,
    inductor_problem,
    load_artifact,
    probe_compiler,
)
from zerofx.errors import ProgramError
from zerofx.runtime.region_keys import artifact_key, cache_dir, mark_of_use
from zerofx.runtime.region_trace import trace_region

Region = Callable[[list[torch.Tensor]], Any]


class CompileCount:
    """How many regions this process compiled and how many it took from the cache."""

    compiled = 0
    cached = 0


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


@paused_collector()
def compile_all(modules: dict[str, ModuleType]) -> dict[str, Region]:
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
