"""Hardware: one node type and its network, with the default sizes of a plan.

Planning and predicting read a description and never measure, so that every rank, and a laptop,
decides the same. Presets are in `nodes/`; a file may extend one.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from zerofx.errors import PlanError, UnpricedError, as_sentence
from zerofx.hardware.curve import Curve, Table, read_curves
from zerofx.plan.fields import (
    check_names,
    load_mapping,
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

Algorithm = Literal["direct", "native"]

_REQUIRED: Any = dataclasses.MISSING
FORMATS = ("fp32", "fp16", "bf16")
MEASURED = "measured by zerofx doctor --calibrate"
_RATE = re.compile(r"([\d.]+)\s*([KMGTP]?)(?:i?B|FLOPS)?(?:/s)?", re.IGNORECASE)
_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
NODES = Path(__file__).parent / "nodes"

# The default hardware: for planning, and for a device of that type.
DEFAULT = "cpu-box"
DEFAULTS = {"cpu": DEFAULT, "cuda": "dgx-h100"}
# Former names, which `machine=` and files may still use.
OLD_NAMES = {"cpu-gloo": "cpu-box", "cuda-nccl": "dgx-h100"}

# Default sizes of a description, by type of device.
SIZES: dict[str, dict[str, int]] = {
    "cpu": {
        # Small parameters travel in the flat buffer of their unit at no cost. A unit with no others
        # is merged into a neighbour's bucket. Keeping them apart would add a refresh and a
        # reduction per step (GPT, 4 layers x 32 wide: 5 collectives per step instead of 3).
        "persist_below_bytes": 0,
        # Between ranks of one host, a collective costs some 30 us besides its bytes, as much as 0.2
        # MiB. Larger buckets hold more memory: with 4 MiB a whole GPT of 4 x 128 was gathered at
        # its peak, which made its step 2 % faster.
        "bucket_bytes": 2**20,
        # A direct exchange posts 2 * (world - 1) messages and receives into world - 1 buffers. This
        # works well within a host; between hosts they compete for one network port.
        "direct_exchange_max_world": 8,
        # Measured from 1 KiB to 16 MiB at 2 and 4 ranks: a direct gather is never slower, a direct
        # reduce 1.3 to 10 times faster, since gloo's reduce-scatter is an all-reduce of a copy.
        "direct_gather_min_bytes": 0,
        "direct_reduce_min_bytes": 0,
        # A copy of 64 KiB takes about as long as its launch and its wait, some 10 us.
        "offload_min_bytes": 64 * 2**10,
        # One unit ahead hides as much as two, since transfers share the cores with compute.
        "prefetch": 1,
    },
    "cuda": {
        # Like DeepSpeed's stage3_param_persistence_threshold (1e5 elements), but in bytes: norms
        # and biases up to 25,600 fp32 elements, a few MiB in the largest models.
        "persist_below_bytes": 100 * 2**10,
        # At 25 GB/s (one 200 Gbit/s port per GPU) 64 MiB take 2.7 ms, so that launch and latency
        # are under 2 % of a collective.
        "bucket_bytes": 64 * 2**20,
        "direct_exchange_max_world": 0,
        "direct_gather_min_bytes": 0,
        "direct_reduce_min_bytes": 0,
        # At 25 GB/s 1 MiB takes 40 us, four times what a launch and its events cost the host.
        "offload_min_bytes": 2**20,
        # Transfers need no compute, and a second unit ahead absorbs jitter between hosts.
        "prefetch": 2,
    },
}
# Fields without a source: names, sizes (which are choices), and the tables of curves and sources.
UNSOURCED = frozenset(
    {"name", "device", "device_type", "backend", "curves", "sources", *SIZES["cpu"]}
)


def rate(least: float, above: bool = False) -> Any:
    """Parse a rate per second: a number, or text such as `300 GB/s` (powers of 1000)."""
    number = real(least, above=above)

    def read(where: str, value: Any) -> float:
        match = _RATE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is not None and "ib" not in value.lower():
            value = float(match[1]) * _SCALES[match[2].upper()]
        return number(where, value)

    return read


def _rates(where: str, value: Any) -> Table[float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = dict.fromkeys(FORMATS, value)  # the same in every format
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
    """A node type and the network between such nodes; rates are bytes or operations per second.

    name, device: the preset's name, the product's.
    device_type, backend: what `torch.device(...).type` and the process group are called.

    Default sizes of a plan:
    persist_below_bytes: parameters of fewer bytes stay gathered.
    bucket_bytes: smaller units are merged into one collective up to this.
    direct_exchange_max_world: largest world whose gathers and reduces are direct exchanges,
    direct_gather_min_bytes, direct_reduce_min_bytes: from this many bytes of a full bucket.
    offload_min_bytes: activations of fewer bytes stay on the device.
    prefetch: distance, in units.

    Figures; a missing one is that of the default hardware for the type of device:
    devices_per_node: number of devices that share fast links, host memory and disks; one per rank.
    device_memory_bytes, memory_bytes_per_s: of one device.
    dense_flops_per_s: peak rate of matrix products, by format, without formats that the device does
        not multiply fast. A single number is for every format.
    node_link_bytes_per_s: between devices of a node, per device, one way.
    network_bytes_per_s: between nodes, all ports of one node, one way; 0 if there is none.
    node_latency_us, network_latency_us: of one hop within a node, between two nodes.
    host_memory_bytes, host_memory_bytes_per_s: of the whole node.
    host_link_bytes_per_s: between host and one device, one way.
    node_host_link_bytes_per_s: the same for all devices of a node at once, which may share links.
    nvme_bytes, nvme_read_bytes_per_s, nvme_write_bytes_per_s: of the whole node; 0 if none.
    host_update_elements_per_s: elements that Adam updates on the host of one node.
    launch_us: time of the host for one launch.
    curves: measurements by size. A name is a kind and its details, joined by dots, as in
        `matmul.bf16`, `memory.pointwise.inductor`, `all_gather.direct.2`; `curve.KINDS` lists the
        kinds with the meaning of x and of the value. Compute and copies are measured on one rank
        alone, and under the same name with `.2` on two ranks of a node at once. Shares refer to the
        field named there, may exceed 1 (in caches) and are constant beyond the ends (`Curve.at`);
        times grow in proportion to x beyond the last point (`Curve.time_at`).
    sources: the source of each figure, by field, and by name for curves.

    Raises:
        PlanError: a field is unknown, missing or out of range; the message names it.

    Example:
        from zerofx.hardware import load_hardware

        hardware = load_hardware("dgx-h100")  # a preset, or a file
        slower = dataclasses.replace(hardware, network_bytes_per_s=25e9)
        print(zerofx.predict("model.py:build", hardware=slower, world_size=16))
    """

    name: str = spec_field(_REQUIRED, text)
    device: str = spec_field(None, text)
    device_type: str = spec_field(_REQUIRED, one_of("cpu", "cuda"))
    backend: str = spec_field(_REQUIRED, one_of("gloo", "nccl"))
    persist_below_bytes: int = spec_field(_REQUIRED, size(0))
    bucket_bytes: int = spec_field(_REQUIRED, size(0))
    direct_exchange_max_world: int = spec_field(_REQUIRED, whole(0))
    direct_gather_min_bytes: int = spec_field(_REQUIRED, size(0))
    direct_reduce_min_bytes: int = spec_field(_REQUIRED, size(0))
    offload_min_bytes: int = spec_field(_REQUIRED, size(0))
    prefetch: int = spec_field(_REQUIRED, whole(0))
    devices_per_node: int = spec_field(None, whole(1))
    device_memory_bytes: int = spec_field(None, size(1))
    dense_flops_per_s: Mapping[str, float] = spec_field(_REQUIRED, _rates)
    memory_bytes_per_s: float = spec_field(_REQUIRED, rate(0, above=True))
    node_link_bytes_per_s: float = spec_field(None, rate(0, above=True))
    node_latency_us: float = spec_field(None, real(0))
    network_bytes_per_s: float = spec_field(None, rate(0))
    network_latency_us: float = spec_field(None, real(0))
    host_memory_bytes: int = spec_field(None, size(1))
    host_memory_bytes_per_s: float = spec_field(None, rate(0, above=True))
    host_link_bytes_per_s: float = spec_field(_REQUIRED, rate(0, above=True))
    node_host_link_bytes_per_s: float = spec_field(None, rate(0, above=True))
    nvme_bytes: int = spec_field(None, size(0))
    nvme_read_bytes_per_s: float = spec_field(None, rate(0))
    nvme_write_bytes_per_s: float = spec_field(None, rate(0))
    host_update_elements_per_s: float = spec_field(None, rate(0, above=True))
    launch_us: float = spec_field(None, real(0))
    curves: Mapping[str, Curve] = spec_field(Table({}), read_curves)
    sources: Mapping[str, str] = spec_field(Table({}), _sources)

    def __post_init__(self) -> None:
        self._complete()
        read_fields(self, "Hardware")
        known = [*self.figures(), *KNOWN_FIELDS]
        for name in self.sources:
            if name not in known:
                raise PlanError(f"Hardware.sources: unknown field {name!r}{nearest(name, known)}")

    def _complete(self) -> None:
        """Fill missing figures from the default hardware for the type of device."""
        left_out = [name for name in KNOWN_FIELDS if getattr(self, name) is None]
        if not left_out or self.device_type not in DEFAULTS:
            return
        default = default_hardware(self.device_type)
        for name in left_out:
            object.__setattr__(self, name, getattr(default, name))
        figures = (name for name in left_out if name not in UNSOURCED)
        sources = dict.fromkeys(figures, f"as {default.name}") | dict(self.sources)
        object.__setattr__(self, "sources", sources)

    def figures(self) -> list[str]:
        """Return the names that need a source: fields with figures, and curves."""
        return [name for name in KNOWN_FIELDS if name not in UNSOURCED] + list(self.curves)

    def curve(self, name: str) -> Curve | None:
        """Return the curve of that name, None if it was not measured."""
        return self.curves.get(name)

    def algorithm(
        self, collective: Literal["gather", "reduce"], backend: str, nbytes: int, world_size: int
    ) -> Algorithm:
        """Return how a bucket of `nbytes` (full) is gathered or reduced over `world_size` ranks.

        `"direct"`: each rank sends each other rank its part (batch_isend_irecv); `"native"`: the
        backend's own collective. Both sum in rank order, so the choice never changes a bit. It
        depends on these arguments and this description alone, so that all ranks agree.
        """
        least = self.direct_gather_min_bytes
        if collective == "reduce":
            least = self.direct_reduce_min_bytes
        # NCCL's own collectives follow the topology; a direct exchange would not.
        is_direct = backend == "gloo" and 2 <= world_size <= self.direct_exchange_max_world
        return "direct" if is_direct and nbytes >= least else "native"

    def check_world(self, world_size: int) -> None:
        """Refuse more ranks than a node has devices if there is no network between nodes.

        Raises:
            UnpricedError: the world is too large; the message has both numbers.
        """
        if world_size > self.devices_per_node and not self.network_bytes_per_s:
            raise UnpricedError(
                f"{self.name} is one node of {self.devices_per_node} devices without a network. "
                f"The world is {world_size} ranks. Give at most {self.devices_per_node}, or a "
                f"file with base: {self.name} and a network_bytes_per_s."
            )

    def check_format(self, compute: str) -> None:
        """Refuse a format without a rate for matrix products.

        Raises:
            UnpricedError: the format has none; the message names those that have one.
        """
        if compute not in self.dense_flops_per_s:
            known = ", ".join(self.dense_flops_per_s)
            raise UnpricedError(
                f"{self.name} has no rate for matrix products in {compute}. It has {known}. "
                f"Set precision to one of them, or add dense_flops_per_s[{compute!r}]."
            )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Hardware:
        """Return the hardware of plain values, as `to_dict` returns them; sizes are optional."""
        check_names("hardware", given, KNOWN_FIELDS)
        return cls(**with_sizes(given))

    def to_dict(self) -> dict[str, Any]:
        """Return every field in plain values, as a hardware file holds them."""
        given = {name: getattr(self, name) for name in KNOWN_FIELDS}
        curves = {name: [list(p) for p in curve.points] for name, curve in self.curves.items()}
        tables = {name: dict(given[name]) for name in ("dense_flops_per_s", "sources")}
        return given | tables | {"curves": curves}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Hardware:
        """Read a YAML or JSON file; see `load_hardware`."""
        return load_hardware(Path(path))


KNOWN_FIELDS = [field.name for field in dataclasses.fields(Hardware)]
OPTIONAL = ("curves", "sources")
MERGED = ("dense_flops_per_s", *OPTIONAL)
# A file without a base has one of these: all figures, or all that planning reads.
COMPLETE = {
    "hardware": [n for n in KNOWN_FIELDS if n not in OPTIONAL and n not in SIZES["cpu"]],
    "machine": [f.name for f in dataclasses.fields(Hardware) if f.default is _REQUIRED],
}


def with_sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with default sizes for the type of device filled in."""
    return {**SIZES.get(str(given.get("device_type")), {}), **given}


