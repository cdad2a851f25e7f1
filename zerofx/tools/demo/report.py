"""Output of the demo: a progress bar, a summary, and a folder of results."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from zerofx.tools.demo.options import Options

if TYPE_CHECKING:
    from zerofx.ir.program import Planned

SMOOTHING = 0.9  # of the displayed loss: the share of its last value
LINES = 10  # progress lines of a whole run if the output is no terminal


@dataclass(frozen=True)
class Result:
    """Measurements of the run; `bases` names the kernels of the steps whose memory was measured."""

    losses: list[float]
    tokens_per_s: float
    peak_bytes: int
    bases: set[str]
    valid_loss: float
    resumes: bool


class Reporter:
    """The display of the run on rank 0; other ranks only count.

    tokens_per_s: tokens of all ranks per second, over the steps since `start`.
    """

    def __init__(self, rank: int, steps: int, tokens_per_step: int) -> None:
        self.losses: list[float] = []
        self.tokens_per_s = 0.0
        self._console = Console(quiet=rank != 0)
        self._steps, self._tokens_per_step = steps, tokens_per_step
        self._smooth = self._began = 0.0
        self._first = 0  # steps before the clock started
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
        )
        shown = rank == 0 and self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, disable=not shown)
        self._task = self._bar.add_task("training", total=steps, loss=0.0, speed=0.0)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def built(self, options: Options, world_size: int, device: torch.device) -> None:
        """Print the model and the plan before the first step compiles."""
        m = options.model
        self._say(
            f"byte GPT, {m.layers} layers x {m.width} wide, stage {options.stage} on {world_size} "
            f"ranks ({device.type}), {options.kernels} kernels"
        )

    def compiled(self, seconds: float) -> None:
        """Print the time of the first step; compiling has a display of its own."""
        self._say(f"first step after {seconds:.1f} s")

    def start(self, losses: list[float]) -> None:
        """Start the bar and the clock, after steps that compiled or were measured."""
        self.losses += losses
        self._smooth, self._first = losses[-1], len(losses)
        self._began = time.perf_counter()
        self._bar.start()

    def step(self, loss: float) -> None:
        """Count a step and move the bar, or print a line from time to time."""
        self.losses.append(loss)
        self._smooth = SMOOTHING * self._smooth + (1 - SMOOTHING) * loss
        done, seconds = len(self.losses), time.perf_counter() - self._began
        self.tokens_per_s = speed = (done - self._first) * self._tokens_per_step / seconds
        self._bar.update(self._task, completed=done, loss=self._smooth, speed=speed)
        if self._bar.disable and done % max(1, self._steps // LINES) == 0:
            self._say(
                f"step {done:4d}/{self._steps}  loss {self._smooth:.3f}  {speed:,.0f} tokens/s"
            )

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)

    def show(self, program: Planned, result: Result, sample: str, out: str) -> None:
        """Print the summary, the sample, and the list of written files."""
        table = Table(show_header=False)
        for line in summary(program, result):
            table.add_row(*line)
        files = Table("file", "content", title=f"written to {out}")
        for name, what in FILES.items():
            files.add_row(name, what)
        self._console.print(table, Panel(Text(sample), title="sample"), files)


def summary(program: Planned, result: Result) -> list[tuple[str, str]]:
    """Return the summary's lines."""
    tail = result.losses[-20:]
    predicted = max(program.memory(basis=basis).peak_bytes for basis in result.bases)
    measured = result.peak_bytes
    return [
        ("loss", f"{result.losses[0]:.3f} -> {sum(tail) / len(tail):.3f} (mean of the last 20)"),
        ("loss on held-out files", f"{result.valid_loss:.3f} (plain model, full weights)"),
        ("tokens per second", f"{result.tokens_per_s:,.0f}"),
        ("peak memory per rank, predicted", f"{predicted / 2**20:.2f} MiB"),
        (
            "peak memory per rank, measured",
            f"{measured / 2**20:.2f} MiB ({measured / predicted - 1:+.1%}, torch's allocator)",
        ),
        ("save, load, train on", "same losses, bit for bit" if result.resumes else "DIFFERENT"),
    ]


FILES = {
    "emitted/": "the Python module that ran: schedule.py, its regions and its plan",
    "passes/": "the program after each pass, in order",
    "schedule.txt": "steps in order: compute, gathers, reduces, resident bytes",
    "memory.txt": "predicted memory by category, with the largest tensors at the peak",
    "snapshot/": "the snapshot. Continue with --resume",
    "sample.txt": "text that the model wrote",
}


def write_files(out: Path, program: Planned, sample: str) -> None:
    """Write all of FILES but the snapshot into `out`."""
    passes = out / "passes"
    passes.mkdir(parents=True, exist_ok=True)
    for old in passes.glob("*.txt"):  # an earlier run may have had more passes
        old.unlink()
    for number, entry in enumerate(program.history):
        name = entry.pass_spec.split("{")[0]
        (passes / f"{number:02d}-{name}.txt").write_text(f"{entry.dump}\n")
    program.emit(out / "emitted")
    (out / "schedule.txt").write_text(f"{program.schedule(basis='compiled')}\n")
    (out / "memory.txt").write_text(f"{program.memory(basis='compiled')}\n")
    (out / "sample.txt").write_text(f"{sample}\n")
