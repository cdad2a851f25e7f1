"""Architectures of transformers trained compiled and plainly: the same numbers?

    python -m benchmarks.breadth                       # all, with the default kernels
    python -m benchmarks.breadth --only T5,Swin --kernels aten
    python -m benchmarks.breadth --plain               # are the configurations themselves sound?

Each architecture has a small random configuration (`breadth_cases.py`) and a process of its own.
It trains two steps with SGD in one process, plainly and compiled (stage 3), from equal weights on
equal batches. Compared are the losses, every gradient of both steps and every parameter at the end.

A tensor is equal if it is within 2e-6 of plain training's, as a norm, relative, or if it is a
gradient below 1e-7 of the model's in both: its true value is zero. One that is further off is
"rounding" if it is within 1e-5 of training in double precision, or about as far from it as plain
training. Everything else is "different".
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.breadth_cases import CASES, Case
from benchmarks.report import Column, finish, show

STEPS, RATE = 2, 0.02
TOLERANCE, VANISHING = 2e-6, 1e-7
AS_FAR, NEAR = 4.0, 1e-5  # times plain training's own distance from double precision; relative
TIMEOUT_S = 150
PRELOADED = ["torch", "transformers", "zerofx", "torch._inductor.compile_fx"]
Outcome = dict[str, Any]


@dataclass
class Run:
    """What a training made, all of it in the order in which it was made, by name."""

    rate: float = 0.0
    norm: float = 0.0  # the largest of a step's whole gradient
    made: dict[str, Tensor] = field(default_factory=dict)
    first_s: float = 0.0


def loss_of(result: Any) -> Tensor:
    """Return a model's loss, or the mean square of all that it returns if it has none."""
    if getattr(result, "loss", None) is not None:
        return result.loss  # type: ignore[no-any-return]
    values = [v for v in result.values() if isinstance(v, Tensor) and v.requires_grad]
    return torch.stack([v.pow(2).mean() for v in values]).sum()


def train(model: nn.Module, batches: list[dict[str, Any]], rate: float = 0.0) -> Run:
    """Train on each batch once. rate: the learning rate, chosen by the first gradient if 0."""
    run = Run(rate)
    for step, batch in enumerate(batches):
        began = time.perf_counter()
        torch.manual_seed(step)
        loss = loss_of(model(**batch))
        loss.backward()
        if not step:
            run.first_s = time.perf_counter() - began
        run.made[f"loss of step {step}"] = loss.detach().clone()
        with torch.no_grad():
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            grads = {name: whole(grad) for name, grad in grads.items()}
            norm = float(torch.stack([g.norm() for g in grads.values()]).norm())
            run.norm, run.rate = max(run.norm, norm), run.rate or RATE / max(1.0, norm)
            for name, grad in grads.items():
                run.made[f"gradient of {name} at step {step}"] = grad
        torch.optim.SGD(model.parameters(), lr=run.rate).step()
        model.zero_grad()
    for name, value in model.state_dict().items():
        run.made[name] = value.detach().clone()
    return run


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def in_double(case: Case, model: nn.Module, batches: list[dict[str, Any]], rate: float) -> Run:
    """Train in double precision; what a model does in single precision by itself stays so."""
    wide = [{k: v.double() if _is_real(v) else v for k, v in batch.items()} for batch in batches]
    return train(copy.deepcopy(model).double(), wide, rate)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference; infinite if only one has a value that is not finite."""
    a, b = a.double().nan_to_num(7e77), b.double().nan_to_num(7e77)
    return float((a - b).norm())


def compare(wanted: Run, found: Run) -> tuple[dict[str, float], list[str]]:
    """Return relative distances above the tolerance, by name, and what only one run made."""
    far = {}
    for name in wanted.made.keys() & found.made.keys():
        size = float(wanted.made[name].double().nan_to_num(7e77).norm())
        off = distance(wanted.made[name], found.made[name])
        vanishes = name.startswith("gradient") and max(size, off) <= VANISHING * wanted.norm
        if off > TOLERANCE * size and not vanishes:
            far[name] = off / max(size, 1e-30)
    return far, sorted(wanted.made.keys() ^ found.made.keys())


def is_rounding(name: str, wanted: Run, found: Run, exact: Run) -> bool:
    """Tell whether plain training is about as far from double precision as what was found."""
    truth = exact.made[name]
    allowed = AS_FAR * distance(wanted.made[name], truth) + NEAR * float(truth.norm())
    return distance(found.made[name], truth) <= allowed


class Warnings(logging.Handler):
    """Keeps what zerofx warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def examine(case: Case, kernels: str) -> Outcome:
    """Train one architecture plainly and compiled, and say how they compare."""
    import zerofx
    from zerofx.errors import ZerofxError
    from zerofx.runtime.regions.cache import CompileCount

    torch.set_num_threads(1)
    try:
        plain = case.make()
        start = copy.deepcopy(plain)
        batches = [case.batch(step) for step in range(STEPS)]
        wanted = train(plain, copy.deepcopy(batches))
    except Exception:
        return {"verdict": "no plain run", "detail": traceback.format_exc()}
    if kernels == "none":
        size = sum(p.numel() for p in plain.parameters())
        return {"verdict": "plain", "detail": f"{size} parameters", "loss": _losses(wanted)}
    warnings = Warnings()
    logging.getLogger("zerofx").addHandler(warnings)
    began = time.perf_counter()
    try:
        model = zerofx.compile(copy.deepcopy(start), zerofx.Plan(stage=3, kernels=kernels))
        found = train(model, copy.deepcopy(batches), wanted.rate)
    except ZerofxError as error:
        return {"verdict": "refused", "detail": f"{type(error).__name__}: {error}",
                "first_s": time.perf_counter() - began}  # fmt: skip
    except Exception:
        return {"verdict": "crash", "detail": traceback.format_exc()}
    outcome: Outcome = {
        "first_s": found.first_s, "compiled": CompileCount.compiled,
        "cached": CompileCount.cached, "warnings": warnings.said, "loss": _losses(wanted),
        "programs": len(model.programs), "islands": len(model.zerofx.islands),
        "inside": sum(island.share for island in model.zerofx.islands),
    }  # fmt: skip
    far, alone = compare(wanted, found)
    if not far and not alone:
        return outcome | {"verdict": "equal", "detail": ""}
    if alone:
        return outcome | {"verdict": "different", "detail": f"only one has {alone[:5]}"}
    try:
        exact = in_double(case, start, batches, wanted.rate)
        wrong = {n: v for n, v in far.items() if not is_rounding(n, wanted, found, exact)}
    except Exception as error:  # the model has formats of its own in its code
        outcome["double"] = f"{type(error).__name__}: {error}"
        wrong = far
    worst = max(wrong or far, key=far.__getitem__)
    detail = f"{len(wrong or far)} tensors up to {far[worst]:.1e} ({worst})"
    largest = sorted(wrong or far, key=far.__getitem__)[-8:]
    outcome["far"] = {name: far[name] for name in largest}
    return outcome | {"verdict": "different" if wrong else "rounding", "detail": detail}


