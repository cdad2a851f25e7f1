"""What a calibration found, as text: rates, and both ends of each curve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofx.hardware import Hardware

_RATES = (
    "memory_bytes_per_s", "node_link_bytes_per_s", "host_link_bytes_per_s",
    "nvme_read_bytes_per_s", "nvme_write_bytes_per_s",
)  # fmt: skip


@dataclass(frozen=True)
class CalibrationView:
    """Hardware that was measured: print it, or take `to_dict()` for JSON."""

    hardware: Hardware
    path: Path | None = None

    def __str__(self) -> str:
        h = self.hardware
        lines = [f"{h.name}: {h.device}, {h.devices_per_node} ranks"]
        for name, rate in h.dense_flops_per_s.items():
            lines += [f"  products in {name:<12} {rate / 1e9:>10.1f} GFLOPS"]
        lines += [f"  {name:<24} {getattr(h, name) / 1e9:>10.2f} GB/s" for name in _RATES]
        update = h.host_update_elements_per_s / 1e6
        lines.append(f"  {'Adam on the host':<24} {update:>10.1f} M elements/s")
        lines.append(f"  {'launch of one op':<24} {h.launch_us:>10.2f} us")
        lines += [f"  {name:<34} {_ends(curve.points)}" for name, curve in h.curves.items()]
        if self.path is not None:
            lines.append(f"written to {self.path}. Use it as --hardware {self.path}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the hardware in plain values."""
        return self.hardware.to_dict()


def _ends(points: tuple[tuple[float, float], ...]) -> str:
    (x0, v0), (x1, v1) = points[0], points[-1]
    return f"{v0:>9.3g} at {x0:<9.3g} {v1:>9.3g} at {x1:.3g}"
