"""What zerofx knows of a machine before it runs there: sizes and algorithms.

Planning reads a description and never measures, so every rank, and a laptop, decides alike.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from zerofx.errors import PlanError
from zerofx.fields import (
    check_names,
    load_mapping,
    nearest,
    one_of,
    read_fields,
    real,
    size,
    spec_field,
    text,
    whole,
)

Algorithm = Literal["direct", "native"]

_REQUIRED: Any = dataclasses.MISSING


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One rank's share of a machine: its device, its backend, its sizes.

    name: for dumps, and for finding a preset.
    device_type, backend: what `torch.device(...).type` and the process group are called.
    persist_below_bytes: parameters of fewer bytes stay gathered.
    bucket_bytes: smaller units are merged into one collective up to this.
    direct_exchange_max_world: largest world whose gathers and reduces are direct exchanges,
    direct_gather_min_bytes, direct_reduce_min_bytes: from this many bytes of a full bucket.
    offload_min_bytes: activations of fewer bytes stay on the device.
    prefetch: distance, in units.
    dense_flops_per_s: of matrix products in the format that a plan computes in.
    memory_bytes_per_s: between compute and device memory, reads and writes together.
    host_link_bytes_per_s: between device and host memory, one way.

    Raises:
        PlanError: a field is unknown, missing or out of range; the message names it.
    """

    name: str = spec_field(_REQUIRED, text)
    device_type: str = spec_field(_REQUIRED, one_of("cpu", "cuda"))
    backend: str = spec_field(_REQUIRED, one_of("gloo", "nccl"))
    persist_below_bytes: int = spec_field(_REQUIRED, size(0))
    bucket_bytes: int = spec_field(_REQUIRED, size(0))
    direct_exchange_max_world: int = spec_field(_REQUIRED, whole(0))
    direct_gather_min_bytes: int = spec_field(_REQUIRED, size(0))
    direct_reduce_min_bytes: int = spec_field(_REQUIRED, size(0))
    offload_min_bytes: int = spec_field(_REQUIRED, size(0))
    prefetch: int = spec_field(_REQUIRED, whole(0))
    dense_flops_per_s: float = spec_field(_REQUIRED, real(0, above=True))
    memory_bytes_per_s: float = spec_field(_REQUIRED, real(0, above=True))
    host_link_bytes_per_s: float = spec_field(_REQUIRED, real(0, above=True))

    def __post_init__(self) -> None:
        read_fields(self, "Machine")

    def algorithm(
        self, collective: Literal["gather", "reduce"], backend: str, nbytes: int, world_size: int
    ) -> Algorithm:
        """Return how a bucket of `nbytes` (full) is gathered or reduced over `world_size` ranks.

        `"direct"`: each rank sends each other rank its part (batch_isend_irecv); `"native"`: the
        backend's own collective. Both sum in rank order, so the choice never changes a bit. It is
        a function of these arguments and this description alone, so that ranks agree on it.
        """
        least = self.direct_gather_min_bytes
        if collective == "reduce":
            least = self.direct_reduce_min_bytes
        # NCCL's own collectives follow the topology; a direct exchange would not.
        is_direct = backend == "gloo" and 2 <= world_size <= self.direct_exchange_max_world
        return "direct" if is_direct and nbytes >= least else "native"

    def to_dict(self) -> dict[str, Any]:
        """Return every field in plain values, as a machine file holds them."""
        return dataclasses.asdict(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """Read a machine from a YAML or JSON file.

        `base: cpu-gloo` takes the fields that the file leaves out from that preset.
        """
        given = load_mapping(Path(path), "machine")
        base = given.pop("base", None)
        check_names("machine", given, [f.name for f in dataclasses.fields(cls)])
        if base is not None:
            return dataclasses.replace(preset(base), **given)
        missing = [f.name for f in dataclasses.fields(cls) if f.name not in given]
        if missing:
            raise PlanError(
                f"machine file {path} leaves out {', '.join(missing)}; set them, or name a preset "
                f"that has them: base: {next(iter(PRESETS))}"
            )
        return cls(**given)


CPU_GLOO = Machine(
    name="cpu-gloo",
    device_type="cpu",
    backend="gloo",
    # A unit's small parameters travel in its flat buffer for nothing, and a unit that has nothing
    # else is merged into a neighbour's bucket; keeping them apart would add one refresh and one
    # reduction a step (GPT, 4 layers x 32 wide: 3 collectives a step against 5).
    persist_below_bytes=0,
    # gloo's cost per byte doubles from 4 to 16 MB (the buffers leave the caches); below 1 MB
    # the latency shows.
    bucket_bytes=4 * 2**20,
    # A direct exchange posts 2 * (world - 1) messages and receives into world - 1 buffers: fine
    # within one host, but above that they contend for one network port.
    direct_exchange_max_world=8,
    # Measured from 1 KiB to 16 MiB at 2 and 4 ranks: a direct gather is never slower, a direct
    # reduce 1.3 to 10 times faster, since gloo's reduce-scatter is an all-reduce of a copy.
    direct_gather_min_bytes=0,
    direct_reduce_min_bytes=0,
    # A copy of 64 KiB takes about as long as its launch and its wait, some 10 us.
    offload_min_bytes=64 * 2**10,
    # One unit ahead hides as much as two: transfers share the cores with compute.
    prefetch=1,
    # One core of an AMD EPYC virtual machine, torch 2.13: fp32 products of 1024 x 1024, and copies
    # of 32 MiB.
    dense_flops_per_s=69e9,
    memory_bytes_per_s=22e9,
    host_link_bytes_per_s=22e9,  # the host tier is the same memory
)

CUDA_NCCL = Machine(
    name="cuda-nccl",
    device_type="cuda",
    backend="nccl",
    # Like DeepSpeed's stage3_param_persistence_threshold (1e5 elements), but in bytes: norms and
    # biases to 25,600 fp32 wide, a few MiB on the largest models.
    persist_below_bytes=100 * 2**10,
    # At 25 GB/s (one 200 Gbit/s port a GPU) 64 MiB take 2.7 ms, so that launch and latency are
    # under 2 % of a collective.
    bucket_bytes=64 * 2**20,
    direct_exchange_max_world=0,
    direct_gather_min_bytes=0,
    direct_reduce_min_bytes=0,
    # At 25 GB/s 1 MiB takes 40 us, four times what a launch and its events cost the host.
    offload_min_bytes=2**20,
    # Transfers cost no compute, and a second unit ahead absorbs jitter between hosts.
    prefetch=2,
    # NVIDIA's H100 SXM data sheet: bf16 without sparsity, HBM3, PCIe 5 x16 (128 GB/s both ways).
    dense_flops_per_s=989e12,
    memory_bytes_per_s=3.35e12,
    host_link_bytes_per_s=64e9,
)

PRESETS = {machine.name: machine for machine in (CPU_GLOO, CUDA_NCCL)}


def preset(name: str) -> Machine:
    """Return a preset by name."""
    if name not in PRESETS:
        raise PlanError(f"unknown machine {name!r}{nearest(str(name), PRESETS)}, or give a file")
    return PRESETS[name]


def machine_for(
    device: torch.device | str, machine: Machine | str | os.PathLike[str] | None = None
) -> Machine:
    """Return the machine to plan for: the one given, else the preset for `device`.

    machine: a Machine, a preset's name, or the path of a YAML or JSON file. It need not be of
        the device's type: a laptop plans for GPUs.

    Raises:
        PlanError: no such preset or file, or no preset for this type of device.
    """
    if isinstance(machine, Machine):
        return machine
    if machine is not None:
        if not isinstance(machine, (str, os.PathLike)):
            raise PlanError(
                f"machine is of type {type(machine).__name__}; give a Machine, a preset's name "
                f"({', '.join(PRESETS)}), a file, or None"
            )
        is_file = isinstance(machine, os.PathLike) or Path(machine).suffix
        return Machine.load(machine) if is_file else preset(str(machine))
    device_type = torch.device(device).type
    for known in PRESETS.values():
        if known.device_type == device_type:
            return known
    raise PlanError(
        f"no machine preset for device type {device_type!r}; presets are {', '.join(PRESETS)}; "
        "pass machine= with one of them or a machine file"
    )
