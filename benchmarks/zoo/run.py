"""Models of transformers, timm, torchvision, diffusers and torch: same numbers as plain training?

    python -m benchmarks.zoo                               # every part that is installed
    python -m benchmarks.zoo --part timm,diffusers
    python -m benchmarks.zoo --part "2 ranks" --only T5,Swin
    python -m benchmarks.zoo --plain                       # do the models themselves train?

Each model has a process of its own, or one per rank (`examine.py` describes the comparison). A part
that needs a missing package prints how to install it. `--note FILE --resume` continues an
interrupted run, and repeats models that were not equal.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from benchmarks.report import Column, finish, show
from benchmarks.zoo import other_models, transformers_models
from benchmarks.zoo.examine import Case, Outcome, examine, plainly

TIMEOUT_S = 240
# Modules that every model imports: its process is forked from one that has imported them.
PRELOADED = """
    torch torch._inductor.compile_fx zerofx.api zerofx.passes.order zerofx.model.programs
    zerofx.codegen.emit zerofx.codegen.load zerofx.runtime.regions.load benchmarks.zoo.run
    transformers.models.llama.modeling_llama transformers.models.swin.modeling_swin
""".split()


@dataclass(frozen=True)
class Part:
    """Models that are examined together, and form one row of the table.

    needs: packages, and how to install each.
    sample: how many of the models, spread evenly over the list; 0 means all.
    """

    name: str
    cases: Callable[[], Sequence[Case]]
    needs: tuple[tuple[str, str], ...] = ()
    kernels: str = "aten"
    ranks: int = 1
    sample: int = 0

    def missing(self) -> str:
        """Return which package cannot be imported, why, and how to get it; "" if none."""
        for package, install in self.needs:
            try:
                importlib.import_module(package)
            except (ImportError, RuntimeError) as error:
                return f"{package} cannot be imported ({error}). Run: pip install {install}"
        return ""

    def chosen(self) -> list[Case]:
        cases = list(self.cases())
        if not self.sample:
            return cases
        return [cases[i * len(cases) // self.sample] for i in range(self.sample)]


VISION = ("torchvision", "torchvision, of the build that fits torch's: pytorch.org/get-started")
ZOO = "'zerofx[zoo]'"


def _transformers() -> Sequence[Case]:
    return transformers_models.CASES


HUGGING = (("transformers", "'zerofx[test]'"),)
PARTS = [
    Part("transformers", _transformers, HUGGING),
    Part("transformers on 2 ranks", _transformers, HUGGING, ranks=2, sample=40),
    Part("transformers with default kernels", _transformers, HUGGING, "inductor", sample=40),
    Part("timm", other_models.timm_cases, (VISION, ("timm", ZOO))),
    Part("torchvision", other_models.torchvision_cases, (VISION,)),
    Part("diffusers", other_models.diffusers_cases, (("diffusers", ZOO),)),
    Part("torch.nn", other_models.torch_cases, (("torch.testing._internal.common_modules", ZOO),)),
]


# -- one model ------------------------------------------------------------------------------------
def _child(part: str, model: str, rank: int, plain: bool, folder: str, answers: Connection) -> None:
    os.setsid()  # so that the compilers that it starts end with it
    chosen = next(p for p in PARTS if p.name == part)
    case = next(case for case in chosen.cases() if case.model == model)
    if plain:
        answers.send(plainly(case))
        return
    if chosen.ranks > 1:
        store = dist.FileStore(f"{folder}/ranks", chosen.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=chosen.ranks)
    outcome = examine(case, chosen.kernels, rank, chosen.ranks)
    if rank == 0:
        answers.send(outcome)


def examined(part: Part, case: Case, timeout_s: float, plain: bool = False) -> Outcome:
    """Examine one model in processes of its own, one per rank."""
    context = multiprocessing.get_context("forkserver")
    mine, its = context.Pipe(duplex=False)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_child, args=(part.name, case.model, rank, plain, folder, its))
            for rank in range(1 if plain else part.ranks)
        ]
        for process in processes:
            process.start()
        its.close()
        try:
            outcome = mine.recv() if mine.poll(timeout_s) else {"verdict": "too slow"}
        except EOFError:
            outcome = {"verdict": "crash", "detail": "the process ended"}
        for process in processes:
            _end(process)
    took = time.perf_counter() - began
    about = {"part": part.name, "group": case.group, "model": case.model, "commit": commit()}
    return about | {"detail": "", "islands": None, "inside": None, "took_s": took} | outcome


def _end(process: BaseProcess) -> None:
    if process.is_alive() and process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.join()


@cache
def commit() -> str:
    """Return the commit that is examined, with a + if files differ from it."""
    here = Path(__file__).parent
    try:
        said = ["git", "describe", "--always", "--dirty=+", "--abbrev=8", "--exclude=*"]
        return subprocess.run(said, cwd=here, capture_output=True, text=True, check=True).stdout[
            :-1
        ]
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return ""


# -- all of them ----------------------------------------------------------------------------------
GOOD = "equal", "rounding"
COLUMNS = [
    Column("part", "part"),
    Column("models", "models", "{:d}"),
    Column("whole", "captured whole", "{:d}"),
    Column("with_islands", "with islands", "{:d}"),
    Column("inside", "parameters inside", "{:.0%}"),
    Column("refused", "refused", "{:d}"),
    Column("equal", "equal", "{:d}"),
    Column("rounding", "to rounding", "{:d}"),
    Column("different", "different", "{:d}"),
    Column("failed", "failed", "{:d}"),
    Column("no_plain_run", "no plain run", "{:d}"),
]
NOT_EQUAL = [Column(name, name) for name in ("part", "model", "verdict", "brief")]


def counted(part: str, rows: list[Outcome]) -> Outcome:
    """Return a part's row of the table; its models are those that train plainly."""
    verdicts = Counter(row["verdict"] for row in rows)
    trained = [row for row in rows if row["islands"] is not None]
    split = [row for row in trained if row["islands"]]
    return {
        "part": part, "models": len(rows) - verdicts["no plain run"],
        "whole": len(trained) - len(split), "with_islands": len(split),
        "inside": sum(row["inside"] for row in split) / len(split) if split else None,
        "refused": verdicts["refused"], "equal": verdicts["equal"],
        "rounding": verdicts["rounding"], "different": verdicts["different"],
        "failed": verdicts["crash"] + verdicts["too slow"],
        "no_plain_run": verdicts["no plain run"],
    }  # fmt: skip