def default_hardware(device_type: str = "cpu") -> Hardware:
    """Return the default hardware for a type of device."""
    return _shipped(DEFAULTS[device_type])


def hardware_for(
    device: torch.device | str, given: Hardware | str | os.PathLike[str] | None = None
) -> Hardware:
    """Return the hardware to plan for: the one given, else the default for `device`.

    given: a description, a preset's name, or the path of a YAML or JSON file. Its type of device
        may differ, so that a laptop can plan for GPUs.

    Raises:
        PlanError: no such preset or file, or no default for this type of device.
    """
    if isinstance(given, Hardware):
        return given
    if given is not None:
        if not isinstance(given, (str, os.PathLike)):
            raise PlanError(
                f"machine is of type {type(given).__name__}. Give a Hardware, a preset's name "
                f"({', '.join(hardware_names())}), a file, or None."
            )
        return load_hardware(given, "machine")
    device_type = torch.device(device).type
    if device_type not in DEFAULTS:
        raise PlanError(
            f"there is no machine preset for device type {device_type!r}. Presets are "
            f"{', '.join(hardware_names())}. Pass machine= with one of them or a file."
        )
    return default_hardware(device_type)


def hardware_names() -> list[str]:
    """List the presets, in the order of their names."""
    return sorted(path.stem for path in NODES.glob("*.yaml"))


