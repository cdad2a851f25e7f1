"""Large GPTs from two small depths: layers are alike, so that bytes and times lie on lines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import zerofx
from zerofx.analysis.time.forecast import RESERVED_BYTES, Forecast
from zerofx.hardware import load_hardware
from zerofx.ir.program import Program
from zerofx.tools.demo.gpt import GPT, GPTConfig

DGX2 = "dgx2-v100-32gb"
DEPTHS = (4, 6)
# Where a host stages the states of its files: checkpoints count once they are more than those.
DEEP = (12, 14)
SEQ = 1024
# ZeRO-Infinity's: all states on NVMe, checkpoints in host memory, linears tile by tile
NVME = {"parameters": "nvme", "optimizer": "nvme", "activations": "cpu", "path": "/nvme"}
HOST = {"parameters": "cpu", "optimizer": "cpu", "activations": "cpu"}


@cache
def gpt(width: int, layers: int, batch: int, seq: int = SEQ, tied: bool = True) -> Program:
    """Return a captured GPT in fp16, of heads that are 128 wide or a little more."""
    heads = next(n for n in range(max(width // 128, 1), 0, -1) if width % n == 0)
    shape = {"layers": layers, "width": width, "heads": heads, "seq": seq, "vocab": 51200}
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape, tied=tied))
        tokens = torch.zeros(batch, seq, dtype=torch.long)
    return zerofx.capture(model, (tokens, tokens), compute_dtype=torch.float16)


def infinity(tiles: int = 4, edges: int = 1, **offload: str) -> dict[str, Any]:
    """Return the plan of a model that is larger than its devices.

    tiles: of each linear of a layer. edges: of embedding and head, where they are not tied.
    """
    tiling: Any = {"blocks.*.mlp": tiles, "blocks.*.attn": tiles} if tiles > 1 else "off"
    if edges > 1:
        tiling |= {"embed": edges, "head": edges}
    return {
        "stage": 3, "precision": "fp16", "activations": "recompute", "prefetch": 1,
        "tiling": tiling, "offload": offload or NVME,
    }  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A figure by depth: what the edges take, and what each layer does."""

    edge: float
    layer: float

    def at(self, layers: float) -> float:
        return self.edge + self.layer * layers


@dataclass(frozen=True)
class Family:
    """GPTs of one width under one plan on one hardware, by the number of layers."""

    params: Line
    device_bytes: Line
    host_bytes: Line
    nvme_bytes: Line
    step_us: Line
    flops: Line

    def tflops(self, layers: float) -> float:
        """Operations a device and second, recomputed ones included, as the papers count them."""
        return self.flops.at(layers) / self.step_us.at(layers) / 1e6

    @property
    def device_limit(self) -> int:
        """Bytes of a device that a model may take."""
        return load_hardware(DGX2).device_memory_bytes - RESERVED_BYTES["cuda"]

    def most_layers(self, world: int, nvme_bytes: float | None = None) -> tuple[float, str]:
        """Return the most layers that fit a number of devices, and the tier that ends it."""
        node = load_hardware(DGX2)
        sharing = min(world, node.devices_per_node)
        tiers = {
            "device": (self.device_bytes, self.device_limit),
            "host": (self.host_bytes, node.host_memory_bytes / sharing),
            "nvme": (self.nvme_bytes, (nvme_bytes or node.nvme_bytes) / sharing),
        }
        limits = {name: _most(line, have) for name, (line, have) in tiers.items()}
        tier = min(limits, key=limits.__getitem__)
        return limits[tier], tier


def _most(line: Line, have: float) -> float:
    """Return the most layers that a tier holds: none where the edges alone are too much for it."""
    if line.layer > 0:
        return (have - line.edge) / line.layer
    return math.inf if line.edge <= have else 0.0


@cache
def _family(
    width: int,
    batch: int,
    plan: str,
    world: int,
    seq: int,
    tied: bool,
    depths: tuple[int, int],
) -> Family:
    settled = zerofx.Plan.from_json(plan)
    found = [_figures(step(gpt(width, n, batch, seq, tied), settled, world)) for n in depths]
    few, many = depths
    slope = {k: (found[1][k] - found[0][k]) / (many - few) for k in found[0]}
    return Family(**{k: Line(found[0][k] - few * slope[k], slope[k]) for k in slope})


def family(
    width: int,
    batch: int,
    plan: dict[str, Any],
    world: int,
    seq: int = SEQ,
    tied: bool = True,
    depths: tuple[int, int] = DEPTHS,
) -> Family:
    """Return the GPTs of one width in one plan on DGX-2 nodes."""
    return _family(width, batch, zerofx.Plan.from_dict(plan).to_json(), world, seq, tied, depths)


def step(captured: Program, plan: zerofx.Plan | dict[str, Any], world: int) -> Forecast:
    """Return what a step takes on DGX-2 nodes."""
    return zerofx.predict(captured, plan, hardware=DGX2, world_size=world).forecast


def _figures(found: Forecast) -> dict[str, float]:
    params = found.program.params.values()
    return {
        "params": sum(torch.Size(p.shape).numel() for p in params),
        "device_bytes": found.memory.peak_bytes,
        "host_bytes": found.memory.host_bytes,
        "nvme_bytes": found.memory.nvme_bytes,
        "step_us": found.timeline.step_us,
        "flops": found.flops,
    }
