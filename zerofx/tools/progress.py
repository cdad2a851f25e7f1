"""A progress line on the terminal with the numbers of a training loop."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from zerofx.hardware import Hardware
from zerofx.tools.meter import Meter, Numbers

_REFRESH_S = 0.25


def progress(
    model: nn.Module,
    total: int | None = None,
    hardware: Hardware | str | os.PathLike[str] | None = None,
    console: Console | None = None,
) -> ProgressLine:
    """Return the progress line of a training loop; see `ProgressLine`.

    model: a model that `zerofx.compile` returned. total: number of steps, if it is known.
    hardware: provides the rate for MFU, as for `meter`. console: where to draw; rich's by default.

    Raises:
        ArgumentError: the model is not compiled.

    Example:
        with zerofx.progress(model, total=len(loader)) as line:
            for batch in loader:
                loss = train(batch)
                line.step(samples=len(batch), loss=loss)
    """
    return ProgressLine(Meter(model, hardware), total, console)


class ProgressLine:
    """A bar with the numbers of a meter, on the terminal of rank 0.

        with zerofx.progress(model, total=1000) as line:
            for batch in loader:
                loss = train(batch)
                line.step(tokens=batch.numel(), loss=loss)

    The line is drawn up to four times per second. Its numbers are means since it was last drawn,
    and tensors among the values are read only then. In a file the line is written once, at the end.

    total: number of steps, if it is known.
    """

    def __init__(self, meter: Meter, total: int | None, console: Console | None) -> None:
        self.meter = meter
        self.numbers: Numbers = {}  # as the line shows them
        self._bar = Progress(
            MofNCompleteColumn(), BarColumn(20), TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"), console=console, disable=meter.rank != 0,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, text="")
        self._num_steps = self._samples = self._tokens = 0
        self._values: dict[str, Any] = {}
        self._drawn = 0.0

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._num_steps:
            self._draw()
        self._bar.stop()
        self.meter.close()

    def step(self, *, samples: int = 0, tokens: int = 0, **values: Any) -> None:
        """Count a step. Samples and tokens are of this rank; values are shown with their names."""
        self._num_steps += 1
        self._samples += samples
        self._tokens += tokens
        self._values = values
        if time.perf_counter() - self._drawn > _REFRESH_S:
            self._draw()

    def _draw(self) -> None:
        self.numbers = self.meter.step(samples=self._samples, tokens=self._tokens)
        if self.meter.rank == 0:
            texts = [f"{name} {_plain(value):.4g}" for name, value in self._values.items()]
            text = "  ".join([*texts, *_texts(self.numbers)])
            self._bar.update(self._task, advance=self._num_steps, text=text)
        self._num_steps = self._samples = self._tokens = 0
        self._drawn = time.perf_counter()


def _plain(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _texts(numbers: Numbers) -> list[str]:
    """Return the texts of the numbers that are not None."""
    rates = [(name, numbers[f"{name}_per_s"]) for name in ("tokens", "samples")]
    found = [f"{_short(rate)} {name}/s" for name, rate in rates if rate]
    if flops := numbers["flops_per_s"]:
        found.append(f"{_short(flops)}FLOP/s")
    for name, unit in (("mfu", "MFU"), ("wait_share", "waiting")):
        if (share := numbers[name]) is not None:
            found.append(f"{unit} {share:.0%}")
    if skipped := numbers["skipped_steps"]:
        found.append(f"skipped {skipped}")
    if peak := numbers["peak_bytes"]:
        found.append(f"peak {peak / 2**30:.2f} GiB")
    return found


def _short(value: float) -> str:
    """Return a number with a decimal prefix."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
