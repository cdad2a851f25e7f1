"""Cold and warm start to the first step, and the compiled regions, compared with torch.compile.

    python -m benchmarks.compile_time         # 4, 12, 24 and 48 layers
    python -m benchmarks.compile_time --quick --systems zerofx

Cold starts have their own, empty caches. A warm start is a new process with the caches of the cold
one. A start is timed from launching Python to the end of the first training step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.pool import Group
from benchmarks.report import Column, finish
from zerofx.tools.demo.gpt import GPT, GPTConfig

LAYERS, QUICK_LAYERS = "4,12,24,48", "4,12"
BATCH, SEED = 4, 0
SYSTEMS = ("zerofx", "torch.compile")
PLANNED_RANKS = 2  # of the program that is only planned, to time capture, passes and emission
TIMEOUT_S = 1800


class Job:
    """Job of a worker: the first step of a model of `layers` layers."""

    def __init__(self, system: str, layers: int, width: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self._config = GPTConfig(layers=layers, width=width)
        model = GPT(self._config)
        self._tokens = torch.randint(0, self._config.vocab, (BATCH, self._config.seq))
        self._model: nn.Module = self._wrap(system, model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)

    def first_step(self) -> dict[str, Any]:
        """Compile and train one step; report seconds and the number of compiled regions."""
        start = time.perf_counter()
        loss = self._model(self._tokens, self._tokens)
        loss.backward()
        self._optimizer.step()
        answer: dict[str, Any] = {"step_s": time.perf_counter() - start, "loss": loss.item()}
        if hasattr(self._model, "programs"):
            from zerofx.runtime.regions.cache import CompileCount

            answer |= {"compiled": CompileCount.compiled, "cached": CompileCount.cached}
        return answer

    def on_paper(self) -> dict[str, Any]:
        """Time only capture, passes and emission."""
        import zerofx

        start = time.perf_counter()
        args = self._tokens, self._tokens
        program = zerofx.rewrite(
            zerofx.capture(GPT(self._config), args), zerofx.Plan(), PLANNED_RANKS
        )
        with tempfile.TemporaryDirectory() as folder:
            program.emit(Path(folder) / "emitted")
        return {"paper_s": time.perf_counter() - start}

    @staticmethod
    def _wrap(system: str, model: GPT) -> nn.Module:
        if system == "torch.compile":
            return torch.compile(model)  # type: ignore[return-value]
        import zerofx  # imported here, so that torch.compile's processes do not import it

        return zerofx.compile(model, zerofx.Plan(kernels="inductor"), device="cpu")


def start(system: str, layers: int, options: argparse.Namespace, caches: Path) -> dict[str, Any]:
    """Start fresh processes and time them to the end of their first step."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    env |= {"ZEROFX_CACHE_DIR": str(caches / "zerofx")}
    args = {"system": system, "layers": layers, "width": options.width}
    began = time.perf_counter()
    with Group(system, "benchmarks.compile_time:Job", args, options.ranks, env) as group:
        group.ready(TIMEOUT_S)
        answers = group.call("first_step", TIMEOUT_S)
        took = time.perf_counter() - began
        paper = group.call("on_paper", TIMEOUT_S)[0] if system == "zerofx" else {}
    counts = {
        key: sum(answer[key] for answer in answers)
        for key in ("compiled", "cached")
        if key in answers[0]
    }
    return {"start_s": took, "step_s": max(a["step_s"] for a in answers)} | counts | paper


def result(system: str, layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return one line: a cold start, then a warm one with its caches."""
    with tempfile.TemporaryDirectory() as folder:
        cold = start(system, layers, options, Path(folder))
        warm = start(system, layers, options, Path(folder))
    paper_s = warm.get("paper_s")
    return {
        "layers": layers,
        "system": system,
        "cold_s": cold["start_s"],
        "warm_s": warm["start_s"],
        "warm_ratio": warm["start_s"] / cold["start_s"],
        "compiled": cold.get("compiled"),
        "compiled_warm": warm.get("compiled"),
        "paper_per_layer_s": paper_s and paper_s / layers,
        "cold": cold,
        "warm": warm,
    }


COLUMNS = [
    Column("layers", "layers"),
    Column("system", "system"),
    Column("cold_s", "cold start s", "{:.1f}"),
    Column("peer_ratio", "cold / torch.compile", "{:.2f}"),
    Column("warm_s", "warm start s", "{:.1f}"),
    Column("warm_ratio", "warm / cold", "{:.2f}"),
    Column("compiled", "compiled, cold", "{:d}"),
    Column("compiled_warm", "compiled, warm", "{:d}"),
    Column("paper_per_layer_s", "capture to emission, s / layer", "{:.2f}"),
]


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--layers", default=LAYERS, help="numbers of layers")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="ranks of zerofx; those of torch.compile do not communicate",
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LAYERS} layers only")
    options = parser.parse_args()
    names = options.systems.split(",")
    if not set(names) <= set(SYSTEMS):
        parser.error(f"--systems {options.systems}: known are {', '.join(SYSTEMS)}")
    lines = []
    for layers in map(int, (QUICK_LAYERS if options.quick else options.layers).split(",")):
        found = {system: result(system, layers, options) for system in names}
        peer_s = found.get("torch.compile", {}).get("cold_s")
        lines += [
            line | {"peer_ratio": peer_s and line["cold_s"] / peer_s} for line in found.values()
        ]
    finish("compile_time", COLUMNS, lines, options)


if __name__ == "__main__":
    main()
