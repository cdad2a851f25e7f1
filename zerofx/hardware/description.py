"""One node type and its network: plain data, checked field by field."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerofx.errors import PlanError, UnpricedError
from zerofx.fields import (
    check_names,
    nearest,
    one_of,
    read_fields,
    real,
    refuse,
    size,
    spec_field,
    text,
    whole,
)
from zerofx.hardware.curve import Curve, Table, read_curves
from zerofx.machine import CPU_GLOO, CUDA_NCCL, Machine

_REQUIRED: Any = dataclasses.MISSING
FORMATS = ("fp32", "fp16", "bf16")
MEASURED = "measured by zerofx doctor --calibrate"
_RATE = re.compile(r"([\d.]+)\s*([KMGTP]?)(?:i?B|FLOPS)?(?:/s)?", re.IGNORECASE)
_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
# What is said of a figure: names say what a thing is, curves and sources have entries of their own.
UNSOURCED = frozenset({"name", "device", "device_type", "backend", "curves", "sources"})


def rate(least: float, above: bool = False) -> Any:
    """Read a rate a second: a number, or text like `300 GB/s`, `125 TFLOPS` (powers of 1000)."""
    number = real(least, above=above)

    def read(where: str, value: Any) -> float:
        match = _RATE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is not None and "ib" not in value.lower():
            value = float(match[1]) * _SCALES[match[2].upper()]
        return number(where, value)

    return read


def _rates(where: str, value: Any) -> Table[float]:
    if not isinstance(value, Mapping) or not value:
        raise refuse(where, value, f"is a mapping from formats ({', '.join(FORMATS)}) to rates")
    for name in value:
        if name not in FORMATS:
            raise PlanError(f"{where}: unknown format {name!r}{nearest(str(name), FORMATS)}")
    return Table({k: rate(0, above=True)(f"{where}[{k!r}]", v) for k, v in value.items()})


def _sources(where: str, value: Any) -> Table[str]:
    if not isinstance(value, Mapping):
        raise refuse(where, value, "is a mapping from fields and curves to their sources")
    return Table({str(k): text(f"{where}[{k!r}]", v) for k, v in value.items()})


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A node type and the network between such nodes; rates are bytes or operations a second.

    name, device: the preset's name, the product's.
    device_type, backend: what `torch.device(...).type` and the process group are called.
    devices_per_node: how many devices share the fast links, host memory and disks; a rank has one.
    device_memory_bytes, memory_bytes_per_s: of one device.
    dense_flops_per_s: of matrix products on paper, by format; a format that the device does not
        multiply fast in is left out.
    node_link_bytes_per_s: between devices of a node, of one device, one way.
    network_bytes_per_s: between nodes, all ports of one node, one way; 0 where there is none.
    node_latency_us, network_latency_us: of one hop within a node, between two nodes.
    host_memory_bytes, host_memory_bytes_per_s: of the whole node.
    host_link_bytes_per_s: between host and one device, one way.
    node_host_link_bytes_per_s: the same of all devices of a node at once, which may share links.
    nvme_bytes, nvme_read_bytes_per_s, nvme_write_bytes_per_s: of the whole node; 0 is none.
    host_update_elements_per_s: parameters that Adam updates on the hosts of one node.
    launch_us: time of the host for one launch.
    curves: what was measured by size. A name is a kind and its details, joined by dots, as in
        `matmul.bf16`, `memory.pointwise.inductor`, `all_gather.direct.2`; `curve.KINDS` lists the
        kinds with the meaning of x and of the value. Compute and copies are measured on one rank
        alone, and under the same name and `.2` on two ranks of a node that do the same at once.
        Shares are of the field that is named there, may exceed 1 (in caches) and stay what they are
        beyond the ends (`Curve.at`); times grow in proportion to x beyond the last point
        (`Curve.time_at`).
    sources: where each figure is from, by field, and by name for curves.

    Raises:
        PlanError: a field is unknown, missing or out of range; the message names it.
    """

    name: str = spec_field(_REQUIRED, text)
    device: str = spec_field(_REQUIRED, text)
    device_type: str = spec_field(_REQUIRED, one_of("cpu", "cuda"))
    backend: str = spec_field(_REQUIRED, one_of("gloo", "nccl"))
    devices_per_node: int = spec_field(_REQUIRED, whole(1))
    device_memory_bytes: int = spec_field(_REQUIRED, size(1))
    dense_flops_per_s: Mapping[str, float] = spec_field(_REQUIRED, _rates)
    memory_bytes_per_s: float = spec_field(_REQUIRED, rate(0, above=True))
    node_link_bytes_per_s: float = spec_field(_REQUIRED, rate(0, above=True))
    node_latency_us: float = spec_field(_REQUIRED, real(0))
    network_bytes_per_s: float = spec_field(_REQUIRED, rate(0))
    network_latency_us: float = spec_field(_REQUIRED, real(0))
    host_memory_bytes: int = spec_field(_REQUIRED, size(1))
    host_memory_bytes_per_s: float = spec_field(_REQUIRED, rate(0, above=True))
    host_link_bytes_per_s: float = spec_field(_REQUIRED, rate(0, above=True))
    node_host_link_bytes_per_s: float = spec_field(_REQUIRED, rate(0, above=True))
    nvme_bytes: int = spec_field(_REQUIRED, size(0))
    nvme_read_bytes_per_s: float = spec_field(_REQUIRED, rate(0))
    nvme_write_bytes_per_s: float = spec_field(_REQUIRED, rate(0))
    host_update_elements_per_s: float = spec_field(_REQUIRED, rate(0, above=True))
    launch_us: float = spec_field(_REQUIRED, real(0))
    curves: Mapping[str, Curve] = spec_field(Table({}), read_curves)
    sources: Mapping[str, str] = spec_field(Table({}), _sources)

    def __post_init__(self) -> None:
        read_fields(self, "Hardware")
        known = [*self.figures(), *KNOWN_FIELDS]
        for name in self.sources:
            if name not in known:
                raise PlanError(f"Hardware.sources: unknown field {name!r}{nearest(name, known)}")

    def figures(self) -> list[str]:
        """Name everything that needs a source: the fields that hold figures, and the curves."""
        return [name for name in KNOWN_FIELDS if name not in UNSOURCED] + list(self.curves)

    def curve(self, name: str) -> Curve | None:
        """Return the curve of that name, None where nothing was measured."""
        return self.curves.get(name)

    def check_world(self, world_size: int) -> None:
        """Refuse more ranks than a node has devices where there is no network between nodes.

        Raises:
            UnpricedError: naming both numbers.
        """
        if world_size > self.devices_per_node and not self.network_bytes_per_s:
            raise UnpricedError(
                f"{self.name} is one node of {self.devices_per_node} devices without a network, "
                f"and the world is {world_size} ranks; give at most {self.devices_per_node}, or a "
                f"file with base: {self.name} and a network_bytes_per_s"
            )

    def machine(self, compute: str = "fp32") -> Machine:
        """Return what the passes plan with, for a plan that computes in the format `compute`.

        Sizes and algorithms are those of the preset for the type of device; rates are ours.

        Raises:
            UnpricedError: the device does not multiply in that format.
        """
        if compute not in self.dense_flops_per_s:
            known = ", ".join(self.dense_flops_per_s)
            raise UnpricedError(
                f"{self.name} has no rate for matrix products in {compute}; it has {known}: "
                f"choose one of them as precision, or add dense_flops_per_s[{compute!r}]"
            )
        preset = CUDA_NCCL if self.device_type == "cuda" else CPU_GLOO
        return dataclasses.replace(
            preset,
            name=self.name,
            backend=self.backend,
            dense_flops_per_s=self.dense_flops_per_s[compute],
            memory_bytes_per_s=self.memory_bytes_per_s,
            host_link_bytes_per_s=self.host_link_bytes_per_s,
        )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Hardware:
        """Return what plain values describe: what `to_dict` gives."""
        check_names("hardware", given, KNOWN_FIELDS)
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Return every field in plain values, as a hardware file holds them."""
        given = {name: getattr(self, name) for name in KNOWN_FIELDS}
        curves = {name: [list(p) for p in curve.points] for name, curve in self.curves.items()}
        tables = {name: dict(given[name]) for name in ("dense_flops_per_s", "sources")}
        return given | tables | {"curves": curves}


KNOWN_FIELDS = [field.name for field in dataclasses.fields(Hardware)]
