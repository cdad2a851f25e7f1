"""Turn measurements into a description of hardware."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofx.hardware import Hardware
from zerofx.hardware.description import KNOWN_FIELDS, MEASURED, UNSOURCED

Rows = Iterable[list[Any]]
US = 1e6  # microseconds per second
DIGITS = 4  # significant digits that are written; the last one is noise


@dataclass(frozen=True)
class Rates:
    """The rates of one report: curve -> [(x, amount per second)], with growing x."""

    points: dict[str, list[tuple[float, float]]]

    @classmethod
    def of(cls, rows: Rows) -> Rates:
        points: dict[str, list[tuple[float, float]]] = {}
        for curve, x, amount, seconds in rows:
            points.setdefault(curve, []).append((x, amount / seconds))
        return cls({curve: sorted(found) for curve, found in points.items()})

    def best(self, curve: str) -> float:
        """Return the highest rate, at any size."""
        return max(rate for _, rate in self.points[curve])

    def largest(self, curve: str) -> float:
        """Return the rate at the largest size, which exceeds all caches."""
        return self.points[curve][-1][1]


def describe(found: Mapping[int, Mapping[str, Rows]], folder: Path) -> Hardware:
    """Describe this machine from the report of one rank alone and, if there is one, of several.

    found: number of ranks -> rows of `rates` (curve, x, amount, seconds) and of `times`
        (curve, x, us). folder: on the measured disk.
    """
    ranks = max(found)
    rates = {number: Rates.of(report["rates"]) for number, report in found.items()}
    alone, together = rates[1], rates[ranks]
    times = {number: _sorted(report["times"]) for number, report in found.items()}
    fields: dict[str, Any] = {
        "dense_flops_per_s": {f: alone.best(f"matmul.{f}") for f in _formats(alone)},
        "memory_bytes_per_s": alone.largest("stream"),
        "host_memory_bytes_per_s": together.largest("stream") * ranks,
        "host_link_bytes_per_s": alone.largest("host_copy"),
        "node_host_link_bytes_per_s": together.largest("host_copy") * ranks,
        "nvme_read_bytes_per_s": alone.best("nvme_read"),
        "nvme_write_bytes_per_s": alone.best("nvme_write"),
        "host_update_elements_per_s": together.largest("host_update") * ranks,
        "launch_us": US / alone.best("launch"),
    } | _links(times[ranks], ranks, alone)
    curves = _curves(rates, fields) | {k: v for each in times.values() for k, v in each.items()}
    if "crowd" in curves:  # the pace beside others, as if measured in the same moment as alone
        [(_, us)] = curves["pace"]
        curves["pace"] = [(number, us * ratio) for number, ratio in curves["crowd"]]
    return _hardware(ranks, fields, curves, folder)


def _sorted(rows: Rows) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for curve, x, us in rows:
        found.setdefault(curve, []).append((x, us))
    return {curve: sorted(points) for curve, points in found.items()}


def _formats(rates: Rates) -> list[str]:
    return [c.partition(".")[2] for c in rates.points if c.startswith("matmul.")]


def _links(
    times: Mapping[str, list[tuple[float, float]]], ranks: int, alone: Rates
) -> dict[str, float]:
    """Return link and latency between ranks: of the largest and the smallest all-gather."""
    if ranks == 1:  # nothing is sent; a copy comes closest
        return {"node_link_bytes_per_s": alone.largest("host_copy"), "node_latency_us": 0.0}
    points = times[f"all_gather.direct.{ranks}"]
    size, us = points[-1]
    sent = size * (ranks - 1) / ranks
    return {"node_link_bytes_per_s": US * sent / us, "node_latency_us": points[0][1]}


def _curves(
    rates: Mapping[int, Rates], fields: Mapping[str, Any]
) -> dict[str, list[tuple[float, float]]]:
    """Return every rate as a share of the field that its kind names."""
    curves = {}
    for number, each in rates.items():
        end = f".{number}" if number > 1 else ""
        for curve, points in each.points.items():
            base = _base(curve, fields)
            if base:
                curves[curve + end] = [(x, rate / base) for x, rate in points]
    return curves


def _base(curve: str, fields: Mapping[str, Any]) -> float:
    """Return the rate of which a curve has shares; 0 if it became a field instead."""
    kind, _, detail = curve.partition(".")
    if kind in ("matmul", "convolution", "attention"):
        return fields["dense_flops_per_s"][detail.partition(".")[0]]
    bases = {
        "memory": fields["memory_bytes_per_s"],
        "heavy": US,  # elements per microsecond
        "pool": US,
        "host_copy": fields["host_link_bytes_per_s"],
        "nvme_read": fields["nvme_read_bytes_per_s"],
        "nvme_write": fields["nvme_write_bytes_per_s"],
        "host_update": fields["host_update_elements_per_s"],
    }
    return bases.get(kind, 0.0)


def _hardware(
    ranks: int, fields: Mapping[str, Any], curves: Mapping[str, Any], folder: Path
) -> Hardware:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = {
        "devices_per_node": ranks,
        "device_memory_bytes": memory // ranks,
        "host_memory_bytes": memory,
        "nvme_bytes": shutil.disk_usage(folder).free,
        "network_bytes_per_s": 0.0,
        "network_latency_us": 0.0,
    }
    sources = {
        "devices_per_node": "number of measured ranks, one core each",
        "device_memory_bytes": "an equal part of the machine's memory",
        "host_memory_bytes": "as the operating system reports it",
        "nvme_bytes": "free on the measured disk",
        "network_bytes_per_s": "one machine alone",
        "network_latency_us": "one machine alone",
    }
    rounded = {k: _rounded(v) for k, v in fields.items()}
    table = {k: [(_rounded(x), _rounded(v)) for x, v in p] for k, p in sorted(curves.items())}
    measured = [n for n in KNOWN_FIELDS if n not in UNSOURCED and n not in sources]
    names = {
        "name": platform.node() or "this-machine",
        "device": f"one core of {_processor()}",
        "device_type": "cpu",
        "backend": "gloo",
    }
    sources = dict.fromkeys([*measured, *table], MEASURED) | sources
    return Hardware.from_dict({**names, **sizes, **rounded, "curves": table, "sources": sources})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return float(f"{value:.{DIGITS}g}")


def _processor() -> str:
    """Return the name of the processor by Linux, or by Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
