"""Cache of compiled regions: its folders, and keys made of all that machine code depends on."""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerofx.runtime.regions.private import private_folder, private_root, remove_foreign


def cache_dir() -> Path:
    """Return this user's private cache folder for compiled regions and emitted programs."""
    base = os.environ.get("ZEROFX_CACHE_DIR")
    return private_root(Path(base) if base else Path.home() / ".cache" / "zerofx")


def regions_dir() -> Path:
    """Return the folder of compiled regions."""
    return private_folder(cache_dir() / "regions")


def artifact_path(source: str, device: str) -> Path:
    """Return the path of the compiled form of a region's source, which may not exist yet.

    Its files contain code that will run, so files that another user created or may write to are
    removed first.
    """
    path = regions_dir() / f"{artifact_key(source, device)}.bin"
    files = [path.with_suffix(suffix) for suffix in (".bin", ".json", ".py", ".sizes")]
    libraries = (path.with_suffix(f".{number}.so") for number in itertools.count())
    files += itertools.takewhile(os.path.lexists, libraries)
    if remove_foreign(files):
        for file in files:  # the remaining files are not a complete artifact
            file.unlink(missing_ok=True)
    return path


def artifact_key(source: str, device: str) -> str:
    """Return the cache key of a region: its code, torch's version, and the machine's flags.

    Comments are left out: they contain line numbers of the user's files, which change with edits.
    """
    facts = [ast.dump(ast.parse(source)), *_surroundings(device), *_threads(device)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


FRACTION = 0.37


def usual_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return representative sizes for which to compile a region that has these sizes.

    They are odd, and no two are equal, so that a compiler does not treat one as a multiple of
    something or as equal to another.
    """
    found: dict[str, Any] = {}
    for name, size in sizes.items():
        if isinstance(size, float):
            found[name] = FRACTION
            continue
        near = max(1 << (size - 1).bit_length(), 16) - 3
        while near in found.values():
            near += 2
        found[name] = near
    return found


@functools.cache
def compiled_by() -> str:
    """Return a digest of how regions are compiled: one version may succeed where another failed."""
    folder = Path(__file__).parents[2] / "compat"
    said = [(folder / f"{name}.py").read_text() for name in ("inductor", "strides")]
    return hashlib.sha256("".join(said).encode()).hexdigest()[:16]


def mark_of_use() -> Path:
    """Return the file that records that regions were compiled here by a process like this one."""
    return regions_dir() / f"{artifact_key('', 'cpu')}.used"


def _threads(device: str) -> list[int | None]:
    """Return the thread counts that CPU kernels are compiled for; they may change per compile."""
    return [torch.get_num_threads(), os.cpu_count()] if device == "cpu" else []


@functools.cache
def _surroundings(device: str) -> list[str]:
    """Return what a compiled region depends on besides its source and the number of threads.

    CPU kernels are compiled for the exact processor model, as extension modules of this Python.
    """
    package = Path(__file__).parents[2]
    ours = (package / "kernels" / "recurrent.py").read_text()  # ops that regions may call
    found = [
        ours,
        compiled_by(),
        torch.__version__,
        str(sys.implementation.cache_tag),
        platform.machine(),
        device,
    ]
    if device != "cpu":
        return [*found, torch.cuda.get_device_name()]
    return [*found, torch.backends.cpu.get_cpu_capability(), _cpu_model()]


def _cpu_model() -> str:
    """Return the processor's name and instructions, or "" if the system does not report them."""
    said = Path("/proc/cpuinfo")
    if not said.exists():
        return platform.processor()
    first = said.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in first if line.startswith(("model", "flags", "Features")))