def _losses(run: Run) -> list[float]:
    return [float(v) for name, v in run.made.items() if name.startswith("loss")]


def _child(case: Case, kernels: str, answers: Connection) -> None:
    os.setsid()  # so that the compilers that it starts end with it
    answers.send(examine(case, kernels))


def examined(case: Case, options: argparse.Namespace) -> Outcome:
    """Examine one architecture in a process of its own, for at most `--timeout` seconds."""
    context = multiprocessing.get_context("forkserver")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(case, options.kernels, its))
    began = time.perf_counter()
    process.start()
    its.close()
    try:
        outcome = mine.recv() if mine.poll(options.timeout) else {"verdict": "too slow"}
    except EOFError:
        outcome = {"verdict": "crash", "detail": "the process ended"}
    if process.is_alive() and process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.join()
    took = time.perf_counter() - began
    return {"group": case.group, "model": case.model, "detail": "", "first_s": None,
            "compiled": None, "islands": None, "inside": None,
            "took_s": took} | outcome  # fmt: skip


COLUMNS = [
    Column("group", "group"),
    Column("model", "model"),
    Column("verdict", "result"),
    Column("first_s", "first call s", "{:.1f}"),
    Column("compiled", "compiled", "{:d}"),
    Column("islands", "islands", "{:d}"),
    Column("inside", "of parameters", "{:.0%}"),
    Column("brief", ""),
]


def _brief(outcome: Outcome) -> str:
    lines = str(outcome["detail"]).strip().splitlines() or [""]
    return (lines[-1] if outcome["verdict"] in ("crash", "no plain run") else lines[0])[:100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default="inductor", choices=("inductor", "aten"))
    parser.add_argument("--plain", action="store_true", help="train plainly alone")
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for each")
    parser.add_argument("--note", type=Path, help="a file that gets each result as it is made")
    parser.add_argument("--resume", action="store_true", help="keep what --note has already")
    options = parser.parse_args()
    if options.plain:
        options.kernels = "none"
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    parts = [part for part in options.only.split(",") if part]
    rows: list[Outcome] = []
    if options.resume and options.note.exists():
        rows = [json.loads(line) for line in options.note.read_text().splitlines()]
    known = {row["model"] for row in rows}
    for case in CASES:
        if case.model in known or (parts and not any(part in case.model for part in parts)):
            continue
        row = examined(case, options)
        row["brief"] = _brief(row)
        said = f"{row['model']}: {row['verdict']}, {row['took_s']:.0f} s. {row['brief']}"
        print(said, flush=True)
        rows.append(row)
        if options.note:
            with options.note.open("a") as note:
                note.write(json.dumps(row) + "\n")
    print(dict(Counter(row["verdict"] for row in rows)))
    if options.plain:
        show("breadth", COLUMNS, rows)
        return
    options.note = None
    finish("breadth", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
