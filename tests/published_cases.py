"""Large GPTs from two small depths: layers are alike, so that bytes and times lie on lines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import zerofx
from zerofx.analysis.forecast import RESERVED_BYTES, Forecast, forecast
from zerofx.demo.gpt import GPT, GPTConfig
from zerofx.hardware import load_hardware
from zerofx.ir.program import Program

DGX2 = "dgx2-v100-32gb"
DEPTHS = (4, 6)
SEQ = 1024
# ZeRO-Infinity's: all states on NVMe, checkpoints in host memory, linears tile by tile
NVME = {"parameters": "nvme", "optimizer": "nvme", "activations": "cpu", "path": "/nvme"}
HOST = {"parameters": "cpu", "optimizer": "cpu", "activations": "cpu"}


@cache
def gpt(width: int, layers: int, batch: int, seq: int = SEQ, vocab: int = 51200) -> Program:
    """Return a captured GPT in fp16, of heads that are 128 wide at most; nothing is allocated."""
    heads = max(width // 128, 1)
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, width=width, heads=heads, seq=seq, vocab=vocab))
        tokens = torch.zeros(batch, seq, dtype=torch.long)
    return zerofx.capture(model, (tokens, tokens), compute_dtype=torch.float16)


def infinity(tiles: int = 4, **offload: str) -> dict[str, Any]:
    """Return the plan of a model that is larger than its devices."""
    tiling = {"blocks.*.mlp": tiles, "blocks.*.attn": tiles} if tiles > 1 else "off"
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

    def most_layers(self, world: int, nvme_bytes: float | None = None) -> tuple[float, str]:
        """Return the most layers that fit a number of devices, and the tier that ends it."""
        node = load_hardware(DGX2)
        sharing = min(world, node.devices_per_node)
        tiers = {
            "device": (self.device_bytes, node.device_memory_bytes - RESERVED_BYTES["cuda"]),
            "host": (self.host_bytes, node.host_memory_bytes / sharing),
            "nvme": (self.nvme_bytes, (nvme_bytes or node.nvme_bytes) / sharing),
        }
        limits = {
            name: (have - line.edge) / line.layer
            for name, (line, have) in tiers.items()
            if line.layer > 0
        }
        tier = min(limits, key=limits.__getitem__)
        return limits[tier], tier


@cache
def _family(width: int, batch: int, plan: str, world: int, seq: int) -> Family:
    found: list[dict[str, float]] = []
    for depth in DEPTHS:
        captured = gpt(width, depth, batch, seq)
        node = load_hardware(DGX2)
        program = zerofx.rewrite(captured, zerofx.Plan.from_json(plan), world, node.machine("fp16"))
        found.append(_figures(forecast(program, node)))
    few, many = DEPTHS
    slope = {k: (found[1][k] - found[0][k]) / (many - few) for k in found[0]}
    return Family(**{k: Line(found[0][k] - few * slope[k], slope[k]) for k in slope})


def family(width: int, batch: int, plan: dict[str, Any], world: int, seq: int = SEQ) -> Family:
    """Return the GPTs of one width in one plan on DGX-2 nodes."""
    return _family(width, batch, zerofx.Plan.from_dict(plan).to_json(), world, seq)


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