def load_hardware(name_or_path: str | os.PathLike[str], what: str = "hardware") -> Hardware:
    """Return the preset of that name, or the hardware that a YAML or JSON file describes.

    `base: dgx-h100` in a file fills missing fields from that preset, or from a file in the same
    folder; entries of `dense_flops_per_s`, `curves` and `sources` are added to those of the base.
    The name defaults to that of the file. A changed figure without a source gets the file as its
    source. Without a base a file has all figures or all that planning reads; sizes are optional.

    what: its name in errors: "hardware" or "machine".

    Raises:
        PlanError: no such preset, or a field that is unknown, missing or out of range.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise PlanError(
            f"{what} is an object of type {type(name_or_path).__name__}. Give the name of a preset "
            f"({', '.join(hardware_names())}), a file, or a Hardware."
        )
    if isinstance(name_or_path, os.PathLike) or Path(name_or_path).suffix in (
        ".yaml", ".yml", ".json"
    ):  # fmt: skip
        return _from_file(Path(name_or_path), (), what)
    return _preset(str(name_or_path), what)


def _preset(name: str, what: str) -> Hardware:
    known = hardware_names()
    if name not in known and name not in OLD_NAMES:
        longer = [each for each in known if name and name.lower() in each]
        close = longer or difflib.get_close_matches(name, [*known, *OLD_NAMES], n=1, cutoff=0.4)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PlanError(
            f"unknown {what} {name!r}.{hint} Give {', '.join(known)}, or a file that ends in "
            ".yaml, .yml or .json."
        )
    return _shipped(OLD_NAMES.get(name, name))


@cache
def _shipped(name: str) -> Hardware:
    return _from_file(NODES / f"{name}.yaml", (), "hardware")


def _from_file(path: Path, above: tuple[Path, ...], what: str) -> Hardware:
    path = path.resolve()
    if path in above:
        raise PlanError(
            f"{what} file {path} is its own base: {' -> '.join(map(str, above))}. Remove a base."
        )
    given = load_mapping(path, what)
    base = given.pop("base", None)
    try:
        check_names(what, given, KNOWN_FIELDS)
        # A preset's sources are complete, which a test checks; a user's file may have none.
        if path.parent != NODES.resolve():
            given["sources"] = {**_given_in(path, given), **_mapping("sources", given)}
        return Hardware(**_complete(path, given, base, (*above, path), what))
    except PlanError as error:
        raise PlanError(f"{what} file {path}: {as_sentence(error)}") from error


def _given_in(path: Path, given: Mapping[str, Any]) -> dict[str, str]:
    curves = _mapping("curves", given)
    fields = [name for name in given if name not in UNSOURCED]
    return {str(name): f"given in {path.name}" for name in (*fields, *curves)}


def _complete(
    path: Path, given: dict[str, Any], base: Any, above: tuple[Path, ...], what: str
) -> dict[str, Any]:
    if base is None:
        missing = {form: [n for n in names if n not in given] for form, names in COMPLETE.items()}
        if all(missing.values()):
            raise PlanError(
                f"leaves out {', '.join(missing[what])}. Set them, or name a preset that has them: "
                f"base: {hardware_names()[0]}."
            )
        return with_sizes(given)
    if not isinstance(base, str):
        raise refuse("base", base, "is the name of a preset or a file")
    is_file = Path(base).suffix in (".yaml", ".yml", ".json")
    found = _from_file(path.parent / base, above, what) if is_file else _preset(base, what)
    complete = found.to_dict() | {"name": path.stem} | given
    for name in MERGED:
        is_number = isinstance(given.get(name), (int, float))  # one rate for every format
        if not (is_number and name == "dense_flops_per_s"):
            complete[name] = {**getattr(found, name), **_mapping(name, given)}
    return complete


def _mapping(name: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise refuse(f"Hardware.{name}", value, "is a mapping")
    return value


def write_hardware(hardware: Hardware, path: str | os.PathLike[str]) -> None:
    """Write a YAML file that `load_hardware` reads back, one field, curve or source per line."""
    lines = []
    for name, value in hardware.to_dict().items():
        if not isinstance(value, dict):
            lines.append(f"{name}: {_plain(value)}")
            continue
        lines.append(f"{name}:" if value else f"{name}: {{}}")
        lines += [f"  {key}: {_plain(each)}" for key, each in value.items()]
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"hardware file {path} cannot be written: {error.strerror}. Choose another path."
        ) from error


def _plain(value: Any) -> str:
    """Return a value on one line; to YAML a number with an exponent but no dot is text."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if isinstance(value, float):
        digits, e, exponent = repr(value).partition("e")
        return digits + ("" if "." in digits or not e else ".0") + e + exponent
    return json.dumps(value, ensure_ascii=False)
