"""Run the benchmarks whose figures README.md and docs/ show, and remember which file each wrote.

    python -m benchmarks.runs                      list the runs, and what was measured when
    python -m benchmarks.runs --measure            those whose file is of another zerofx/, in turn
    python -m benchmarks.runs --measure "islands"  this one, whatever there is

The list needs only git. --measure takes about two hours in all, on a machine that does nothing
else; an interrupted call goes on where it stopped. A run that needs what this machine lacks is left
out by name. Then `python -m benchmarks.figures --write` enters the figures into the pages.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, source

ROOT = RESULTS.parents[1]
CURRENT = RESULTS / "current.json"  # name of a run -> its file, without .json
BUILD = ROOT / "build" / "runs"
FRESH_S = 1800  # a calibration is of the minutes around the run that it predicts
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Run:
    """A benchmark with its arguments.

    name: what figures.py calls its file.
    arguments: as the docs have them. {hardware} is a calibration of this machine, {gloo} one over
        gloo, {disk} an empty folder, {peers} the interpreter that benchmarks/peers.py describes.
    limit_s: seconds after which it has failed.
    packages: what it needs beside zerofx's own dependencies.
    """

    name: str
    arguments: str
    limit_s: int = 600
    packages: tuple[str, ...] = ()


ALL = "eager,again,eager kept heap,aten,auto,inductor,torch.compile"
RUNS = (
    Run("budget", "budget --models gpt", 900),
    Run("compile time", "compile_time", 900),
    Run("first steps", "first_steps", 1200),
    Run("one process", f'one_process --systems "{ALL}" --turns 12', 1200),
    Run("slow links", "slow_links --hardware {gloo}", 300),
    Run("slow links, nodes", "slow_links --ranks-per-node 2", 300),
    Run("slow links, losses", "slow_links --losses 300", 300),
    Run("predicted", "predicted --hardware {hardware}", 600),
    Run("predicted, aten", "predicted --hardware {hardware} --kernels aten", 600),
    Run("lengths", "lengths", 300),
    Run("lengths, aten", "lengths --kernels aten", 300),
    Run("islands", "islands --only experts,packed,drop", 300),
    Run("islands, libraries", "islands --only DETR,GCN", 400, ("PIL", "torch_geometric")),
    Run("parallel", "parallel --axes tensor sequence pipeline --turns 8", 400),
    Run("parallel, 4 ranks",
        "parallel --axes tensor-data sequence-data pipeline-data --turns 8", 600),
    Run("parallel, deepspeed", "parallel --axes deepspeed", 300, ("deepspeed",)),
    Run("large tiles", "tiling --width 8192 --hidden 32768 --batch 4", 400),
    Run("precision of steps",
        "step_time --systems zerofx-3-recompute,zerofx-3-bf16,zerofx-0-bf16 --sizes 8x384", 400),
    Run("table rows", "table_rows", 300),
    Run("step time", "step_time", 1200),
    Run("offload", "offload --deepspeed-python {peers}", 600),
    Run("memory", "memory", 600),
    Run("overlap", "overlap", 400),
    Run("overlap, nvme", "overlap --states nvme --folder {disk}", 500),
    Run("overlap, predicted", "overlap --batches 4 --rounds 2 --hardware {hardware}", 200),
    Run("overlap, nvme predicted",
        "overlap --batches 4 --rounds 2 --hardware {hardware} --states nvme --folder {disk}", 200),
    Run("larger than memory", "bigger_than_memory --folder {disk}", 400),
    Run("predicted, axes",
        "predicted --hardware {hardware} --axes tensor sequence context pipeline", 1200),
    Run("memory matrix", "memory_matrix", 1500),
)  # fmt: skip


def current() -> dict[str, str]:
    """Return the file of each run that has one, without .json."""
    found: dict[str, str] = json.loads(CURRENT.read_text(encoding="utf-8"))
    return found


def file_of(name: str) -> str:
    """Return the file of a run, without .json.

    Raises:
        KeyError: it was never measured.
    """
    return current()[name]


def state(name: str, now: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of a run's file: where it is, of which commit, and whether of `now`."""
    file = current().get(name)
    if file is None:
        return {"file": None, "commit": None, "same": False}
    of = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8")).get("source") or {}
    same = bool(of) and not of["edited"] and of["package"] == now["package"] and not now["edited"]
    return {"file": file, "commit": of.get("commit"), "same": same}


