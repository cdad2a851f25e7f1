"""A prediction as text: does it fit, how long is a step, what is moved, with ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

from zerofx.analysis.memory.memory import ATEN
from zerofx.analysis.time.forecast import Forecast, Range
from zerofx.ir.text import as_text
from zerofx.plan.sizes import format_bytes
from zerofx.tools.views.memory import MemoryView
from zerofx.tools.views.schedule import title
from zerofx.tools.views.timeline import TimelineView, format_us

LARGEST = 4  # tensors that are named where a tier is too small


class WayOut(Protocol):
    """What to change of a plan that does not fit; `plan` is the nearest one that does."""

    @property
    def plan(self) -> Any: ...
    def lines(self) -> list[str]: ...
    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class PredictionView:
    """What is known of a step before it runs: print it, or take `to_dict()` for JSON.

    basis: what regions are counted as in memory, "aten" or "compiled".
    seek: looks for what fits in place of a plan that does not; None where the plan is settled.
    """

    forecast: Forecast
    memory: MemoryView
    basis: str = ATEN
    seek: Callable[[], WayOut] | None = None

    @property
    def fits(self) -> bool:
        """Whether devices, hosts and NVMe hold what they should."""
        return not self.forecast.shortages

    @property
    def missing_bytes(self) -> dict[str, int]:
        """How much is missing, by tier; empty where the plan fits."""
        return {s.tier: s.missing_bytes for s in self.forecast.shortages}

    @cached_property
    def way_out(self) -> WayOut | None:
        """The nearest plan that fits, looked for when first asked; None where this one does."""
        return self.seek() if self.seek is not None and not self.fits else None

    @property
    def step_us(self) -> float:
        return self.forecast.timeline.step_us

    @property
    def peak_bytes(self) -> int:
        return self.forecast.memory.peak_bytes

    @property
    def timeline(self) -> TimelineView:
        """The lanes of the step over time."""
        return TimelineView(self.title, self.forecast.timeline)

    @property
    def title(self) -> str:
        """Name the program and where it would run."""
        ranks, hardware = self.forecast.program.world_size, self.forecast.hardware
        nodes = -(-ranks // hardware.devices_per_node)
        where = f"{hardware.name}, {nodes} node{'s' if nodes > 1 else ''}"
        return title(self.forecast.program, self.basis, where)

    def __str__(self) -> str:
        return as_text(self.lines())

    def lines(self) -> list[str]:
        """Return the figures with their ranges, the lanes, and the names at the peak."""
        head = f"{'':<26}{'from':>12}{'predicted':>12}{'to':>12}"
        rows = [f"{name:<26}{''.join(f'{t:>12}' for t in texts)}" for name, texts in self._rows()]
        return [
            f"# {self.title}", *self._fit(), "", head, *rows, "",
            *self.timeline.lines()[1:], "", *self.memory.lines(),
        ]  # fmt: skip

    def _fit(self) -> list[str]:
        if self.fits:
            return ["fits: devices, host memory and nvme hold it"]
        found = []
        for shortage in self.forecast.shortages:
            found.append(f"does not fit: {shortage}")
            found += [f"  {line}" for line in self.memory.largest(shortage.tier, LARGEST)]
        if self.way_out is None:
            return [*found, "this program is finished: zerofx search on its model finds what fits"]
        return [*found, *self.way_out.lines()]

    def _rows(self) -> list[tuple[str, list[str]]]:
        """Return each figure's name with its least, middle and most as text."""
        found, rate = self.forecast, "{:.4g}".format
        shown: list[tuple[str, Range, Callable[[Any], str]]] = [
            ("peak memory a rank", found.peak_bytes, lambda v: format_bytes(round(v))),
            ("step", found.step_us, format_us),
            ("exposed communication", found.exposed_us, format_us),
            ("samples/s", found.samples_per_s, rate),
        ]
        if found.tokens:
            shown.append(("tokens/s", found.tokens_per_s, rate))
        shown += [
            ("TFLOPS a device", found.flops_per_s, lambda v: rate(v / 1e12)),
            ("model FLOPS utilisation", found.mfu, "{:.1%}".format),
        ]
        return [(name, [write(v) for v in asdict(r).values()]) for name, r, write in shown]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        found = self.forecast
        ranges = {
            "peak_bytes": found.peak_bytes,
            "step_us": found.step_us,
            "exposed_us": found.exposed_us,
            "samples_per_s": found.samples_per_s,
            "tokens_per_s": found.tokens_per_s,
            "flops_per_s": found.flops_per_s,
            "mfu": found.mfu,
        }
        return {
            "title": self.title,
            "hardware": found.hardware.name,
            "basis": self.basis,
            "world_size": found.program.world_size,
            "fits": self.fits,
            "shortages": [{**asdict(s), "missing_bytes": s.missing_bytes} for s in found.shortages],
            "way_out": self.way_out.to_dict() if self.way_out is not None else None,
            **{name: asdict(r) for name, r in ranges.items()},
            "lane_bytes": {lane.value: n for lane, n in found.lane_bytes().items()},
            "memory": self.memory.to_dict(),
            "timeline": found.timeline.to_dict(),
        }