def brief(outcome: Outcome) -> str:
    lines = str(outcome["detail"]).strip().splitlines() or [""]
    return (lines[-1] if outcome["verdict"] in ("crash", "no plain run") else lines[0])[:100]


def libraries() -> dict[str, str]:
    """Return the versions of the packages that provide the models."""
    found = {}
    for package in ("transformers", "timm", "torchvision", "diffusers"):
        try:
            found[package] = version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def run(options: argparse.Namespace, parts: list[Part]) -> list[Outcome]:
    """Examine the models of these parts, except those whose results are kept."""
    rows: list[Outcome] = []
    if options.resume and options.note.exists():
        kept = {}
        for line in options.note.read_text().splitlines():
            row = json.loads(line)
            kept[row["part"], row["model"]] = row
        names = {part.name for part in parts}
        rows = [r for r in kept.values() if r["verdict"] in options.keep and r["part"] in names]
    known = {(row["part"], row["model"]) for row in rows}
    wanted = [name for name in options.only.split(",") if name]
    for part in parts:
        for case in part.chosen():
            if (part.name, case.model) in known:
                continue
            if wanted and not any(name in case.model for name in wanted):
                continue
            row = examined(part, case, options.timeout, options.plain)
            print(f"{part.name}: {case.model}: {row['verdict']}, {row['took_s']:.0f} s. "
                  f"{brief(row)}", flush=True)  # fmt: skip
            rows.append(row)
            if options.note:
                with options.note.open("a") as note:
                    note.write(json.dumps(row) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--part",
        default="",
        help="only parts with one of these texts in their name, separated by commas",
    )
    parser.add_argument(
        "--only",
        default="",
        help="only models with one of these texts in their name, separated by commas",
    )
    parser.add_argument("--plain", action="store_true", help="only train plainly")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for each model")
    parser.add_argument("--note", type=Path, help="a file to which each result is appended")
    parser.add_argument(
        "--resume", action="store_true", help="keep the results that are already in --note"
    )
    parser.add_argument("--keep", default=",".join(GOOD), help="the verdicts that --resume keeps")
    options = parser.parse_args()
    asked = [name for name in options.part.split(",") if name]
    parts = [p for p in PARTS if not asked or any(name in p.name for name in asked)]
    for part in parts:
        if said := part.missing():
            print(f"{part.name}: left out. {said}", flush=True)
    parts = [part for part in parts if not part.missing()]
    needed = sorted({package for part in parts for package, _ in part.needs})
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED + needed)
    rows = run(options, parts)
    table = [counted(part.name, [r for r in rows if r["part"] == part.name]) for part in parts]
    unequal = [row | {"brief": brief(row)} for row in rows if row["verdict"] != "equal"]
    show("not equal", NOT_EQUAL, unequal)
    if options.plain:
        show("zoo", COLUMNS, table)
        return
    options.note = None
    finish("zoo", COLUMNS, table, options, libraries=libraries(), models=rows)
