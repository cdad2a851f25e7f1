"""Measure this machine: one process alone, then ranks side by side; and describe what was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from zerofx.calibrate.describe import describe
from zerofx.calibrate.regions import compile_all
from zerofx.errors import DoctorError, last_words
from zerofx.hardware import Hardware

ROUNDS = 5
TAIL_LINES = 15  # of what the ranks said, where they failed


def calibrate(world: int = 2, folder: str | os.PathLike[str] | None = None) -> Hardware:
    """Measure one rank alone and, where `world` is more, that many at once, a core each.

    folder: on the disk that stands for NVMe; the one for temporary files by default.

    Raises:
        DoctorError: there are fewer cores than ranks, no such folder, or a rank failed; says how.
    """
    cores = len(os.sched_getaffinity(0))
    if not 1 <= world <= cores:
        raise DoctorError(
            f"doctor --calibrate: {world} ranks need as many cores and there are {cores}; "
            f"give --world 1 to {cores}"
        )
    if folder is not None and not Path(folder).is_dir():
        raise DoctorError(f"doctor --calibrate: {folder} is no folder; give one on the disk to use")
    with tempfile.TemporaryDirectory(prefix="zerofx-calibrate-", dir=folder) as scratch:
        here = Path(scratch)
        problem = compile_all(here)
        settings = {"rounds": ROUNDS, "folder": scratch, "regions": "" if problem else scratch}
        (here / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        found = {ranks: _measured(here, ranks) for ranks in sorted({1, world})}
        return describe(found, here)


def _measured(folder: Path, ranks: int) -> dict[str, Any]:
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    report = folder / f"report{ranks}.json"
    ended = subprocess.run(
        [*command, "-m", "zerofx.calibrate.ranks", str(folder / "settings.json"), str(report)],
        env=_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ended.returncode or not report.exists():
        said = last_words(ended.stderr, TAIL_LINES)
        raise DoctorError(
            f"doctor --calibrate: {ranks} ranks ended with status {ended.returncode}; they said "
            f"last:\n{said}"
        )
    return json.loads(report.read_text(encoding="utf-8"))


def _environment() -> dict[str, str]:
    """Give each rank one thread, as a core each leaves room for."""
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    return alone | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
