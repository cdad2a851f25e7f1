"""Start the ranks of a trial through torchrun, and read the report of rank 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from zerofx.errors import TrialError, last_words
from zerofx.tools.trial.settings import Settings, Trial

TAIL_LINES = 15  # of the ranks' output, if they failed for another reason than a user's error


def run_trial(settings: Settings) -> Trial:
    """Run a trial on new ranks, each a process on this machine.

    Raises:
        TrialError: the ranks could not train; the message has the reason.
    """
    with tempfile.TemporaryDirectory(prefix="zerofx-trial-") as folder:
        given, report = Path(folder) / "settings.json", Path(folder) / "report.json"
        settings.write(given)
        ended = subprocess.run(
            [*_command(settings.world), "-m", "zerofx.tools.trial.ranks", str(given), str(report)],
            env=_environment(settings.world), capture_output=True, text=True, check=False,
        )  # fmt: skip
        found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if "error" in found:
        raise TrialError(found["error"])
    if ended.returncode or not found:
        said = last_words(ended.stderr, TAIL_LINES)
        raise TrialError(
            f"verify --run: the ranks ended with status {ended.returncode}. Last output:\n{said}"
        )
    return Trial.from_dict(found)


def _command(world: int) -> list[str]:
    if world == 1:
        return [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={world}"]


def _environment(world: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // world)
    here = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {"OMP_NUM_THREADS": str(threads)} | alone | {"PYTHONPATH": here}