def lacks(run: Run, peers: Path) -> str:
    """Return what this machine lacks for a run, or ""."""
    for package in run.packages:
        if importlib.util.find_spec(package) is None:
            return f"the package {package}"
    if "{peers}" in run.arguments and not peers.exists():
        return f"{peers}, which benchmarks/peers.py describes"
    return ""


def measure(run: Run, peers: Path) -> str:
    """Run a benchmark; return the file that it wrote, without .json, or "" if it wrote none.

    Its output goes to build/runs. A benchmark that misses a target of its own fails after it has
    written its file, which counts.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    peers = peers.relative_to(ROOT) if peers.is_relative_to(ROOT) else peers
    places = {"peers": str(peers), "disk": "", "hardware": "", "gloo": ""}
    if "{disk}" in run.arguments:
        places["disk"] = str(BUILD / "disk")
        Path(places["disk"]).mkdir(exist_ok=True)
    for kind in ("hardware", "gloo"):
        if f"{{{kind}}}" in run.arguments:
            places[kind] = str(calibration(kind))
    words = shlex.split(run.arguments.format(**places))
    output = BUILD / f"{re.sub('[^a-z0-9]+', '-', run.name)}.log"
    if not finished([f"benchmarks.{words[0]}", *words[1:]], output, run.limit_s):
        print(f"{run.name}: not after {run.limit_s} s; see {output}")
    found = re.findall(r"written to \S*?([\w-]+)\.json", output.read_text(encoding="utf-8"))
    return str(found[-1]) if found else ""


def calibration(kind: str) -> Path:
    """Return a file with a calibration of this machine, made in the last minutes."""
    path = BUILD / f"{kind}.yaml"
    if not path.exists() or time.time() - path.stat().st_mtime > FRESH_S:
        transport = {"ZEROFX_TRANSPORT": "gloo"} if kind == "gloo" else {}
        words = ["zerofx", "doctor", "--calibrate", "--out", str(path)]
        if not finished(words, BUILD / f"{kind}.log", 400, transport) or not path.exists():
            raise SystemExit(f"the calibration failed; see {BUILD / kind}.log")
    return path.relative_to(ROOT)


def finished(
    module: list[str], output: Path, limit_s: int, more: dict[str, str] | None = None
) -> bool:
    """Run a module with its arguments; return whether it ended within the limit."""
    command = ["timeout", str(limit_s), sys.executable, "-m", *module]
    environment = QUIET | dict(os.environ) | (more or {})
    with output.open("w") as file:
        ended = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, check=False
        )
    return ended.returncode != 124  # timeout's


def enter(name: str, file: str) -> None:
    """Remember the file of a run."""
    found = (current() if CURRENT.exists() else {}) | {name: file}
    CURRENT.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def again(chosen: list[Run], peers: Path, force: bool) -> bool:
    """Measure, in turn, what is not of the present zerofx/; return whether all of it could be."""
    complete = True
    for run in chosen:
        if not force and state(run.name, source())["same"]:
            continue
        missing = lacks(run, peers)
        start = time.monotonic()
        file = "" if missing else measure(run, peers)
        if file:
            enter(run.name, file)
        complete = complete and bool(file)
        took = f"{time.monotonic() - start:.0f} s"
        told = f"left out, as it needs {missing}" if missing else f"{file or 'no file'}, {took}"
        print(f"{run.name}: {told}", flush=True)
    return complete


def main(arguments: list[str]) -> int:
    """List the runs, or measure; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", nargs="*", metavar="NAME", help="all, or these runs")
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "peers" / "bin" / "python",
                        help="the interpreter that benchmarks/peers.py describes")  # fmt: skip
    options = parser.parse_args(arguments)
    named = {run.name: run for run in RUNS}
    for name in options.measure or ():
        if name not in named:
            parser.error(f"--measure {name!r}: the runs are {', '.join(map(repr, named))}.")
    complete = True
    if options.measure is not None:
        chosen = [named[name] for name in options.measure] or list(RUNS)
        complete = again(chosen, options.peers, force=bool(options.measure))
    now = source()
    states = [state(run.name, now) for run in RUNS]
    for run, found in zip(RUNS, states, strict=True):
        of = "of this zerofx/" if found["same"] else f"of {found['commit'] or 'an older commit'}"
        print(f"{run.name:<24} {found['file'] or 'never measured':<36} {of}")
    print(f"{sum(found['same'] for found in states)} of {len(RUNS)} are of zerofx/ as it is now")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
