"""Seconds to the first and third training step from cold caches: each form of regions, and peers.

    python -m benchmarks.first_steps                  # the models of small_models, and GPT-2
    python -m benchmarks.first_steps --models lstm --systems auto,inductor --note "a quiet machine"

Each run is a process of its own whose caches are empty; the systems follow each other for one model
after the other. A start is from launching Python to the end of a step. CPU seconds are those of the
process and of the compilers that it has waited for, which those of "auto" and the pool of
torch.compile are not: on a machine that does other work too, they say more. `kernels="auto"` goes
on until its compiled regions are swapped in, for at most `--swap-limit` seconds; the CPU seconds of
its process in each of these steps, at the 95th percentile, are divided by the median of eager's
later steps. Ctrl-C writes what was measured until then.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pool import Group
from benchmarks.report import Column, finish
from benchmarks.small_models import SMALL

SYSTEMS = ("eager", "aten", "auto", "inductor", "torch.compile")
MODELS = ("gpt", "resnet18", "unet", "lstm", "gpt2")  # the last one is transformers'
SEED, BATCH, LATER = 0, 8, 20
TIMEOUT_S = 1800


class Transformer(nn.Module):
    """transformers' GPT-2 of four layers, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.gpt = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4, use_cache=False
            )
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.gpt(x, labels=y).loss
        return loss


def make(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a model and its batch."""
    if name in SMALL:
        return SMALL[name].build(), SMALL[name].batch()
    tokens = torch.randint(0, 256, (BATCH, 64))
    return Transformer(), (tokens, tokens)


class Job:
    """What a worker serves: training steps of one model under one system."""

    def __init__(self, system: str, model: str, began: float) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self._began = began
        plain, self._args = make(model)
        self._model: nn.Module = plain
        if system == "torch.compile":
            self._model = torch.compile(plain)  # type: ignore[assignment]
        elif system != "eager":
            import zerofx  # here, so that the other processes stay free of it

            self._model = zerofx.compile(plain, {"kernels": system}, device="cpu")
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)

    def steps(self, swap_limit_s: float) -> dict[str, Any]:
        """Train; return the seconds since the launch of Python, and the later steps' median."""
        ends, cpu = [], []
        for _ in range(3):
            ends.append(self._step())
            cpu.append(_cpu_s())
        found: dict[str, Any] = {"first_s": ends[0], "third_s": ends[2]}
        found |= {"first_cpu_s": cpu[0], "third_cpu_s": cpu[2]}
        kernels = getattr(getattr(self._model, "zerofx", None), "kernels", [])
        began = time.perf_counter()
        between: list[float] = []
        while kernels and kernels[0].form == "aten" and kernels[0].state:
            if time.perf_counter() - began > swap_limit_s:
                break
            start = time.process_time()
            ends.append(self._step())
            between.append(1e3 * (time.process_time() - start))
            kernels = self._model.zerofx.kernels
        if len(between) > 1:
            del between[-1]  # it loads what was compiled
            found["between_ms"] = statistics.quantiles(between, n=20, method="inclusive")[-1]
        is_swapped = bool(kernels) and kernels[0].form == "inductor" and kernels[0].since > 1
        found["swap_s"] = ends[-1] if is_swapped else None
        found["swap_call"] = kernels[0].since if is_swapped else None
        times, cpu = [], []
        while any(each.state for each in kernels) and is_swapped:  # both forms are being timed
            self._step()
            kernels = self._model.zerofx.kernels  # type: ignore[attr-defined]
        for _ in range(LATER):
            start, used = time.perf_counter(), time.process_time()
            self._step()
            cpu.append(time.process_time() - used)
            times.append(time.perf_counter() - start)
        found["later_ms"] = 1e3 * statistics.median(times)
        found["later_cpu_ms"] = 1e3 * statistics.median(cpu)
        return found

    def _step(self) -> float:
        loss = self._model(*self._args)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.time() - self._began


def _cpu_s() -> float:
    """Return the CPU seconds of this process, and of those that it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def run(system: str, model: str, swap_limit_s: float) -> dict[str, Any]:
    """Return one line: a cold start of one system."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        env = {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "ZEROFX_CACHE_DIR": str(Path(folder) / "zerofx"),
        }
        args = {"system": system, "model": model, "began": time.time()}
        with Group(system, "benchmarks.first_steps:Job", args, 1, env) as group:
            group.ready(TIMEOUT_S)
            (found,) = group.call("steps", TIMEOUT_S, swap_limit_s=swap_limit_s)
    return {"model": model, "system": system} | found


COLUMNS = [
    Column("model", "model"),
    Column("system", "system"),
    Column("first_s", "to the first step s", "{:.1f}"),
    Column("third_s", "to the third step s", "{:.1f}"),
    Column("first_cpu_s", "CPU to the first s", "{:.1f}"),
    Column("third_cpu_s", "CPU to the third s", "{:.1f}"),
    Column("swap_s", "to the swap s", "{:.1f}"),
    Column("swap_call", "swap at call", "{:d}"),
    Column("between", "steps until then, CPU x eager's", "{:.2f}"),
    Column("later_cpu_ms", "later steps CPU ms", "{:.1f}"),
]


def main() -> None:
    """Measure what the command line chooses, show it and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--models", default=",".join(MODELS), help=", ".join(MODELS))
    parser.add_argument("--swap-limit", type=float, default=600.0, help="seconds")
    parser.add_argument("--note", default="", help="what else the machine did, for the result")
    options = parser.parse_args()
    for name, known in (("systems", SYSTEMS), ("models", MODELS)):
        chosen = getattr(options, name).split(",")
        if not set(chosen) <= set(known):
            parser.error(f"--{name} {','.join(chosen)}: known are {', '.join(known)}")
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(KeyboardInterrupt):
        for model in options.models.split(","):
            for system in options.systems.split(","):
                lines.append(run(system, model, options.swap_limit))
                print(lines[-1], flush=True)
            ours = [line for line in lines if line["model"] == model]
            eager_ms = next((r["later_cpu_ms"] for r in ours if r["system"] == "eager"), None)
            for line in ours:
                until_ms = line.get("between_ms")
                line["between"] = until_ms / eager_ms if eager_ms and until_ms else None
    finish("first_steps", COLUMNS, lines, options)


if __name__ == "__main__":
    main()
