"""zerofx doctor: check that this machine can compile and train."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from zerofx.capture import capture
from zerofx.compat.inductor import compile_region, inductor_problem
from zerofx.errors import DoctorError, ZerofxError
from zerofx.plan.sizes import format_bytes
from zerofx.runtime.regions.keys import cache_dir

OLDEST, NEWEST = (2, 11), (2, 13)  # of torch: what pyproject.toml allows
STORE_ROUNDS = 200
SLOW_STORE_US = 2000.0  # agreement accesses the store twice per step


@dataclass(frozen=True)
class Finding:
    """The result of one check, with a remedy if it failed.

    is_needed: training on this machine's devices needs it.
    """

    name: str
    is_well: bool
    found: str
    remedy: str = ""
    is_needed: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """All findings: print it, or take `to_dict()` for JSON."""

    findings: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        return all(f.is_well for f in self.findings if f.is_needed)

    def __str__(self) -> str:
        lines = []
        for f in self.findings:
            mark = "ok  " if f.is_well else ("FAIL" if f.is_needed else "none")
            lines.append(f"{mark}  {f.name:<18} {f.found}")
            if not f.is_well and f.remedy:
                lines.append(f"{'':<25}{f.remedy}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as plain values."""
        return {"is_well": self.is_well, "findings": [vars(f) for f in self.findings]}


def checks() -> tuple[Finding, ...]:
    """Run every check."""
    done = []
    for name, check in CHECKS.items():
        try:
            done.append(check(name))
        except (ZerofxError, OSError, RuntimeError, ValueError, ImportError) as e:
            done.append(Finding(name, False, f"{type(e).__name__}: {e}".split("\n")[0]))
    return tuple(done)


def _torch(name: str) -> Finding:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    found = f"{torch.__version__}, Python {platform.python_version()}"
    remedy = f"zerofx supports torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    return Finding(name, OLDEST <= version <= NEWEST, found, remedy)


def _devices(name: str) -> Finding:
    if not torch.cuda.is_available():
        return Finding(name, True, f"CPU, {os.cpu_count()} cores; no CUDA device")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding(name, True, f"{len(names)} CUDA: {', '.join(sorted(set(names)))}")


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu().sum()


def _capture(name: str) -> Finding:
    """Capture and rewrite a model, which uses torch's private tracing."""
    began = time.perf_counter()
    program = zerofx.rewrite(capture(_Tiny(), (torch.zeros(2, 4),)), {"stage": 3}, 2)
    nodes = sum(len(gm.graph.nodes) for gm in program.graphs.values())
    return Finding(name, True, f"{nodes} nodes in {time.perf_counter() - began:.1f} s")


def _training(name: str) -> Finding:
    """Train one step and compare its gradient with eager's."""
    torch.manual_seed(0)
    plain, x = _Tiny(), torch.randn(2, 4)
    expected = torch.autograd.grad(plain(x), plain.inner.weight)[0]
    model = zerofx.compile(plain, {"kernels": "aten"}, device="cpu")
    model(x).backward()
    grad = model.get_parameter("inner.weight").grad
    if grad is None or not torch.equal(torch.as_tensor(grad), expected):
        raise DoctorError("a compiled step gives another gradient than eager PyTorch. Report it.")
    return Finding(name, True, "one step gives eager's gradient, bit for bit")


def _compiler(name: str) -> Finding:
    """Compile a region with Inductor, as kernels='inductor' does."""
    if problem := inductor_problem():
        return Finding(
            name, False, problem, "regions run as ATen. Install a C++ compiler", is_needed=False
        )
    began = time.perf_counter()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.relu.default, (x,)),))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    with tempfile.TemporaryDirectory() as folder:
        specs = (("float32", (8,), (1,), "cpu"),)
        region = compile_region(gm, specs, str(Path(folder) / "probe.bin"))
    if region is None or region([torch.full((8,), -1.0)])[0].any():
        raise DoctorError("a compiled region gives a wrong result.")
    return Finding(name, True, f"Inductor compiled a region in {time.perf_counter() - began:.1f} s")


def _triton(name: str) -> Finding:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        remedy = "CUDA kernels need it. Run pip install triton"
        return Finding(name, False, "not installed", remedy, torch.cuda.is_available())
    return Finding(name, True, version, is_needed=False)


def _backends(name: str) -> Finding:
    """Run an all-reduce of one rank over gloo, which opens its sockets."""
    has = [b for b in ("gloo", "nccl") if getattr(dist, f"is_{b}_available")()]
    wants = "nccl" if torch.cuda.is_available() else "gloo"
    if wants not in has:
        return Finding(name, False, ", ".join(has) or "none", f"this torch lacks {wants}")
    if dist.is_initialized():
        return Finding(name, True, f"{', '.join(has)}; a process group is up")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        value = torch.ones(4)
        dist.all_reduce(value)
    finally:
        dist.destroy_process_group()
    if value.sum().item() != 4.0:
        raise DoctorError("an all-reduce over gloo gives a wrong result.")
    return Finding(name, True, f"{', '.join(has)}; gloo exchanges")


def _latency(name: str) -> Finding:
    """Time the store by which ranks compare their calls."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=10))
    began = time.perf_counter()
    for i in range(STORE_ROUNDS):
        store.set("probe", str(i))
        store.get("probe")
    each_us = (time.perf_counter() - began) / STORE_ROUNDS * 1e6
    found = f"{each_us:.0f} us to write and read back, on this host"
    return Finding(
        name, each_us < SLOW_STORE_US, found, "the host is busy. Try again later", is_needed=False
    )


def _cache(name: str) -> Finding:
    """Write into the cache of compiled regions."""
    root = cache_dir()
    with tempfile.NamedTemporaryFile(dir=root) as probe:
        probe.write(b"zerofx")
    free = shutil.disk_usage(root).free
    found = f"{root}, private, {format_bytes(free)} free"
    return Finding(
        name,
        free > 2**30,
        found,
        "the regions of a large model need about 100 MiB. Free some space",
    )


CHECKS: dict[str, Callable[[str], Finding]] = {
    "torch": _torch,
    "devices": _devices,
    "capture": _capture,
    "training": _training,
    "compiler": _compiler,
    "triton": _triton,
    "backends": _backends,
    "store": _latency,
    "cache": _cache,
}
