"""Measure this machine, one process alone and then several ranks at once, and describe it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerofx.errors import DoctorError, last_words
from zerofx.hardware import Hardware
from zerofx.tools.calibrate.describe import describe
from zerofx.tools.calibrate.probe import ROUND
from zerofx.tools.calibrate.regions import compile_all
from zerofx.tools.words import counted

ROUNDS = 5
# Tensors above 32 MiB come from the system each time, as they do by default.
KEPT_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
TAIL_LINES = 15  # of the ranks' output, if they failed


def calibrate(
    world: int = 2,
    folder: str | os.PathLike[str] | None = None,
    says: Callable[[str], None] = lambda _: None,
) -> Hardware:
    """Measure one rank alone and, if `world` is larger, that many at once, one core each.

    folder: on the disk to measure as NVMe; by default the folder for temporary files.
    says: called with the next measurement.

    Raises:
        DoctorError: there are fewer cores than ranks, no such folder, or a rank failed.
    """
    cores = len(os.sched_getaffinity(0))
    if not 1 <= world <= cores:
        raise DoctorError(
            f"doctor --calibrate: {counted(world, 'rank')} need as many cores. There "
            f"{'is' if cores == 1 else 'are'} {cores}. Give --world 1 to {cores}."
        )
    if folder is not None and not Path(folder).is_dir():
        raise DoctorError(
            f"doctor --calibrate: {folder} is no folder. Give one on the disk to measure."
        )
    with tempfile.TemporaryDirectory(prefix="zerofx-calibrate-", dir=folder) as scratch:
        here = Path(scratch)
        says("compiling the regions to measure")
        problem = compile_all(here)
        settings = {"rounds": ROUNDS, "folder": scratch, "regions": "" if problem else scratch}
        (here / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        found = {ranks: _measured(here, ranks, says) for ranks in sorted({1, world})}
        return describe(found, here)


def _measured(folder: Path, ranks: int, says: Callable[[str], None]) -> dict[str, Any]:
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    report = folder / f"report{ranks}.json"
    command += ["-m", "zerofx.tools.calibrate.ranks", str(folder / "settings.json"), str(report)]
    who = f"{ranks} ranks at once" if ranks > 1 else "one rank alone"
    says(f"measuring {who}")
    status, said = follow(command, lambda far: says(f"measuring {who}: {far}"))
    if status or not report.exists():
        raise DoctorError(
            f"doctor --calibrate: {counted(ranks, 'rank')} ended with status {status}:\n{said}"
        )
    return json.loads(report.read_text(encoding="utf-8"))


def follow(command: list[str], says: Callable[[str], None]) -> tuple[int, str]:
    """Run ranks; return their status and last output. says: called with each line of progress."""
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, env=_environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as begun:
            for line in begun.stdout or ():
                if line.startswith(ROUND):
                    says(line.strip())
        errors.seek(0)
        return begun.returncode, last_words(errors.read(), TAIL_LINES)


def _environment() -> dict[str, str]:
    """Return an environment with one thread per rank, in which a rank keeps its heap.

    Otherwise glibc may return memory between calls, depending on earlier frees.
    """
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    return KEPT_HEAP | alone | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
